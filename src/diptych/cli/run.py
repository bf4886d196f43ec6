"""``diptych run``"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from diptych.cli import options
from diptych.cli.console import print_json

if TYPE_CHECKING:
    from diptych.runtime import Generation, Result


def run(
    artifact: options.Artifact,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text; - reads it from stdin.", show_default=False)
    ],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
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
    as_json: options.Json = False,
) -> None:
    """Answer one prompt: the text streams to stdout, the timing goes to stderr."""
    from diptych.runtime import load

    if raw and system is not None:
        raise ValueError("--system belongs to the chat template, which --raw leaves out: give one of the two")
    text = sys.stdin.read() if prompt == "-" else prompt
    model = load(artifact, sessions=sessions, threads=threads, spinning=spinning, float32_prefill=float32_prefill)
    generation = model.stream(
        text if system is None else [{"role": "system", "content": system}, {"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        raw=raw or None,  # None: through the chat template, where there is one
    )
    print_pieces(generation, quiet=as_json)
    if as_json:
        print_json(generation.result.to_json())
    else:
        print(timing_line(generation.result), file=sys.stderr)
    if generation.result.finish_reason == "cancelled":
        raise typer.Exit(130)


def print_pieces(generation: Generation, *, quiet: bool = False) -> None:
    """Print the text as it comes and end the line; Ctrl-C ends the generation where it is."""
    with generation, contextlib.suppress(KeyboardInterrupt):
        for piece in generation:
            if not quiet:
                print(piece, end="", flush=True)
    if not quiet:
        print()


def timing_line(result: Result) -> str:
    """The two phases apart: they have different bottlenecks. A phase that did not take place is left out."""
    usage, timing = result.usage, result.timing
    reused = f" ({usage.cached_tokens} of them reused)" if usage.cached_tokens else ""
    parts = [] if timing.ttft_s is None else [f"TTFT {timing.ttft_s:.3f} s"]
    if timing.prefill_tokens_per_s is not None:
        parts.append(f"prefill {usage.prompt_tokens} tokens{reused}, {timing.prefill_tokens_per_s:.0f} tokens/s")
    if timing.decode_tokens_per_s is not None:
        parts.append(f"decode {usage.completion_tokens} tokens, {timing.decode_tokens_per_s:.0f} tokens/s")
    return " · ".join([*parts, f"finish: {result.finish_reason}"])
