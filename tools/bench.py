"""Time prefill and decode of an artifact, each by itself: they have different bottlenecks.

    python tools/bench.py artifacts/smollm2-135m-instruct

Medians over rounds that alternate between all cases, so that a busy moment of the machine touches every case alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from diptych.runtime import LanguageModel, load

PROMPTS = (16, 128, 512)
DEPTHS = (16, 512)
STEPS = 16


def tokens(model: LanguageModel, count: int) -> list[int]:
    """The same made-up prompt on every run."""
    return np.random.default_rng(0).integers(0, model.manifest.vocabulary.size, count).tolist()


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
    for _ in range(STEPS):
        session.decode([1])
    return STEPS / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode of an artifact, measured separately.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = load(options.artifact)
    cases: dict[str, Callable[[], float]] = {}
    cases |= {f"prefill of {n} tokens": lambda n=n: prefill(model, n) for n in PROMPTS}
    cases |= {f"decode after {n} tokens": lambda n=n: decode(model, n) for n in DEPTHS}
    speeds: dict[str, list[float]] = {case: [] for case in cases}
    for round_ in range(options.rounds + 1):
        for case, measure in cases.items():
            speed = measure()
            if round_:  # the first round warms up
                speeds[case].append(speed)
    table = Table(title=f"{options.artifact}, {options.rounds} rounds", title_justify="left")
    table.add_column("phase")
    for column in ("median tokens/s", "lowest", "highest"):
        table.add_column(column, justify="right")
    for case, values in speeds.items():
        table.add_row(case, *(f"{f(values):.0f}" for f in (statistics.median, min, max)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
