"""The commands in one application, and what happens to their errors.

Exit codes: 0 done, 1 a check failed, 2 wrong input, 130 interrupted.  Wrong input costs one line on stderr; anything
unexpected keeps its traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from diptych import __version__
from diptych.cli.bench import bench
from diptych.cli.chat import chat
from diptych.cli.convert import convert
from diptych.cli.errors import UsageError, explain
from diptych.cli.export import export
from diptych.cli.inspect import inspect
from diptych.cli.run import run
from diptych.cli.tune import tune
from diptych.cli.verify import verify

app = typer.Typer(
    name="diptych",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diptych {__version__}")
        raise typer.Exit


@app.callback()
def diptych(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Pretrained decoder-only language models as two compiled programs, prefill and decode."""


for command in (export, convert, verify, run, chat, inspect, tune, bench):
    app.command()(command)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"Warning: {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Text that the terminal's encoding cannot show should not end an answer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    try:
        code: int | None = app(given or ["--help"], prog_name="diptych", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UsageError, ValueError, OSError, ModuleNotFoundError) as error:
        line = explain(error, given)
        if line is None:
            raise
        print(f"Error: {line}", file=sys.stderr)
        return 2
    return code or 0
