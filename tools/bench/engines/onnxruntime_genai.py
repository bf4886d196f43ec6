"""onnxruntime-genai, on a model that its own builder made."""

from __future__ import annotations

import json

import onnxruntime_genai as og


class Engine:
    def __init__(self, model: str, threads: int, capacity: int) -> None:
        config = og.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = og.Model(config)
        self._tokenizer = og.Tokenizer(self._model)  # part of loading, as in ours
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=capacity, do_sample=False)
        self._generator = og.Generator(self._model, params)

    def prefill(self, tokens: list[int], rows: int) -> None:
        self._generator.rewind_to(0)
        self._generator.append_tokens(tokens)
        self._generator.get_logits()

    def decode(self, token: int, rows: int) -> None:
        """As fast as ``generate_next_token``, and with a token of ours."""
        self._generator.append_tokens([token])
        self._generator.get_logits()

    def rewind(self, length: int, rows: int) -> None:
        self._generator.rewind_to(length)
