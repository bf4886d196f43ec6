"""One decoder for every family: two pure functions of (static configuration, parameters, cache state, tokens).

``prefill`` reads many tokens in one pass, ``decode`` one token per row.  Both return float32 logits and the new
cache.  The cache argument of the compiled functions is donated: do not use it again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from diptych.jax_model.composites import add_rms_norm, cached_attention, gelu_tanh, rms_norm
from diptych.jax_model.config import Config, Layer
from diptych.jax_model.rope import inverse_frequencies

__all__ = ["Cache", "decode", "forward_decode", "forward_prefill", "prefill"]

Params: TypeAlias = dict[str, Any]

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": gelu_tanh}


@struct.dataclass
class Cache:
    """Keys and values of the tokens read so far, one pair of buffers per layer.

    ``k`` and ``v`` hold L arrays [B, K, S, H]; ``length`` [B] int32 counts the tokens in each row.  What lies behind
    ``length`` is undefined.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    length: Array

    @classmethod
    def zeros(cls, config: Config, B: int, S: int, dtype: Any = jnp.float32) -> Cache:
        """An empty cache of B rows and S slots."""

        def buffers() -> tuple[Array, ...]:
            return tuple(jnp.zeros((B, config.K, S, config.H), dtype) for _ in config.layers)

        return cls(buffers(), buffers(), jnp.zeros((B,), jnp.int32))


def forward_prefill(
    config: Config, params: Params, cache: Cache, tokens_BT: Array, num_tokens_B: Array, logit_positions_BP: Array
) -> tuple[Array, Cache]:
    """Append each row's first ``num_tokens`` tokens; logits [B, P, V] behind the tokens at ``logit_positions``.

    A row starts at its own ``cache.length``, so chunks of a long prompt, further turns of a chat and a reused prefix
    are the same call.  Rows are right-padded to T; padding writes undefined values behind the row's length, where
    nothing reads them.  The caller guarantees ``cache.length + T <= S``: JAX would clamp silently.
    """
    x_BTD, delta_BTD, cache_k, cache_v = _layers(config, params, cache, tokens_BT)
    x_BPD, delta_BPD = (_take_rows(part, logit_positions_BP) for part in (x_BTD, delta_BTD))
    logits_BPV = _head(config, params, x_BPD, delta_BPD)
    return logits_BPV, Cache(cache_k, cache_v, cache.length + num_tokens_B)


def forward_decode(config: Config, params: Params, cache: Cache, tokens_B: Array) -> tuple[Array, Cache]:
    """Append one token to every row; logits [B, V] behind it. The caller guarantees ``cache.length < S``."""
    x_B1D, delta_B1D, cache_k, cache_v = _layers(config, params, cache, tokens_B[:, None])
    logits_B1V = _head(config, params, x_B1D, delta_B1D)
    return jnp.squeeze(logits_B1V, 1), Cache(cache_k, cache_v, cache.length + 1)


prefill = jax.jit(forward_prefill, static_argnames="config", donate_argnames="cache")
decode = jax.jit(forward_decode, static_argnames="config", donate_argnames="cache")


def _take_rows(x_BTD: Array, index_BP: Array) -> Array:
    return jax.vmap(lambda x_TD, index_P: jnp.take(x_TD, index_P, axis=0, mode="clip"))(x_BTD, index_BP)


def _layers(
    config: Config, params: Params, cache: Cache, tokens_BT: Array
) -> tuple[Array, Array, tuple[Array, ...], tuple[Array, ...]]:
    """The residual stream behind the last layer, with that layer's output still to be added, and the new cache."""
    with jax.named_scope("embed"):
        x_BTD = jnp.take(params["embed"], tokens_BT, axis=0, mode="clip")
        if config.embed_scale != 1.0:
            x_BTD = x_BTD * jnp.asarray(config.embed_scale, x_BTD.dtype)
    delta_BTD = None
    cache_k, cache_v = list(cache.k), list(cache.v)
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        with jax.named_scope(f"layers.{i}"):
            x_BTD, delta_BTD, cache_k[i], cache_v[i] = _block(
                config, layer, weights, x_BTD, delta_BTD, cache_k[i], cache_v[i], cache.length
            )
    assert delta_BTD is not None, "a model has at least one layer"
    return x_BTD, delta_BTD, tuple(cache_k), tuple(cache_v)


