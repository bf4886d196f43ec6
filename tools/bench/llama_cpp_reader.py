"""llama.cpp as a reader of texts: logits behind every token, left in a file for the process that asks."""

from __future__ import annotations

from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp

FLOAT32_CACHE = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}


class Engine:
    """``float32``, in a llama.cpp that was built with BLAS: no number is rounded in products of 32 tokens or more."""

    def __init__(self, model: str, threads: int, capacity: int, float32: bool) -> None:
        if float32:
            _leave_weights_as_they_are()
        self._model = Llama(
            model,
            n_ctx=capacity,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            verbose=False,
            **(FLOAT32_CACHE if float32 else {}),
        )

    def reset(self) -> None:
        """Forget everything."""
        self._model.reset()

    def read(self, tokens: list[int], path: str) -> None:
        """Append tokens [n]; write the logits behind each, [n, V] float32, as a NumPy file."""
        start = self._model.n_tokens
        self._model.eval(tokens)
        np.save(path, self._model.scores[start : start + len(tokens)])


def _leave_weights_as_they_are() -> None:
    """BLAS does not get the products of weights that llama.cpp has packed again, and ``Llama`` has no option for it."""
    defaults = llama_cpp.llama_model_default_params

    def unpacked() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_model_default_params = unpacked
