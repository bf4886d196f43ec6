"""``diptych inspect``"""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.cli.options import Json


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="DIR|SOURCE", help="An artifact or a checkpoint.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Tell what an artifact or a checkpoint holds, and how much memory it needs."""
    raise NotImplementedError(source, as_json)
