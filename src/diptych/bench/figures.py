"""Arithmetic on what was measured: medians, ratios round by round, and the distance to what the machine allows.

The roofline of a decode step is the time to read every weight once (S. Williams et al., "Roofline", 2009), that of a
prefill the time of its multiplications at the speed of a large matrix product.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from diptych.bench.engines import Spec
from diptych.bench.plan import Case
from diptych.bench.rounds import Round


def values(rounds: Sequence[Round], engine: str, what: str) -> list[float]:
    """A figure in every round that has it."""
    return [measured[engine][what] for measured in rounds if what in measured.get(engine, {})]


def median(rounds: Sequence[Round], engine: str, what: str) -> float | None:
    found = values(rounds, engine, what)
    return statistics.median(found) if found else None


def ceiling(rounds: Sequence[Round], cases: Sequence[Case]) -> float | None:
    """The largest that was measured behind any of the cases in a round; the median over rounds."""
    largest = [
        max(found)
        for measured in rounds
        if (found := [engine[case.ceiling] for engine in measured.values() for case in cases if case.ceiling in engine])
    ]
    return statistics.median(largest) if largest else None


def speed(case: Case, seconds: float) -> float:
    """Tokens a second: of the prompt, or of all rows of a step together."""
    return (case.tokens if case.phase == "prefill" else case.rows) / seconds


def ratio(rounds: Sequence[Round], engine: str, other: str, what: str) -> float | None:
    """How many times faster ``engine`` is than ``other``: the median over rounds that have both."""
    both = [
        measured[other][what] / measured[engine][what]
        for measured in rounds
        if what in measured.get(engine, {}) and what in measured.get(other, {})
    ]
    return statistics.median(both) if both else None


def roofline(rounds: Sequence[Round], spec: Spec, case: Case) -> float | None:
    """The share of the machine's ceiling that a case reaches, measured right behind it; None if unknown."""
    amount = spec.operations if case.phase == "prefill" else spec.read
    if amount is None:
        return None
    work = amount * (case.tokens if case.phase == "prefill" else 1)
    reached = [
        work / measured[spec.name][case.ceiling] / measured[spec.name][str(case)]
        for measured in rounds
        if case.ceiling in measured.get(spec.name, {})
    ]
    return statistics.median(reached) if reached else None
