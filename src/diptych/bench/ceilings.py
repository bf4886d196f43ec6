"""The engine that is none: how fast this machine reads memory and multiplies, with the same number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

REPEATS = 5
MEBIBYTES = 256  # far beyond any cache, as weights are
PIECE = 1 << 18  # numbers of a vector that is multiplied with itself
SIDE, TOKENS = 2048, 512


class Engine:
    """Each figure is the best of some repeats: a ceiling is what the machine can do, not what it usually does."""

    def __init__(self, threads: int) -> None:
        import numpy as np

        self._np, self._threads = np, threads
        self._pool = ThreadPoolExecutor(threads)
        self._memory = np.ones(MEBIBYTES << 18, np.float32)

    def bandwidth(self) -> float:
        """Bytes a second, read once from end to end by all threads.

        A matrix product is no ceiling here: NumPy's own loops read up to a third faster.  Which one is the fastest
        depends on the processor.
        """
        np, parts = self._np, self._np.array_split(self._memory, self._threads)
        reads: tuple[Callable[[Any], Any], ...] = (
            lambda part: part.max(),
            lambda part: part.view(np.int32).max(),
            lambda part: [piece @ piece for piece in np.split(part, range(PIECE, part.size, PIECE))],
        )
        return float(self._memory.nbytes / min(self._fastest(read, parts) for read in reads))

    def arithmetic(self) -> float:
        """Floating-point operations a second of a float32 matrix product as large as those of a prefill."""
        np = self._np
        weights = np.ones((SIDE, SIDE), np.float32)
        parts = np.array_split(np.ones((TOKENS, SIDE), np.float32), self._threads)
        return 2 * TOKENS * SIDE * SIDE / self._fastest(lambda part: part @ weights, parts)

    def _fastest(self, run: Callable[[Any], Any], parts: Sequence[Any]) -> float:
        """Seconds that all parts take, each in a thread."""
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(self._pool.map(run, parts))
            seconds.append(time.perf_counter() - start)
        return min(seconds)
