"""The model's semantic operations, each a named composite with its decomposition in plain JAX.

A jaxpr of the model carries these names and their attributes, so that an exporter can emit one fused operator for
each; an exporter that has none walks the decomposition, where smaller composites may be found.  They close over no
array (JAX would turn it into a hidden operand), and their attributes are Python scalars.  Shapes are in the letters
of :mod:`diptych.jax_model.config`; ``E`` stands for heads times head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from diptych.jax_model.blocks import dequantize

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "block_dequantize",
    "block_linear",
    "cache_write",
    "cached_attention",
    "experts",
    "gelu",
    "gelu_tanh",
    "layer_norm",
    "quantize_cached",
    "rms_norm",
    "rotary",
    "softmax",
]

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
def block_dequantize(packed: Array, scale: Array, shift: Array | None, zero: Array | None, *, bits: int) -> Array:
    """The matrix [out, in] that blocks of integers mean, see :mod:`diptych.jax_model.blocks`."""
    return dequantize(packed, scale, shift, zero, bits=bits)


@_composite
def block_linear(
    x: Array, packed: Array, scale: Array, shift: Array | None, zero: Array | None, *, bits: int, block: int
) -> Array:
    """``x @ w`` with w [in, out] stored in blocks; [..., in] -> [..., out]."""
    w_OI = block_dequantize(packed, scale, shift, zero, bits=bits)
    return jnp.einsum("bti,oi->bto", x, w_OI.astype(x.dtype))


@_composite
def layer_norm(x: Array, scale: Array, bias: Array | None, *, eps: float) -> Array:
    """Norm over the last axis by mean and variance (Ba et al. 2016, arXiv:1607.06450), computed in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * scale.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


@_composite
def add_layer_norm(x: Array, delta: Array, scale: Array, bias: Array | None, *, eps: float) -> tuple[Array, Array]:
    """``(layer_norm(x + delta), x + delta)``."""
    total = x + delta
    return layer_norm(total, scale, bias, eps=eps), total


@_composite
def gelu(x: Array) -> Array:
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=False)


@_composite
def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (the same paper, §2)."""
    return jax.nn.gelu(x, approximate=True)


@_composite
def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    return jax.nn.softmax(x, axis=-1)


@_composite
def rotary(
    x_BTE: Array, positions_BT: Array, inv_freq_R: Array, *, heads: int, interleaved: bool, magnitude: float
) -> Array:
    """Turn the first ``2 R`` elements of each head by the angle of its position.

    Pairs are (i, i + R), or (2 i, 2 i + 1) where ``interleaved``; ``magnitude`` multiplies what turns.
    """
    B, T, E = x_BTE.shape
    H, R = E // heads, inv_freq_R.shape[0]
    x_BTNH = x_BTE.reshape(B, T, heads, H).astype(jnp.float32)
    turning, rest = jnp.split(x_BTNH, [2 * R], axis=-1) if 2 * R < H else (x_BTNH, None)
    angle_BT1R = (positions_BT.astype(jnp.float32)[:, :, None] * inv_freq_R[None, None, :])[:, :, None, :]
    cos, sin = jnp.cos(angle_BT1R) * magnitude, jnp.sin(angle_BT1R) * magnitude
    if interleaved:
        pairs = turning.reshape(B, T, heads, R, 2)
        first, second = (jnp.squeeze(part, -1) for part in jnp.split(pairs, 2, axis=-1))
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turning = jnp.stack(turned, axis=-1).reshape(B, T, heads, 2 * R)
    else:
        turning = jnp.concatenate(turned, axis=-1)
    x_BTNH = turning if rest is None else jnp.concatenate([turning, rest], axis=-1)
    return x_BTNH.astype(x_BTE.dtype).reshape(B, T, E)


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
    q_BTE: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    length_B: Array,
    sink_N: Array | None = None,
    *,
    heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of T queries over the cache: [B, T, E].

    Query t of row b sits at position ``length[b] + t`` and sees the slots ``s <= position``, with a ``window`` only
    those with ``position - s < window``.  Scores and softmax are float32.  A ``sink`` is the score of one more slot
    whose value is zero: what the softmax gives to it is attention to nothing (arXiv:2309.17453).
    """
    B, T, E = q_BTE.shape
    _, K, S, H = k_BKSH.shape
    q_BKGTH = q_BTE.reshape(B, T, K, heads // K, H).transpose(0, 2, 3, 1, 4)
    scores_BKGTS = jnp.einsum("bkgth,bksh->bkgts", q_BKGTH, k_BKSH).astype(jnp.float32) * scale
    if softcap is not None:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    position_BT1 = (length_B[:, None] + lax.iota(jnp.int32, T)[None, :])[:, :, None]
    slot_S = lax.iota(jnp.int32, S)[None, None, :]
    seen_BTS = slot_S <= position_BT1
    if window is not None:
        seen_BTS = seen_BTS & (position_BT1 - slot_S < window)
    scores_BKGTS = jnp.where(seen_BTS[:, None, None, :, :], scores_BKGTS, -jnp.inf)
    weights_BKGTS = softmax(scores_BKGTS) if sink_N is None else _softmax_with_sink(scores_BKGTS, sink_N)
    out_BKGTH = jnp.einsum("bkgts,bksh->bkgth", weights_BKGTS.astype(v_BKSH.dtype), v_BKSH)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, E).astype(q_BTE.dtype)


