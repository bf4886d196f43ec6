"""One engine in a process of its own, driven by requests on its standard input.

    python -P worker.py ENGINE.py '{"model": "...", "threads": 2}'

Only the standard library is imported here, because each engine may live in an environment of its own.  ``ENGINE.py``
has a class ``Engine``, opened with those options, that is one of the protocols below.  A request is a line of JSON with
the name of a method of :class:`Worker` and its arguments; an answer is one too, ``{"value": …}`` or ``{"error": "…"}``.

Times are taken around the engine's work alone; waiting for requests costs nothing, so that engines can take turns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

WARM_UP = 2  # steps after which a decode is timed: the first ones find nothing of the weights in the caches


@runtime_checkable
class Stepping(Protocol):
    """An engine that computes what it is told to, token by token."""

    def prefill(self, tokens: list[int], rows: int) -> None:
        """Forget everything; compute a prompt in every row, as far as the logits behind its last token."""

    def decode(self, token: int, rows: int) -> None:
        """One step of every row: the logits behind one more token."""

    def rewind(self, length: int, rows: int) -> None:
        """Forget every row's tokens behind the first ``length``."""


@runtime_checkable
class Generating(Protocol):
    """An engine that only generates, and tells itself how long it took."""

    def generate(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Seconds to the first token, and of ``steps`` decode steps after it."""


class Worker:
    """What can be asked of an engine. ``open`` makes one, so that loading can be timed; ``clock`` tells seconds."""

    def __init__(self, open: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> None:
        self._open = open
        self._clock = clock
        self._engine: Any = None
        self._held: dict[int, list[int]] = {}  # what every row of a cache of so many rows holds
        self._imports = status("RssAnon")

    def load(self, tokens: list[int]) -> dict[str, float]:
        """Seconds until the model is open, and until the logits behind its first prompt are there as well."""
        start = self._clock()
        self._engine = self._open()
        loaded = self._clock() - start
        self._prefill(tokens, 1)
        return {"load": loaded, "first_token": self._clock() - start}

    def prefill(self, tokens: list[int], repeats: int = 1) -> float:
        """Seconds to the logits behind the last token; of several repeats the middle one."""
        return sorted(self._prefill(tokens, 1) for _ in range(repeats))[repeats // 2]

    def decode(self, context: list[int], tokens: list[int], rows: int = 1) -> float:
        """Seconds of one step of every row behind ``context``, averaged over ``tokens``."""
        if isinstance(self._engine, Generating):
            return self._engine.generate(context, len(tokens))[1] / len(tokens)
        self._hold(context, rows)
        self._steps(tokens[:WARM_UP], rows)
        start = self._clock()
        self._steps(tokens, rows)
        return (self._clock() - start) / len(tokens)

    def memory(self) -> dict[str, int]:
        """Bytes of this process, as far as the system tells them.

        ``memory`` is the most that it has had, mapped files included; ``private`` what it now has for itself alone
        beyond what it had after its imports.
        """
        found = {}
        if (peak := peak_memory()) is not None:
            found["memory"] = peak
        if (now := status("RssAnon")) is not None and self._imports is not None:
            found["private"] = now - self._imports
        return found

    def call(self, name: str, **arguments: Any) -> Any:
        """A method of the engine's own: what it is, what it measures, what it computes."""
        if self._engine is None:
            self._engine = self._open()
        return getattr(self._engine, name)(**arguments)

    def _prefill(self, tokens: list[int], rows: int) -> float:
        if isinstance(self._engine, Generating):
            return self._engine.generate(tokens, 0)[0]
        start = self._clock()
        self._engine.prefill(tokens, rows)
        self._held[rows] = list(tokens)
        return self._clock() - start

    def _hold(self, context: list[int], rows: int) -> None:
        """Prompts are beginnings of one another, so that a shorter context is mostly there already."""
        if self._held.get(rows, [])[: len(context)] == context:
            self._engine.rewind(len(context), rows)
            self._held[rows] = list(context)
        else:
            self._prefill(context, rows)

    def _steps(self, tokens: list[int], rows: int) -> None:
        for token in tokens:
            self._engine.decode(token, rows)
            self._held[rows].append(token)


def status(field: str) -> int | None:
    """Bytes that Linux tells of this process under a field of /proc/self/status; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def peak_memory() -> int | None:
    """Linux's high-water mark of this program alone; elsewhere that of the process, where the system keeps one."""
    if (peak := status("VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"value": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:  # whatever an engine raises belongs to its row of the table
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def engine_class(path: Path) -> Any:
    """The class ``Engine`` of a file. What it imports is imported now, not when a model is loaded."""
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine"] = module
    spec.loader.exec_module(module)
    return module.Engine


@contextmanager
def answers_only() -> Iterator[TextIO]:
    """Standard output for the answers; whatever an engine prints goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    path, options = sys.argv[1:]
    with answers_only() as answers:
        kind = engine_class(Path(path))
        serve(Worker(lambda: kind(**json.loads(options))), sys.stdin, answers)


if __name__ == "__main__":
    main()
