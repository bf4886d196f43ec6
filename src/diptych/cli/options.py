"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Sessions = Literal["two", "one"]  # as the runtime has it; importing it from there would cost every --help

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
    Sessions, typer.Option("--sessions", help="One session for both phases needs about half the memory.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the runtime; default: its choice.")]
