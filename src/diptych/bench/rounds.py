"""Rounds in which all engines take their turn at every case, so that a busy moment of the machine touches all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

from diptych.bench.engines import Engine, EngineError, Spec, ceilings
from diptych.bench.plan import CEILINGS, FIRST_PROMPT, Case, Plan

# Seconds (bytes for "memory" and "private") by engine and case, and beside each case its ceiling.
Round: TypeAlias = dict[str, dict[str, float]]
Report: TypeAlias = Callable[[str], None]

SETTLE = 0.05  # seconds in which the threads of the engine before stop looking for work


def measure(specs: Sequence[Spec], plan: Plan, vocabulary: int, rounds: int, report: Report) -> Iterator[Round]:
    """``rounds`` rounds, after one that warms up and is not counted.

    An engine that fails in a case is told of by ``report``, and that case is not asked of it again.
    """
    tokens = plan.tokens(vocabulary)
    with ExitStack() as stack:
        machine = stack.enter_context(Engine(ceilings(plan.threads)))
        engines = [stack.enter_context(Engine(spec)) for spec in specs]
        turn = _Turns(report)
        engines = [engine for engine in engines if turn.take(engine.spec, "load", partial(_load, engine, tokens))]
        for number in range(rounds + 1):
            report(f"round {number} of {rounds}" if number else "warming up")
            measured: Round = {engine.spec.name: {} for engine in engines}
            for engine in engines if 1 <= number <= plan.loads else ():
                measured[engine.spec.name] |= turn.take(
                    engine.spec, "fresh", partial(_fresh, engine.spec, plan, tokens)
                )
            for case in plan.cases(batches=True):
                for engine in engines:
                    if case.rows == 1 or engine.spec.batches:
                        run = partial(_run, engine, case, plan, tokens, machine)
                        measured[engine.spec.name] |= turn.take(engine.spec, str(case), run)
            if number:
                yield measured


class _Turns:
    """Gives an engine its turn, unless it has failed in the same before."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._failed: set[tuple[str, str]] = set()

    def take(self, spec: Spec, what: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What ``run`` measured; nothing where it fails, which is told once."""
        if (spec.name, what) in self._failed:
            return {}
        time.sleep(SETTLE)
        try:
            return run()
        except EngineError as error:
            self._failed.add((spec.name, what))
            self._report(f"{what}: {error}")
            return {}


def _load(engine: Engine, tokens: list[int]) -> dict[str, float]:
    found: dict[str, float] = engine.ask("load", tokens=tokens[:FIRST_PROMPT])
    return found


def _run(engine: Engine, case: Case, plan: Plan, tokens: list[int], machine: Engine) -> dict[str, float]:
    """The case, and right behind it its ceiling: a virtual machine's memory may be half as fast a second later."""
    if case.phase == "prefill":
        repeats = max(1, min(5, 512 // case.tokens))
        seconds = engine.ask("prefill", tokens=tokens[: case.tokens], repeats=repeats)
    else:
        steps = tokens[case.tokens : case.tokens + plan.steps]
        seconds = engine.ask("decode", context=tokens[: case.tokens], tokens=steps, rows=case.rows)
    time.sleep(SETTLE)
    return {str(case): seconds, case.ceiling: machine.ask("call", name=CEILINGS[case.phase])}


def _fresh(spec: Spec, plan: Plan, tokens: list[int]) -> dict[str, float]:
    """Loading, and memory when both phases have run, in a process that does nothing else."""
    prompt = tokens[: plan.memory_prompt]
    with Engine(spec) as engine:
        found = _load(engine, tokens)
        engine.ask("prefill", tokens=prompt)
        engine.ask("decode", context=prompt[:-4], tokens=prompt[-4:])
        memory: dict[str, float] = engine.ask("memory")
    return found | memory
