"""What comes into each matrix of the model: how much an error in one of its rows would count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from diptych.jax_model.config import Config
from diptych.jax_model.decoder import Cache, forward_prefill
from diptych.jax_model.params import Params, flatten, unflatten

__all__ = ["importance"]

_LEAST = 1e-3  # of the mean: an input that is silent on one text may speak on another


class _Watched:
    """A matrix that remembers the mean square of every input that it is applied to; it stands on the right of ``@``."""

    def __init__(self, matrix: Array) -> None:
        self._matrix = matrix
        self.squares: Array | None = None

    def __rmatmul__(self, x_BTI: Array) -> Array:
        self.squares = jnp.mean(jnp.square(x_BTI), axis=(0, 1))
        return x_BTI @ self._matrix


def importance(
    config: Config, params: Params, tokens: Sequence[int], paths: Iterable[str]
) -> dict[str, NDArray[np.float32]]:
    """For each matrix [in, out] among ``paths``, the mean squares of its inputs over a text: [in], one on average.

    ``params`` are arrays of floats.  A matrix that is looked up and not applied is left out.
    """
    T, chosen = len(tokens), set(paths)

    @jax.jit
    def run(leaves: dict[str, Array]) -> dict[str, Array | None]:
        watched = {path: _Watched(leaf) for path, leaf in leaves.items() if path in chosen and path != "embed"}
        tree, cache = unflatten({**leaves, **watched}), Cache.zeros(config, 1, T)
        forward_prefill(config, tree, cache, jnp.array([tokens]), jnp.array([T]), jnp.array([[T - 1]]))
        return {path: matrix.squares for path, matrix in watched.items()}

    found: dict[str, Any] = run(flatten(params))
    return {
        path: np.asarray(squares / jnp.maximum(jnp.mean(squares), 1e-30) + _LEAST)
        for path, squares in found.items()
        if squares is not None
    }
