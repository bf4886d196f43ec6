"""Time prefill and decode of an artifact, each by itself: they have different bottlenecks.

    python tools/bench.py                           # the artifact that `make demo` builds
    python tools/bench.py artifacts/gemma-3-270m

Medians over rounds that alternate between all cases, so that a busy moment of the machine touches every case alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import demo
import fetch_models
from diptych.runtime import LanguageModel, load

PROMPTS = (16, 128, 512)
DEPTHS = (16, 512)
STEPS = 16


def tokens(model: LanguageModel, count: int) -> list[int]:
    """The same made-up prompt on every run."""
    drawn = np.random.default_rng(0).integers(0, model.manifest.vocabulary.size, count)
    return [int(token) for token in drawn]


def prefill(model: LanguageModel, length: int) -> float:
    """Tokens per second of one prompt on an empty row."""
    session = model.session(capacity=length)
    prompt = tokens(model, length)
    start = time.perf_counter()
    session.prefill(0, prompt)
    return length / (time.perf_counter() - start)


def decode(model: LanguageModel, depth: int) -> float:
    """Tokens per second of ``STEPS`` single-token steps behind ``depth`` tokens."""
    session = model.session(capacity=depth + STEPS)
    session.prefill(0, tokens(model, depth))
    start = time.perf_counter()
    for token in tokens(model, STEPS):
        session.decode([token])
    return STEPS / (time.perf_counter() - start)


def measure(model: LanguageModel, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every case in every round, after one round that warms up."""
    cases: dict[str, Callable[[], float]] = {
        **{f"prefill of {n} tokens": partial(prefill, model, n) for n in PROMPTS},
        **{f"decode after {n} tokens": partial(decode, model, n) for n in DEPTHS},
    }
    measured = [{case: run() for case, run in cases.items()} for _ in range(rounds + 1)]
    return {case: [speeds[case] for speeds in measured[1:]] for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode of an artifact, measured separately.")
    parser.add_argument(
        "artifact", nargs="?", default=fetch_models.DEFAULT, help="a folder, or what `make demo` was given"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    given = Path(options.artifact)
    folder = given if (given / "manifest.json").exists() else demo.ROOT / demo.artifact_of(options.artifact)
    model = load(folder)
    table = Table("phase", title=f"{folder.name}: tokens/s, {options.rounds} rounds", title_justify="left")
    for column in ("median", "lowest", "highest"):
        table.add_column(column, justify="right")
    for case, speeds in measure(model, options.rounds).items():
        table.add_row(case, *(f"{statistic(speeds):.0f}" for statistic in (statistics.median, min, max)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
