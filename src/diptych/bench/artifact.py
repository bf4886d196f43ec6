"""The engine that is ours: an artifact in the runtime."""

from __future__ import annotations

from typing import Any

from diptych.runtime import Session, load


class Engine:
    """See ``worker.Stepping``. ``capacity`` tokens of context in every row."""

    def __init__(self, model: str, capacity: int, **options: Any) -> None:
        """``options`` are those of ``load``."""
        self._model = load(model, **options)
        self._capacity = capacity
        self._sessions: dict[int, Session] = {}

    def prefill(self, tokens: list[int], rows: int) -> None:
        if rows not in self._sessions:
            self._sessions[rows] = self._model.session(rows, self._capacity)
        session = self._sessions[rows]
        self.rewind(0, rows)
        session.prefill(0, tokens)
        for row in range(1, rows):
            session.fork(0, row)

    def decode(self, token: int, rows: int) -> None:
        self._sessions[rows].decode([token] * rows)

    def rewind(self, length: int, rows: int) -> None:
        for row in range(rows):
            self._sessions[rows].rewind(row, length)
