"""``diptych bench``: prefill and decode, measured apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from diptych.cli.console import print_json, show
from diptych.cli.options import Json


def bench(
    artifacts: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Artifact folders.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths, for a first impression.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that medians are taken of.")] = 5,
    sessions: Annotated[
        str | None, typer.Option("--sessions", help="Compare: for example two,one.", show_default=False)
    ] = None,
    threads: Annotated[
        str | None, typer.Option("--threads", help="Compare: for example 1,2. Default: the physical cores.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure prefill and decode on this machine, each by itself, and how near they come to its limits."""
    from diptych.bench import report, run
    from diptych.bench.plan import Plan
    from diptych.runtime.machine import physical_cores
    from diptych.runtime.settings import Sessions

    counts = [_count(each) for each in _listed(threads)] or [physical_cores() or os.cpu_count() or 1]
    variants: dict[str, list[Any]] = {"threads": counts}
    if sessions is not None:
        variants["sessions"] = [_one_of(get_args(Sessions), each) for each in _listed(sessions)]
    plan = Plan.quick(max(counts)) if quick else Plan(threads=max(counts))
    specs, plan, vocabulary = run.artifacts(artifacts, plan, variants)
    done = run.go(specs, plan, vocabulary, rounds, _say)
    found = report.summary(specs, plan, done)
    if as_json:
        print_json(found)
    else:
        show(*report.tables(found))


def _listed(text: str | None) -> list[str]:
    return [] if text is None else list(dict.fromkeys(part.strip() for part in text.split(",")))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--threads takes numbers from 1 up, with commas between: {text!r} is none")
    return int(text)


def _one_of(known: Sequence[str], text: str) -> str:
    if text not in known:
        raise ValueError(f"--sessions takes {', '.join(known)}, with commas between: {text!r} is none of them")
    return text


def _say(remark: str) -> None:
    print(remark, file=sys.stderr, flush=True)
