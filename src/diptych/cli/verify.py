"""``diptych verify``"""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.cli.console import print_json, progress_bars, show
from diptych.cli.options import Adapters, Artifact, Json, parse_adapters
from diptych.cli.parity import parity_table


def verify(
    artifact: Artifact,
    source: Annotated[
        str | None, typer.Option("--source", help="Check against this checkpoint, not the artifact's own weights.")
    ] = None,
    adapter: Adapters = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Decode steps to compare; default: 32.")] = None,
    as_json: Json = False,
) -> None:
    """Check an artifact again: files against their hashes, ONNX Runtime against JAX. Exit code 1 on a miss."""
    from diptych.export.parity import verify as verify_artifact

    with progress_bars() as progress:
        certificate = verify_artifact(
            artifact, source=source, adapters=parse_adapters(adapter), steps=steps, progress=progress
        )
    if as_json:
        print_json(certificate.to_json())
    else:
        show(parity_table(certificate.to_json()))
    if certificate.status == "failed":
        raise typer.Exit(1)