def _block(
    config: Config,
    layer: Layer,
    weights: Params,
    x_BTD: Array,
    delta_BTD: Array | None,
    cache_k: Array,
    cache_v: Array,
    length_B: Array,
) -> tuple[Array, Array, Array, Array]:
    """One layer. ``delta`` is what the layer before returned; adding it here lets the addition merge with the norm."""
    with jax.named_scope("attn"):
        h_BTD, x_BTD = _norm_of_sum(config, x_BTD, delta_BTD, weights["attn_norm"])
        out_BTE, cache_k, cache_v = cached_attention(
            _qkv(config, weights["attn"], h_BTD),
            cache_k,
            cache_v,
            length_B,
            jnp.asarray(inverse_frequencies(layer.rope)),
            heads=config.N,
            scale=config.attn_scale,
            window=layer.window,
        )
        delta_BTD = out_BTE @ weights["attn"]["out"]
        if config.post_norms:
            delta_BTD = _norm(config, delta_BTD, weights["attn_post_norm"])
    with jax.named_scope("mlp"):
        h_BTD, x_BTD = _norm_of_sum(config, x_BTD, delta_BTD, weights["mlp_norm"])
        delta_BTD = _mlp(config, weights["mlp"], h_BTD)
        if config.post_norms:
            delta_BTD = _norm(config, delta_BTD, weights["mlp_post_norm"])
    return x_BTD, delta_BTD, cache_k, cache_v


def _norm(config: Config, x: Array, scale: Array) -> Array:
    return rms_norm(x, scale, eps=config.norm_eps, scale_first=config.norm_scale_first)


def _norm_of_sum(config: Config, x: Array, delta: Array | None, scale: Array) -> tuple[Array, Array]:
    if delta is None:
        return _norm(config, x, scale), x
    return add_rms_norm(x, delta, scale, eps=config.norm_eps, scale_first=config.norm_scale_first)


def _qkv(config: Config, weights: Params, h_BTD: Array) -> tuple[Array, ...]:
    """Queries, keys and values: packed in one array unless something must happen to the parts."""
    qkv_BTE = h_BTD @ weights["qkv"]
    if not config.qk_norm:
        return (qkv_BTE,)
    q_size, k_size = config.N * config.H, config.K * config.H
    q, k, v = jnp.split(qkv_BTE, np.cumsum([q_size, k_size]).tolist(), axis=-1)
    return _norm_heads(config, q, weights["q_norm"]), _norm_heads(config, k, weights["k_norm"]), v


def _norm_heads(config: Config, x_BTE: Array, scale_H: Array) -> Array:
    B, T, E = x_BTE.shape
    return _norm(config, x_BTE.reshape(B, T, E // config.H, config.H), scale_H).reshape(B, T, E)


def _mlp(config: Config, weights: Params, h_BTD: Array) -> Array:
    """The gated feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""
    gate_BTF: Array = _ACTIVATIONS[config.activation](h_BTD @ weights["gate"])
    out_BTD: Array = (gate_BTF * (h_BTD @ weights["up"])) @ weights["down"]
    return out_BTD


def _head(config: Config, params: Params, x_BPD: Array, delta_BPD: Array) -> Array:
    with jax.named_scope("head"):
        h_BPD, _ = _norm_of_sum(config, x_BPD, delta_BPD, params["final_norm"])
        if config.tied:
            logits_BPV = jnp.einsum("bpd,vd->bpv", h_BPD, params["embed"])
        else:
            logits_BPV = h_BPD @ params["head"]
        return logits_BPV.astype(jnp.float32)
