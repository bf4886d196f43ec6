"""What is measured: lengths of prompts, depths of contexts, rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

CEILINGS = {"prefill": "arithmetic", "decode": "bandwidth"}  # what limits a phase

FIRST_PROMPT = 20  # tokens, for the time from opening a model to its first token


@dataclass(frozen=True, order=True)
class Case:
    """One thing that is timed: a prompt of ``tokens``, or a step of ``rows`` rows behind ``tokens`` of context."""

    phase: str
    tokens: int
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.phase} {self.tokens}" + (f" × {self.rows}" if self.rows > 1 else "")

    @property
    def ceiling(self) -> str:
        """The name of its ceiling among what was measured."""
        return f"{self}, ceiling"

    @classmethod
    def parse(cls, name: str) -> Case:
        phase, tokens, *rest = name.split()
        return cls(phase, int(tokens), int(rest[1]) if rest else 1)


@dataclass(frozen=True)
class Plan:
    """All cases. ``rows`` beyond 1 are for engines that have them, behind every context.

    Loading is measured in the first ``loads`` rounds: it takes some engines longer than everything else together.
    """

    prompts: tuple[int, ...] = (32, 128, 512, 2048)
    contexts: tuple[int, ...] = (16, 512, 2000)
    rows: tuple[int, ...] = (1, 4, 8)
    steps: int = 32
    loads: int = 3
    threads: int = 2
    seed: int = 0

    @classmethod
    def quick(cls, threads: int) -> Plan:
        return cls((32, 512), (16, 512), (1, 4), 16, 1, threads)

    @property
    def capacity(self) -> int:
        """Tokens that a row has to hold."""
        return max([*self.prompts, *(context + 2 * self.steps for context in self.contexts)], default=0)

    @property
    def memory_prompt(self) -> int:
        """Tokens of the prompt that is read before memory is looked at."""
        return min(512, max(self.prompts))

    def within(self, longest: int) -> Plan:
        """Without what does not fit into a context of ``longest`` tokens."""
        fields: dict[str, Any] = asdict(self)
        fields["prompts"] = tuple(n for n in self.prompts if n <= longest)
        fields["contexts"] = tuple(n for n in self.contexts if n + 2 * self.steps <= longest)
        return Plan(**fields)

    def cases(self, *, batches: bool) -> Iterator[Case]:
        """From long to short, so that an engine that can rewind has every context there already."""
        for rows in self.rows if batches else (1,):
            if rows == 1:
                yield from (Case("prefill", n) for n in sorted(self.prompts))
            yield from (Case("decode", n, rows) for n in sorted(self.contexts, reverse=True))

    def tokens(self, vocabulary: int) -> list[int]:
        """Made-up ids, the same for every engine; prompts are beginnings of them, steps follow."""
        drawn = random.Random(self.seed)
        return [drawn.randrange(vocabulary) for _ in range(self.capacity + self.steps)]

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
