"""The engine that is ours: an artifact in the runtime."""

from __future__ import annotations

from diptych.runtime import Session, load


class Engine:
    """See ``worker.Stepping``. ``capacity`` tokens of context in every row."""

    def __init__(self, model: str, threads: int, capacity: int, sessions: str | None = None) -> None:
        options = {} if sessions is None else {"sessions": sessions}
        self._model = load(model, threads=threads, **options)  # type: ignore[arg-type]
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
