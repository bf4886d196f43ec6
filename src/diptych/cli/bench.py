"""``diptych bench``: prefill and decode, measured apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.console import print_json, show
from diptych.cli.options import Json, Threads


def bench(
    artifacts: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Artifact folders.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths, for a first impression.")] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds that medians are taken of.")] = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure prefill and decode on this machine, each by itself, and how near they come to its limits."""
    from diptych.bench import report, run
    from diptych.bench.plan import Plan
    from diptych.runtime.machine import physical_cores

    count = threads or physical_cores() or os.cpu_count() or 1
    plan = Plan.quick(count) if quick else Plan(threads=count)
    specs, plan, vocabulary = run.artifacts(artifacts, plan)
    done = run.go(specs, plan, vocabulary, rounds, _say)
    found = report.summary(specs, plan, done)
    if as_json:
        print_json(found)
    else:
        show(*report.tables(found))


def _say(remark: str) -> None:
    print(remark, file=sys.stderr, flush=True)
