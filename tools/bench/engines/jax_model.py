"""The JAX model on an artifact's own weights: what the graphs are lowered from, compiled by XLA instead.

XLA has no option for threads; it makes one for each CPU that the process may use.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["BENCH_THREADS"])])

import jax.numpy as jnp
import numpy as np

from diptych.jax_model import params as parameters
from diptych.jax_model.config import Config
from diptych.jax_model.decoder import Cache, decode, prefill
from diptych.jax_model.storage import from_json
from diptych.runtime import Manifest


class Engine:
    def __init__(self, model: str, capacity: int) -> None:
        manifest = Manifest.open(model)
        self._config = Config.from_json(manifest.data["config"])
        quantization = manifest.data.get("quantization")
        storage = {} if quantization is None else from_json(quantization["tensors"])
        stored = parameters.read_safetensors(Path(model) / "weights.safetensors", self._config, storage)
        self._params = parameters.dense(stored)
        self._new = partial(Cache.zeros, self._config, 1, capacity)
        self._cache = self._new()

    def prefill(self, tokens: list[int], rows: int) -> None:
        count = len(tokens)
        ids, number, last = np.array([tokens], np.int32), np.array([count], np.int32), np.array([[count - 1]], np.int32)
        self._cache = replace(self._cache, length=jnp.zeros(1, jnp.int32))
        logits, self._cache = prefill(self._config, self._params, self._cache, ids, number, last)
        logits.block_until_ready()

    def decode(self, token: int, rows: int) -> None:
        logits, self._cache = decode(self._config, self._params, self._cache, np.array([token], np.int32))
        logits.block_until_ready()

    def rewind(self, length: int, rows: int) -> None:
        self._cache = replace(self._cache, length=jnp.full(1, length, jnp.int32))
