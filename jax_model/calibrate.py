"""What a text makes of the model: what comes into each matrix, and how large the keys and values of each layer are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from diptych.jax_model.composites import rotary
from diptych.jax_model.config import Config, Layer
from diptych.jax_model.decoder import Cache, forward_prefill
from diptych.jax_model.params import Params, cache_scales, flatten, unflatten
from diptych.jax_model.rope import frequencies

__all__ = ["importance", "scales_of_cache"]

_LEAST = 1e-3  # of the mean, or of the largest: what is silent on one text may speak on another
# Other texts have larger keys and values than ours: measured up to 2.8 times. What is clipped costs more than what is
# rounded coarsely, until this factor (docs/facts.md).
_HEADROOM = 1.25
_STARTS = 4  # places where the text is begun: first tokens have keys and values unlike all others
_TURNS = 8  # angles in a quarter turn at which keys are looked at


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


def scales_of_cache(config: Config, params: Params, tokens: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """Scales [K, H] of an int8 cache, by the paths that :func:`cache_scales <diptych.jax_model.params.cache_scales>`
    gives: 127 steps reach the largest key and value of each channel over a text, and some more.

    ``params`` are arrays of floats.  Raises ValueError where keys or values of the text are not finite.
    """
    rows = [tokens[len(tokens) * i // _STARTS :] for i in range(_STARTS)]
    T = max(map(len, rows))
    tokens_BT = np.stack([np.pad(np.array(row, np.int32), (0, T - len(row))) for row in rows])

    @jax.jit
    def run(params: Params, tokens_BT: Array, num_tokens_B: Array) -> list[Array]:
        cache = Cache.zeros(config, len(rows), T)
        _, cache = forward_prefill(config, params, cache, tokens_BT, num_tokens_B, num_tokens_B[:, None] - 1)
        held = (jnp.arange(T)[None, :] < num_tokens_B[:, None])[:, None, :, None]
        keys, values = ([jnp.where(held, x_BKTH, 0) for x_BKTH in part] for part in (cache.k, cache.v))
        turned = (_turned(config, layer, k_BKTH) for layer, k_BKTH in zip(config.layers, keys, strict=True))
        pairs = zip(turned, (jnp.max(jnp.abs(v_BKTH), (0, 2)) for v_BKTH in values), strict=True)
        return [largest_KH for pair in pairs for largest_KH in pair]

    largest = run(params, jnp.asarray(tokens_BT), jnp.array([len(row) for row in rows]))
    scales = {}
    for path, largest_KH in zip(cache_scales(config, "int8"), map(np.asarray, largest), strict=True):
        if not np.isfinite(largest_KH).all():
            raise ValueError(f"{path}: keys or values are not finite on a text of ours; such a cache cannot be int8")
        least = max(_LEAST * largest_KH.max(), 127 * np.finfo(np.float32).tiny)
        scales[path] = (np.maximum(_HEADROOM * largest_KH, least) / 127).astype(np.float32)
    return scales


def _turned(config: Config, layer: Layer, k_BKTH: Array) -> Array:
    """The largest magnitude of each channel of keys [K, H], at these positions and all others that they may have.

    Rope turns a pair of channels on, by as much as its frequency allows up to the last position: the text alone would
    show a slow pair at one angle only.  (Where norms stand behind rope, these are not quite its angles.)
    """
    largest_KH = jnp.max(jnp.abs(k_BKTH), (0, 2))
    if layer.rope is None:
        return largest_KH
    B, K, T, H = k_BKTH.shape
    k_BTE = k_BKTH.transpose(0, 2, 1, 3).reshape(B, T, K * H)
    inv_freq, _ = frequencies(layer.rope, config.max_positions)
    reach = jnp.minimum(jnp.asarray(inv_freq) * config.max_positions, jnp.pi / 2)
    for turn in range(-_TURNS, _TURNS + 1):
        at_BT = jnp.full((B, T), turn)
        turned = rotary(k_BTE, at_BT, reach / _TURNS, heads=K, interleaved=layer.rope.interleaved, magnitude=1.0)
        largest_KH = jnp.maximum(largest_KH, jnp.max(jnp.abs(turned.reshape(B, T, K, H)), (0, 1)))
    return largest_KH
