"""What was measured as one JSON object, and as tables: one for each phase, never one number for both."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from diptych.bench import figures
from diptych.bench.engines import Spec
from diptych.bench.plan import FIRST_PROMPT, Case, Plan
from diptych.bench.rounds import Round
from diptych.cli.console import size, table
from diptych.runtime.machine import processor

FRESH = {
    "load": "load",
    "first_token": f"first token of {FIRST_PROMPT}",
    "memory": "peak memory",
}


def summary(specs: Sequence[Spec], plan: Plan, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians, and ratios to the first engine; with the rounds themselves, so that anything else can be worked out."""
    return {
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.platform()},
        "plan": plan.to_json(),
        "ceilings": {kind: figures.median(rounds, "ceilings", kind) for kind in ("bandwidth", "arithmetic")},
        "engines": {spec.name: _engine(spec, specs[0], plan, rounds) for spec in specs},
        "rounds": list(rounds),
    }


def _engine(spec: Spec, first: Spec, plan: Plan, rounds: Sequence[Round]) -> dict[str, Any]:
    cases = {}
    for case in plan.cases(batches=spec.batches):
        seconds = figures.median(rounds, spec.name, str(case))
        if seconds is not None:
            cases[str(case)] = {
                "seconds": seconds,
                "tokens_per_s": figures.speed(case, seconds),
                "times_first": figures.ratio(rounds, spec.name, first.name, str(case)),
                "share_of_roofline": figures.roofline(rounds, spec, case),
            }
    fresh = {what: figures.median(rounds, spec.name, what) for what in FRESH}
    return {"bytes": spec.bytes, "bytes_read_per_step": spec.read, **fresh, "cases": cases}


def tables(found: dict[str, Any]) -> Iterator[Table | str]:
    """The summary for people. A ratio behind a figure says how many times faster than the first engine that is."""
    plan, engines, ceilings = found["plan"], found["engines"], found["ceilings"]
    arithmetic, bandwidth = ((ceilings[kind] or 0) / 1e9 for kind in ("arithmetic", "bandwidth"))
    yield f"{found['machine']['processor']}, {plan['threads']} threads; medians of {len(found['rounds'])} rounds"
    yield f"\nprefill: tokens/s by length of the prompt (%: of a float32 matrix product's {arithmetic:.0f} GFLOP/s)"
    yield _speeds([Case("prefill", n) for n in plan["prompts"]], engines)
    yield f"decode: tokens/s by context × rows (%: of what reading the weights at {bandwidth:.1f} GB/s allows)"
    yield _speeds([Case("decode", n, rows) for rows in plan["rows"] for n in plan["contexts"]], engines)
    yield "loading, in a process of its own"
    grid = table("", *(f"{name}>" for name in (*FRESH.values(), "files")))
    for name, engine in engines.items():
        seconds = (_or_dash(engine[what], "{:.2f} s") for what in ("load", "first_token"))
        sizes = ("–" if engine[what] is None else size(engine[what]) for what in ("memory", "bytes"))
        grid.add_row(name, *seconds, *sizes)
    yield grid


def _speeds(cases: Sequence[Case], engines: dict[str, Any]) -> Table:
    """A column for each case that any engine has."""
    shown = [case for case in cases if any(str(case) in engine["cases"] for engine in engines.values())]
    grid = table("", *(f"{str(case).partition(' ')[2]}>" for case in shown))
    for name, engine in engines.items():
        grid.add_row(name, *(_speed(engine["cases"].get(str(case))) for case in shown))
    return grid


def _speed(case: dict[str, Any] | None) -> str:
    if case is None:
        return "–"
    share = "" if case["share_of_roofline"] is None else f" {case['share_of_roofline']:.0%}"
    times = "" if case["times_first"] in (None, 1) else f" ({case['times_first']:.2f}×)"
    return f"{case['tokens_per_s']:.0f}{share}{times}"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
