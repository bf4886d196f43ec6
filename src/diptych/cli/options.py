"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Sessions = Literal["one", "two"]  # as the runtime has it; importing it from there would cost every --help

Artifact = Annotated[Path, typer.Argument(metavar="DIR", help="An artifact folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Stop after this many new tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token every time.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the K likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the likeliest tokens of total mass P.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")]
System = Annotated[str | None, typer.Option("--system", help="The system message of the chat template.")]
SessionsOption = Annotated[
    Sessions | None,
    typer.Option("--sessions", help="ONNX Runtime sessions: one for both phases, or two and twice the memory."),
]
Spinning = Annotated[
    bool | None,
    typer.Option("--spin/--no-spin", help="Threads that wait for work look out for it; slower where cores are shared."),
]
Float32Prefill = Annotated[
    bool | None,
    typer.Option(
        "--float32-prefill/--no-float32-prefill", help="With two sessions: prompts in float32 where blocks have 4 bits."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="FOLDER[=WEIGHT]", help="Merge a LoRA adapter (PEFT's format); repeatable."),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the runtime; default: the cores.")]


def parse_adapters(given: list[str] | None) -> list[tuple[str | Path, float]]:
    """``FOLDER[=WEIGHT]`` as pairs; the weight is 1 by default. Raises ValueError when it is no number."""
    return [_adapter(one) for one in given or ()]


def _adapter(given: str) -> tuple[str | Path, float]:
    folder, equals, weight = given.rpartition("=")
    if not equals or Path(given).is_dir():
        return given, 1.0
    try:
        return folder, float(weight)
    except ValueError:
        raise ValueError(f"--adapter {given}: expected FOLDER or FOLDER=WEIGHT, and {weight!r} is no number") from None
