"""The model's semantic operations, each a named composite with its decomposition in plain JAX.

A jaxpr of the model carries these names and their attributes, so that an exporter can emit one fused operator for
each; an exporter that has none walks the decomposition, where smaller composites may be found.  They close over no
array (JAX would turn it into a hidden operand), and their attributes are Python scalars.  Shapes are in the letters
of :mod:`diptych.jax_model.config`; ``E`` stands for heads times head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["add_rms_norm", "attention", "cache_write", "cached_attention", "gelu_tanh", "rms_norm", "rotary", "softmax"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _composite(function: _F) -> _F:
    return cast(_F, lax.composite(function, name=f"diptych.{function.__name__}"))


@_composite
def rms_norm(x: Array, scale: Array, *, eps: float, scale_first: bool) -> Array:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32.

    ``scale_first`` multiplies by ``scale`` before the result is rounded to x's dtype (Gemma), else after (Llama).
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if scale_first:
        return (y * scale.astype(jnp.float32)).astype(x.dtype)
    return y.astype(x.dtype) * scale.astype(x.dtype)


@_composite
def add_rms_norm(x: Array, delta: Array, scale: Array, *, eps: float, scale_first: bool) -> tuple[Array, Array]:
    """``(rms_norm(x + delta), x + delta)``: a residual addition and the norm that reads its result."""
    total = x + delta
    return rms_norm(total, scale, eps=eps, scale_first=scale_first), total


@_composite
def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415, §2)."""
    return jax.nn.gelu(x, approximate=True)


@_composite
def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    return jax.nn.softmax(x, axis=-1)


@_composite
def rotary(x_BTE: Array, positions_BT: Array, inv_freq_R: Array, *, heads: int) -> Array:
    """Turn the first ``2 R`` elements of each head by the angle of its position; pairs are (i, i + R)."""
    B, T, E = x_BTE.shape
    R = inv_freq_R.shape[0]
    x_BTNH = x_BTE.reshape(B, T, heads, E // heads)
    angle_BT1R = (positions_BT.astype(jnp.float32)[:, :, None] * inv_freq_R[None, None, :])[:, :, None, :]
    cos, sin = jnp.cos(angle_BT1R), jnp.sin(angle_BT1R)
    first, second, *rest = jnp.split(x_BTNH.astype(jnp.float32), [R, 2 * R] if 2 * R < E // heads else [R], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin, *rest]
    return jnp.concatenate(turned, axis=-1).astype(x_BTE.dtype).reshape(B, T, E)


@_composite
def cache_write(cache_BKSH: Array, new_BTE: Array, length_B: Array) -> Array:
    """Write T new positions behind the ``length`` held ones. The caller guarantees ``length + T <= S``."""
    B, K, _, H = cache_BKSH.shape
    T = new_BTE.shape[1]
    new_BKTH = new_BTE.reshape(B, T, K, H).transpose(0, 2, 1, 3)
    rows = lax.broadcasted_iota(jnp.int32, (B, K, T), 0)
    heads = lax.broadcasted_iota(jnp.int32, (B, K, T), 1)
    slots = length_B[:, None, None] + lax.broadcasted_iota(jnp.int32, (B, K, T), 2)
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(3,), inserted_window_dims=(0, 1, 2), scatter_dims_to_operand_dims=(0, 1, 2)
    )
    return lax.scatter(
        cache_BKSH,
        jnp.stack([rows, heads, slots], axis=-1),
        new_BKTH.astype(cache_BKSH.dtype),
        dims,
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


@_composite
def attention(
    q_BTE: Array, k_BKSH: Array, v_BKSH: Array, length_B: Array, *, heads: int, scale: float, window: int | None = None
) -> Array:
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of T queries over the cache: [B, T, E].

    Query t of row b sits at position ``length[b] + t`` and sees the slots ``s <= position``, with a ``window`` only
    those with ``position - s < window``.  Scores and softmax are float32.
    """
    B, T, E = q_BTE.shape
    _, K, S, H = k_BKSH.shape
    q_BKGTH = q_BTE.reshape(B, T, K, heads // K, H).transpose(0, 2, 3, 1, 4)
    scores_BKGTS = jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k_BKSH).astype(jnp.float32) * scale
    position_BT1 = (length_B[:, None] + lax.iota(jnp.int32, T)[None, :])[:, :, None]
    slot_S = lax.iota(jnp.int32, S)[None, None, :]
    seen_BTS = slot_S <= position_BT1
    if window is not None:
        seen_BTS = seen_BTS & (position_BT1 - slot_S < window)
    scores_BKGTS = jnp.where(seen_BTS[:, None, None, :, :], scores_BKGTS, -jnp.inf)
    out_BKGTH = jnp.einsum("bkgts,bksh->bkgth", softmax(scores_BKGTS).astype(v_BKSH.dtype), v_BKSH)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, E).astype(q_BTE.dtype)


@_composite
def cached_attention(
    qkv: tuple[Array, ...],
    cache_k_BKSH: Array,
    cache_v_BKSH: Array,
    length_B: Array,
    inv_freq_R: Array,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
) -> tuple[Array, Array, Array]:
    """Rotate q and k, append k and v to the cache, attend over it -> (out [B, T, N H], cache_k, cache_v).

    ``qkv`` is one packed array ``[B, T, (N + 2 K) H]`` or its three parts along the last axis.
    """
    _, K, _, H = cache_k_BKSH.shape
    q, k, v = qkv if len(qkv) == 3 else jnp.split(qkv[0], [heads * H, (heads + K) * H], axis=-1)
    positions_BT = length_B[:, None] + lax.iota(jnp.int32, q.shape[1])[None, :]
    q = rotary(q, positions_BT, inv_freq_R, heads=heads)
    k = rotary(k, positions_BT, inv_freq_R, heads=K)
    cache_k = cache_write(cache_k_BKSH, k, length_B)
    cache_v = cache_write(cache_v_BKSH, v, length_B)
    return attention(q, cache_k, cache_v, length_B, heads=heads, scale=scale, window=window), cache_k, cache_v