def _softmax_with_sink(scores_BKGTS: Array, sink_N: Array) -> Array:
    B, K, G, T, S = scores_BKGTS.shape
    sink = jnp.broadcast_to(sink_N.astype(jnp.float32).reshape(1, K, G, 1, 1), (B, K, G, T, 1))
    return lax.slice_in_dim(softmax(jnp.concatenate([scores_BKGTS, sink], axis=-1)), 0, S, axis=-1)


@_composite
def cached_attention(
    qkv: tuple[Array, ...],
    cache_k_BKSH: Array,
    cache_v_BKSH: Array,
    length_B: Array,
    inv_freq_R: Array | None,
    sink_N: Array | None,
    scales: tuple[Array, ...],
    *,
    heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    interleaved: bool,
    magnitude: float,
    sinks: bool,
) -> tuple[Array, Array, Array]:
    """Rotate q and k, append k and v to the cache, attend over it -> (out [B, T, N H], cache_k, cache_v).

    ``qkv`` is one packed array ``[B, T, (N + 2 K) H]`` or its three parts along the last axis.  Without ``inv_freq``
    nothing is rotated; ``sinks`` says that there is a ``sink``, see :func:`attention`.  A cache of integers has
    ``scales`` [K, H] for keys and for values, see :func:`quantize_cached`; one of floats has none.
    """
    _, K, _, H = cache_k_BKSH.shape
    q, k, v = qkv if len(qkv) == 3 else jnp.split(qkv[0], [heads * H, (heads + K) * H], axis=-1)
    if inv_freq_R is not None:
        positions_BT = length_B[:, None] + lax.iota(jnp.int32, q.shape[1])[None, :]
        q = rotary(q, positions_BT, inv_freq_R, heads=heads, interleaved=interleaved, magnitude=magnitude)
        k = rotary(k, positions_BT, inv_freq_R, heads=K, interleaved=interleaved, magnitude=magnitude)
    cache_k, keys = _append(cache_k_BKSH, k, length_B, scales[:1])
    cache_v, values = _append(cache_v_BKSH, v, length_B, scales[1:])
    out = attention(q, keys, values, length_B, sink_N, heads=heads, scale=scale, window=window, softcap=softcap)
    return out, cache_k, cache_v


def _append(cache_BKSH: Array, new_BTE: Array, length_B: Array, scale: tuple[Array, ...]) -> tuple[Array, Array]:
    """The cache with new positions behind the held ones, and what attention reads of it.

    ONNX Runtime's kernel decides the latter: integers are read back, new ones too; of a cache in a narrower float type
    only what was there before has been rounded.
    """
    if scale:
        (scale_KH,) = scale
        cache_BKSH = cache_write(cache_BKSH, quantize_cached(new_BTE, scale_KH), length_B)
        return cache_BKSH, cache_BKSH.astype(new_BTE.dtype) * scale_KH[:, None, :].astype(new_BTE.dtype)
    written_BKSH = cache_write(cache_BKSH, new_BTE, length_B)
    if cache_BKSH.dtype == new_BTE.dtype:
        return written_BKSH, written_BKSH
    return written_BKSH, cache_write(cache_BKSH.astype(new_BTE.dtype), new_BTE, length_B)


