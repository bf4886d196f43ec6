"""llama.cpp, through llama-cpp-python, on the same GGUF file."""

from __future__ import annotations

from llama_cpp import Llama


class Engine:
    def __init__(self, model: str, threads: int, capacity: int) -> None:
        self._model = Llama(model, n_ctx=capacity, n_threads=threads, n_threads_batch=threads, verbose=False)

    def prefill(self, tokens: list[int], rows: int) -> None:
        self._model.reset()
        self._model.eval(tokens)

    def decode(self, token: int, rows: int) -> None:
        self._model.eval([token])

    def rewind(self, length: int, rows: int) -> None:
        """``eval`` drops what the cache holds behind this many tokens."""
        self._model.n_tokens = length
