"""``diptych convert``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from diptych.cli.console import print_json, progress_bars, show
from diptych.cli.options import Adapters, Json, parse_adapters


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Any checkpoint, or an artifact of floats.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to make.", show_default=False)
    ],
    to: Annotated[Literal["orbax"], typer.Option("--to", help="The format: an Orbax checkpoint.")] = "orbax",
    adapter: Adapters = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's parameters in another format."""
    from diptych.export.convert import convert as convert_checkpoint

    with progress_bars() as progress:
        path = convert_checkpoint(source, output, to=to, adapters=parse_adapters(adapter), progress=progress)
    if as_json:
        print_json({"path": str(path), "format": to})
    else:
        show(f"Wrote {path}.")
