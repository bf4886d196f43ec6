"""What was measured as one JSON object, and as tables: one for each phase, never one number for both."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from diptych.bench import figures
from diptych.bench.engines import Spec
from diptych.bench.plan import CEILINGS, FIRST_PROMPT, Case, Plan
from diptych.bench.rounds import Round
from diptych.cli.console import size, table
from diptych.runtime.machine import processor

FRESH = ("load", "first_token", "memory", "private")


def summary(
    specs: Sequence[Spec], plan: Plan, rounds: Sequence[Round], export: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Medians, and ratios to the first engine; with the rounds themselves, so that anything else can be worked out.

    ``export`` is what the export of the first artifact took: its ``options``, ``seconds`` by stage, ``memory`` in
    bytes.
    """
    return {
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.platform()},
        "plan": plan.to_json(),
        "ceilings": {
            kind: figures.ceiling(rounds, [case for case in plan.cases(batches=True) if case.phase == phase])
            for phase, kind in CEILINGS.items()
        },
        "engines": {spec.name: _engine(spec, specs[0], plan, rounds) for spec in specs},
        "export": None if export is None else dict(export),
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
    private = fresh["private"]
    times = private / spec.weights if private is not None and spec.weights else None
    sizes = {"weights": spec.weights, "bytes_read_per_step": spec.read, "private_times_weights": times}
    return {**sizes, **fresh, "cases": cases}


PREFILL = (
    "Columns: tokens of the prompt. (×): how many times as fast as the first row, the median over the rounds that have "
    "both. %: of the speed of a float32 matrix product in NumPy right behind it (at most {arithmetic:.0f} GFLOP/s). "
    "Engines that round activations to 8 bits, as ours does where an artifact's accuracy level is 4, can pass 100 %: "
    "many processors multiply 8-bit integers several times as fast."
)
DECODE = (
    "Columns: tokens of context × rows; the tokens of all rows count. (×): as above. %: of the steps that are possible "
    "if each reads all weights once, as fast as NumPy reads memory right behind it (at most {bandwidth:.1f} GB/s); "
    "over 100 % where the processor's cache keeps weights from one step to the next."
)
MEMORY = (
    "In a process of its own, which opens the model, reads a prompt of {prompt} tokens and takes some steps. First "
    "token: from the start of loading to the logits behind a prompt of {first} tokens. Peak: of all memory, mapped "
    "files included, which processes share. Private: what the process holds for itself in the end, its KV cache "
    "included, beyond what its imports need; ×: of the weights file. –: this system does not tell."
)
EXPORT = (
    "The first row's export ({options}), made once more in a process of its own. Its peak of memory, mapped files "
    "included: {memory}."
)


def tables(found: dict[str, Any]) -> Iterator[Table | str]:
    """The summary for people, each table with the text that explains it."""
    plan, engines, ceilings = found["plan"], found["engines"], found["ceilings"]
    arithmetic, bandwidth = ((ceilings[kind] or 0) / 1e9 for kind in ("arithmetic", "bandwidth"))
    yield setting(found)
    yield "\nPrefill, tokens/s"
    yield _speeds([Case("prefill", n) for n in plan["prompts"]], engines)
    yield PREFILL.format(arithmetic=arithmetic)
    yield "\nDecode, tokens/s"
    for rows in plan["rows"]:
        yield _speeds([Case("decode", n, rows) for n in plan["contexts"]], engines)
    yield DECODE.format(bandwidth=bandwidth)
    yield "\nLoading and memory"
    yield _memory(engines)
    yield MEMORY.format(prompt=Plan(**plan).memory_prompt, first=FIRST_PROMPT)
    if found["export"] is not None:
        yield "\nExport"
        yield _export(found["export"])
        options = ", ".join(f"{name} {value}" for name, value in found["export"]["options"].items())
        yield EXPORT.format(options=options, memory=_or_dash(found["export"]["memory"], size))


def _speeds(cases: Sequence[Case], engines: dict[str, Any]) -> Table:
    """A column for each case that any engine has, a row for each engine that has any."""
    shown = [case for case in cases if any(str(case) in engine["cases"] for engine in engines.values())]
    grid = table("", *(f"{str(case).partition(' ')[2]}>" for case in shown))
    measured = {name: engine for name, engine in engines.items() if any(str(case) in engine["cases"] for case in shown)}
    for name, engine in measured.items():
        grid.add_row(name, *(_speed(engine["cases"].get(str(case))) for case in shown))
    return grid


def _speed(case: dict[str, Any] | None) -> str:
    if case is None:
        return "–"
    share = "" if case["share_of_roofline"] is None else f" {case['share_of_roofline']:.0%}"
    times = "" if case["times_first"] in (None, 1) else f" ({case['times_first']:.2f}×)"
    return f"{case['tokens_per_s']:.0f}{share}{times}"


def _memory(engines: dict[str, Any]) -> Table:
    grid = table("", "load>", "first token>", "peak>", "private>", "×>", "weights>")
    for name, engine in engines.items():
        seconds = (_or_dash(engine[what], "{:.2f} s".format) for what in ("load", "first_token"))
        peak, private, weights = (_or_dash(engine[what], size) for what in ("memory", "private", "weights"))
        grid.add_row(name, *seconds, peak, private, _or_dash(engine["private_times_weights"], "{:.2f}".format), weights)
    return grid


def _export(export: Mapping[str, Any]) -> Table:
    seconds = export["seconds"]
    grid = table("stage", "seconds>")
    for stage, each in (*seconds.items(), ("all", sum(seconds.values()))):
        grid.add_row(stage, f"{each:.1f}")
    return grid


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def setting(found: Mapping[str, Any]) -> str:
    """Where and how often was measured, in a line."""
    threads, rounds = found["plan"]["threads"], len(found["rounds"])
    return f"{found['machine']['processor']}, {_counted(threads, 'thread')}; medians of {_counted(rounds, 'round')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