def quantize_cached(x_BTE: Array, scale_KH: Array) -> Array:
    """``x / scale`` as int8, as ``GroupQueryAttention`` has it: to the nearest, halves to even, clipped."""
    steps_BTE = x_BTE.astype(jnp.float32) * (1.0 / scale_KH).reshape(-1)
    return jnp.clip(jnp.round(steps_BTE), -128, 127).astype(jnp.int8)


@_composite
def experts(
    x_BTD: Array,
    router_BTE: Array,
    gate_up: Array,
    down_EDM: Array,
    biases: tuple[Array, ...],
    *,
    top_k: int,
    normalised: bool,
    alpha: float,
    beta: float,
    limit: float | None,
) -> Array:
    """A mixture of gated experts of width M, each token's weighted sum of ``top_k`` of them (arXiv:2101.03961).

    ``router`` holds logits over all experts, whose probabilities choose and weight; of equal ones, any may be chosen.
    ``gate_up`` [E, 2 M, D] alternates rows of the gate and of what it multiplies; ``biases`` are theirs [E, 2 M] and
    those behind ``down`` [E, D], or none.  For ``alpha``, ``beta`` and ``limit`` see :class:`Experts
    <diptych.jax_model.config.Experts>`.
    """

    def activate(pairs: Array) -> Array:
        return _gated(pairs, alpha, beta, limit)

    chosen_BTk, indices_BTk = lax.top_k(softmax(router_BTE.astype(jnp.float32)), top_k)
    if normalised:
        chosen_BTk = chosen_BTk / jnp.sum(chosen_BTk, axis=-1, keepdims=True)
    chosen_BTk = chosen_BTk.astype(x_BTD.dtype)
    (B, T, _), E = x_BTD.shape, gate_up.shape[0]
    if isinstance(B * T, int) and B * T * top_k < E:
        return _gathered_experts(activate, x_BTD, chosen_BTk, indices_BTk, gate_up, down_EDM, biases)
    weights_BTE = jnp.sum(jax.nn.one_hot(indices_BTk, E, dtype=x_BTD.dtype) * chosen_BTk[..., None], axis=-2)
    return _dense_experts(activate, x_BTD, weights_BTE, gate_up, down_EDM, biases)


_Activate: TypeAlias = Callable[[Array], Array]


def _dense_experts(
    activate: _Activate,
    x_BTD: Array,
    weights_BTE: Array,
    gate_up: Array,
    down_EDM: Array,
    biases: tuple[Array, ...],
) -> Array:
    """Every expert for every token; those not chosen weigh nothing."""
    (B, T, D), (E, _, M) = x_BTD.shape, down_EDM.shape
    hidden = jnp.einsum("btd,nd->btn", x_BTD, gate_up.reshape(2 * E * M, D))
    if biases:
        hidden = hidden + biases[0].reshape(2 * E * M)
    hidden_BTEM = activate(hidden.reshape(B, T, E, M, 2)) * weights_BTE[..., None]
    out_BTD = jnp.einsum("btem,edm->btd", hidden_BTEM, down_EDM)
    return out_BTD + weights_BTE @ biases[1] if biases else out_BTD


def _gathered_experts(
    activate: _Activate,
    x_BTD: Array,
    chosen_BTk: Array,
    indices_BTk: Array,
    gate_up: Array,
    down_EDM: Array,
    biases: tuple[Array, ...],
) -> Array:
    """Copies the matrices of the chosen experts: for so few tokens that others would be read for nothing."""

    def chosen(of_all: Array) -> Array:
        return jnp.take(of_all, indices_BTk, axis=0, mode="clip")

    hidden = jnp.einsum("btd,btknd->btkn", x_BTD, chosen(gate_up))
    if biases:
        hidden = hidden + chosen(biases[0])
    B, T, k, N = hidden.shape
    hidden_BTkM = activate(hidden.reshape(B, T, k, N // 2, 2)) * chosen_BTk[..., None]
    out_BTD = jnp.einsum("btkm,btkdm->btd", hidden_BTkM, chosen(down_EDM))
    return out_BTD + jnp.einsum("btk,btkd->btd", chosen_BTk, chosen(biases[1])) if biases else out_BTD


def _gated(pairs: Array, alpha: float, beta: float, limit: float | None) -> Array:
    """The first of each pair times its sigmoid, times the second (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = (jnp.squeeze(part, -1) for part in jnp.split(pairs, 2, axis=-1))
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    scaled = gate if alpha == 1.0 else gate * alpha
    return gate * jax.nn.sigmoid(scaled) * (up if beta == 0.0 else up + beta)
