"""``diptych chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from diptych.cli import options
from diptych.cli.errors import explain
from diptych.cli.run import print_pieces, timing_line

if TYPE_CHECKING:
    from diptych.runtime import Generation, Message

HELP = "Ctrl-C ends an answer, Ctrl-D the conversation; /reset forgets it."


def chat(
    artifact: options.Artifact,
    system: options.System = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    sessions: options.SessionsOption = None,
    threads: options.Threads = None,
    spinning: options.Spinning = None,
    float32_prefill: options.Float32Prefill = None,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation; /reset forgets it."""
    from diptych.runtime import load

    model = load(artifact, sessions=sessions, threads=threads, spinning=spinning, float32_prefill=float32_prefill)
    if not model.text.has_chat_template:
        raise ValueError(f"{artifact} has no chat template, so it cannot hold a conversation; try: diptych run --raw")
    session = model.session()  # keeps the cache: what a turn shares with the one before is not computed again

    def answer(messages: list[Message]) -> Generation:
        return model.stream(
            messages,
            session=session,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or (),
        )

    converse(answer, system)


def converse(answer: Callable[[list[Message]], Generation], system: str | None) -> None:
    """Read lines, print answers, keep both as the conversation so far."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing

    start: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    messages = list(start)
    print(HELP, file=sys.stderr)
    while (line := _read_line()) is not None:
        if line == "/reset":
            messages = list(start)
            print("The conversation starts anew.", file=sys.stderr)
        elif line.startswith("/") and len(line.split()) == 1:
            print(f"There is no command {line}. {HELP}", file=sys.stderr)
        elif line:
            messages += _turn(answer, [*messages, {"role": "user", "content": line}])


def _turn(answer: Callable[[list[Message]], Generation], messages: list[Message]) -> list[Message]:
    """Print the answer; returns the two new messages, or none where the model could not take the question."""
    try:
        generation = answer(messages)
        print_pieces(generation)
    except ValueError as error:  # too long for the context, or a template that refuses it: the conversation goes on
        print(f"Error: {explain(error)}", file=sys.stderr)
        return []
    print(timing_line(generation.result), file=sys.stderr)
    return [messages[-1], {"role": "assistant", "content": generation.result.text}]


def _read_line() -> str | None:
    """A line without its outer spaces; None at the end of the input. Ctrl-C empties the line.

    Only a person at a terminal sees a prompt, and a new line behind what ended theirs: piped output is answers alone.
    """
    seen = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        return input("> " if seen else "").strip()
    except (EOFError, KeyboardInterrupt) as end:
        if seen:
            print()
        return None if isinstance(end, EOFError) else ""
