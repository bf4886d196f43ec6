"""llama.cpp as a reader of texts: logits behind every token, left in a file for the process that asks."""

from __future__ import annotations

import numpy as np
from llama_cpp import Llama


class Engine:
    def __init__(self, model: str, threads: int, capacity: int) -> None:
        self._model = Llama(
            model, n_ctx=capacity, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
        )

    def reset(self) -> None:
        """Forget everything."""
        self._model.reset()

    def read(self, tokens: list[int], path: str) -> None:
        """Append tokens [n]; write the logits behind each, [n, V] float32, as a NumPy file."""
        start = self._model.n_tokens
        self._model.eval(tokens)
        np.save(path, self._model.scores[start : start + len(tokens)])
