"""One decoder for every family: two pure functions of (static configuration, parameters, cache state, tokens).

``prefill`` reads many tokens in one pass, ``decode`` one token per row.  Both return float32 logits and the new
cache.  The cache argument of the compiled functions is donated: do not use it again.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from diptych.jax_model.blocks import Blocks
from diptych.jax_model.composites import (
    add_layer_norm,
    add_rms_norm,
    block_dequantize,
    block_linear,
    cached_attention,
    experts,
    gelu,
    gelu_tanh,
    layer_norm,
    rms_norm,
    rotary,
    softmax,
)
from diptych.jax_model.config import CACHE_SCALES, CacheDtype, Config, Experts, LatentLayer, Layer
from diptych.jax_model.rope import Rope, frequencies

__all__ = ["Cache", "decode", "forward_decode", "forward_prefill", "prefill"]

Params: TypeAlias = dict[str, Any]


def _relu_squared(x: Array) -> Array:
    """Squared ReLU (So et al. 2021, arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


_ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu_squared": _relu_squared, "silu": jax.nn.silu}


@struct.dataclass
class Cache:
    """Keys and values of the tokens read so far, one pair of buffers per layer.

    ``k`` and ``v`` hold L arrays [B, K, S, H]; ``length`` [B] int32 counts the tokens in each row.  What lies behind
    ``length`` is undefined.  Where they are integers, the parameters have their scales.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    length: Array

    @classmethod
    def zeros(cls, config: Config, B: int, S: int, dtype: CacheDtype = "float32") -> Cache:
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
        x_BTD = _embed(config, params, tokens_BT, cache.length)
    delta_BTD = None
    cache_k, cache_v = list(cache.k), list(cache.v)
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        with jax.named_scope(f"layers.{i}"):
            x_BTD, delta_BTD, cache_k[i], cache_v[i] = _block(
                config, layer, weights, x_BTD, delta_BTD, cache_k[i], cache_v[i], cache.length
            )
    assert delta_BTD is not None, "a model has at least one layer"
    return x_BTD, delta_BTD, tuple(cache_k), tuple(cache_v)


def _embed(config: Config, params: Params, tokens_BT: Array, length_B: Array) -> Array:
    x_BTD = _lookup(params["embed"], tokens_BT)
    if config.embed_scale != 1.0:
        x_BTD = x_BTD * jnp.asarray(config.embed_scale, x_BTD.dtype)
    if config.learned_positions:
        positions_BT = length_B[:, None] + lax.iota(jnp.int32, tokens_BT.shape[1])[None, :]
        x_BTD = x_BTD + jnp.take(params["positions"], positions_BT, axis=0, mode="clip")
    return x_BTD


def _lookup(table: Any, tokens_BT: Array) -> Array:
    """Rows of an array [V, D] or of blocks of integers."""
    if not isinstance(table, Blocks):
        return jnp.take(table, tokens_BT, axis=0, mode="clip")
    tokens = tokens_BT.reshape(-1)
    packed, scale = (jnp.take(part, tokens, axis=0, mode="clip") for part in (table.packed, table.scale))
    zero = None if table.zero is None else jnp.take(table.zero, tokens, axis=0, mode="clip")
    shift = None if table.shift is None else jnp.take(table.shift, tokens, axis=1, mode="clip")
    return block_dequantize(packed, scale, shift, zero, bits=table.bits).reshape(*tokens_BT.shape, table.inputs)


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
        h_BTD, x_BTD = _enter(config, weights, "attn_norm", x_BTD, delta_BTD)
        operands = weights["attn"], h_BTD, cache_k, cache_v, length_B
        if isinstance(layer, LatentLayer):
            attended_BTD, cache_k, cache_v = _latent_attention(config, layer, *operands)
        else:
            attended_BTD, cache_k, cache_v = _attention(config, layer, *operands)
        delta_BTD = _leave(config, weights, "attn_post_norm", attended_BTD)
    with jax.named_scope("mlp"):
        if config.norm_placement == "parallel":
            if "mlp_norm" in weights:
                h_BTD = _norm(config, weights, "mlp_norm", x_BTD)
            delta_BTD = delta_BTD + _leave(config, weights, "", _mlp(config, layer, weights["mlp"], h_BTD))
            return x_BTD, delta_BTD, cache_k, cache_v
        h_BTD, x_BTD = _enter(config, weights, "mlp_norm", x_BTD, delta_BTD)
        delta_BTD = _leave(config, weights, "mlp_post_norm", _mlp(config, layer, weights["mlp"], h_BTD))
    return x_BTD, delta_BTD, cache_k, cache_v


def _enter(config: Config, weights: Params, name: str, x: Array, delta: Array | None) -> tuple[Array, Array]:
    """``delta`` joins the residual; a sublayer reads the norm of the sum, or the sum itself where norms come after."""
    if config.norm_placement == "after":
        total = x if delta is None else x + delta
        return total, total
    if delta is None:
        return _norm(config, weights, name, x), x
    return _add_norm(config, weights, name, x, delta)


def _add_norm(config: Config, weights: Params, name: str, x: Array, delta: Array) -> tuple[Array, Array]:
    scale, bias = _norm_weights(config, weights, name)
    if config.norm == "layer":
        return add_layer_norm(x, delta, scale, bias, eps=config.norm_eps)
    return add_rms_norm(x, delta, scale, eps=config.norm_eps, scale_first=config.norm_scale_first)


def _leave(config: Config, weights: Params, name: str, delta: Array) -> Array:
    """What a sublayer hands to the residual."""
    if config.norm_placement in ("around", "after"):
        delta = _norm(config, weights, name, delta)
    return delta if config.residual_scale == 1.0 else delta * jnp.asarray(config.residual_scale, delta.dtype)


def _norm(config: Config, weights: Params, name: str, x: Array) -> Array:
    scale, bias = _norm_weights(config, weights, name, x.shape[-1])
    if config.norm == "layer":
        return layer_norm(x, scale, bias, eps=config.norm_eps)
    return rms_norm(x, scale, eps=config.norm_eps, scale_first=config.norm_scale_first)


def _norm_weights(config: Config, weights: Params, name: str, width: int | None = None) -> tuple[Array, Array | None]:
    """Scale and bias; OLMo's norms have neither."""
    scale = weights.get(name)
    return jnp.ones(width or config.D, jnp.float32) if scale is None else scale, weights.get(f"{name}_bias")


def _attention(
    config: Config, layer: Layer, weights: Params, h_BTD: Array, cache_k: Array, cache_v: Array, length_B: Array
) -> tuple[Array, Array, Array]:
    qkv, rope = _qkv(config, layer, weights, h_BTD, length_B)
    out_BTE, cache_k, cache_v = _attend(config, layer, rope, qkv, weights, cache_k, cache_v, length_B)
    return _linear(weights, "out", out_BTE), cache_k, cache_v


def _attend(
    config: Config,
    layer: Layer,
    rope: Rope | None,
    qkv: tuple[Array, ...],
    weights: Params,
    cache_k: Array,
    cache_v: Array,
    length_B: Array,
) -> tuple[Array, Array, Array]:
    inv_freq, magnitude = (None, 1.0) if rope is None else frequencies(rope, config.max_positions)
    sink_N, scales = weights.get("sink"), tuple(weights[name] for name in CACHE_SCALES if name in weights)
    if jnp.issubdtype(cache_k.dtype, jnp.integer) != bool(scales):
        raise ValueError(
            f"a cache of {cache_k.dtype} and parameters with {len(scales)} scales of it do not go together"
        )
    attended: tuple[Array, Array, Array] = cached_attention(
        qkv,
        cache_k,
        cache_v,
        length_B,
        None if inv_freq is None else jnp.asarray(inv_freq),
        sink_N,
        scales,
        heads=config.N,
        scale=config.attn_scale,
        window=layer.window,
        softcap=config.attn_softcap,
        interleaved=rope is not None and rope.interleaved,
        magnitude=magnitude,
        sinks=sink_N is not None,
    )
    return attended


def _latent_attention(
    config: Config, layer: LatentLayer, weights: Params, h_BTD: Array, cache_k: Array, cache_v: Array, length_B: Array
) -> tuple[Array, Array, Array]:
    """Attention over what all heads share, see :class:`LatentLayer`.

    ``kv_up`` [N, rank, key + value] makes each head's key and value of the shared elements.  A head's score is
    ``q · (up_key shared)``, which is ``(q up_key) · shared``; and the attended values are ``up_value`` of the attended
    shared elements.  The cache's values are the shared elements again, behind some that nobody reads.
    """
    (B, T, _), turning = h_BTD.shape, config.H - layer.rank
    query_from = h_BTD
    if layer.query_rank is not None:
        query_from = _latent_norm(_linear(weights, "query_down", h_BTD), weights["query_norm"])
    q_BTNH = (query_from @ weights["query"]).reshape(B, T, config.N, layer.key + turning)
    plain_BTNH, turned_BTNH = jnp.split(q_BTNH, [layer.key], axis=-1)
    up_key, up_value = jnp.split(weights["kv_up"], [layer.key], axis=-1)
    q_BTNH = jnp.concatenate([turned_BTNH, jnp.einsum("btnh,nrh->btnr", plain_BTNH, up_key)], axis=-1)
    shared_BTR, turned_BTH = jnp.split(_linear(weights, "kv_down", h_BTD), [layer.rank], axis=-1)
    kv_BTH = jnp.concatenate([turned_BTH, _latent_norm(shared_BTR, weights["kv_norm"])], axis=-1)
    qkv = q_BTNH.reshape(B, T, config.N * config.H), kv_BTH, kv_BTH
    out_BTE, cache_k, cache_v = _attend(config, layer, layer.rope, qkv, weights, cache_k, cache_v, length_B)
    _, out_BTNR = jnp.split(out_BTE.reshape(B, T, config.N, config.H), [turning], axis=-1)
    values_BTNH = jnp.einsum("btnr,nrh->btnh", out_BTNR, up_value)
    return _linear(weights, "out", values_BTNH.reshape(B, T, config.N * layer.value)), cache_k, cache_v


def _latent_norm(x: Array, scale: Array) -> Array:
    """The norms inside latent attention have an epsilon of their own, whatever the configuration says."""
    return rms_norm(x, scale, eps=1e-6, scale_first=False)


def _linear(weights: Params, name: str, x: Array) -> Array:
    y = _product(x, weights[name])
    bias = weights.get(f"{name}_bias")
    return y if bias is None else y + bias


def _projections(weights: Params, name: str, x: Array) -> tuple[Array, ...]:
    """Packed projections: one array, or one each where their weights are blocks of several forms and lie apart."""
    matrices, bias = weights[name], weights.get(f"{name}_bias")
    if not isinstance(matrices, list):
        return (_linear(weights, name, x),)
    parts = tuple(_product(x, matrix) for matrix in matrices)
    if bias is None:
        return parts
    ends = itertools.accumulate(matrix.outputs for matrix in matrices[:-1])
    return tuple(part + own for part, own in zip(parts, jnp.split(bias, list(ends)), strict=True))


def _apart(parts: tuple[Array, ...], cuts: int | list[int]) -> tuple[Array, ...]:
    """Packed projections, one array each; ``cuts`` are those of :func:`jax.numpy.split`."""
    return parts if len(parts) > 1 else tuple(jnp.split(parts[0], cuts, axis=-1))


def _product(x: Array, w: Any) -> Array:
    """``x @ w`` for an array [in, out] or blocks of integers."""
    if isinstance(w, Blocks):
        return block_linear(x, w.packed, w.scale, w.shift, w.zero, bits=w.bits, block=w.block)
    y: Array = x @ w
    return y


def _qkv(
    config: Config, layer: Layer, weights: Params, h_BTD: Array, length_B: Array
) -> tuple[tuple[Array, ...], Rope | None]:
    """Queries, keys and values, packed in one array unless something happens to the parts; and the rope still to do."""
    parts = _projections(weights, "qkv", h_BTD)
    if config.qkv_clip is not None:
        parts = tuple(jnp.clip(part, -config.qkv_clip, config.qkv_clip) for part in parts)
    if config.qk_norm is None:
        return parts, layer.rope
    q, k, v = _apart(parts, [config.N * config.H, (config.N + config.K) * config.H])
    rope = layer.rope
    if config.qk_norm == "head_after_rope" and rope is not None:
        q, k = (_rotate(config, rope, x, length_B) for x in (q, k))
        rope = None
    return (_qk_norm(config, weights, "q_norm", q), _qk_norm(config, weights, "k_norm", k), v), rope


def _rotate(config: Config, rope: Rope, x_BTE: Array, length_B: Array) -> Array:
    inv_freq, magnitude = frequencies(rope, config.max_positions)
    positions_BT = length_B[:, None] + lax.iota(jnp.int32, x_BTE.shape[1])[None, :]
    heads = x_BTE.shape[-1] // config.H
    return rotary(
        x_BTE, positions_BT, jnp.asarray(inv_freq), heads=heads, interleaved=rope.interleaved, magnitude=magnitude
    )


def _qk_norm(config: Config, weights: Params, name: str, x_BTE: Array) -> Array:
    if config.qk_norm == "width":
        return _norm(config, weights, name, x_BTE)
    B, T, E = x_BTE.shape
    return _norm(config, weights, name, x_BTE.reshape(B, T, E // config.H, config.H)).reshape(B, T, E)


def _mlp(config: Config, layer: Layer, weights: Params, h_BTD: Array) -> Array:
    if layer.experts is not None:
        return _experts(config, layer.experts, weights, h_BTD)
    return _feed_forward(config, weights, h_BTD)


def _feed_forward(config: Config, weights: Params, h_BTD: Array) -> Array:
    """A feed-forward layer, gated (Shazeer 2020, arXiv:2002.05202) or plain."""
    activation = _ACTIVATIONS[config.activation]
    if not config.gated:
        return _linear(weights, "down", activation(_linear(weights, "up", h_BTD)))
    gate_BTF, up_BTF = _apart(_projections(weights, "gate_up", h_BTD), 2)
    return _linear(weights, "down", activation(gate_BTF) * up_BTF)


def _experts(config: Config, spec: Experts, weights: Params, h_BTD: Array) -> Array:
    stacks, router_BTE = weights["experts"], _linear(weights, "router", h_BTD)
    gain: Array | float = spec.scale
    if spec.scoring != "softmax" or spec.corrected or spec.groups > 1:
        router_BTE, total = _routed(spec, router_BTE, weights.get("router_correction"))
        gain = spec.scale if spec.normalised else spec.scale * total
    out_BTD = experts(
        h_BTD,
        router_BTE,
        stacks["gate_up"],
        stacks["down"],
        tuple(stacks[name] for name in ("gate_up_bias", "down_bias") if name in stacks),
        top_k=spec.top_k,
        normalised=spec.normalised,
        alpha=spec.alpha,
        beta=spec.beta,
        limit=spec.limit,
    )
    if not (isinstance(gain, float) and gain == 1.0):
        out_BTD = out_BTD * gain
    if spec.shared_F:
        shared_BTD = _feed_forward(config, weights["shared"], h_BTD)
        if spec.shared_gate:
            shared_BTD = shared_BTD * jax.nn.sigmoid(h_BTD @ weights["shared_gate"])
        out_BTD = out_BTD + shared_BTD
    return out_BTD


def _routed(spec: Experts, router_BTE: Array, correction_E: Array | None) -> tuple[Array, Array]:
    """The choice of :class:`Experts` as logits [B, T, E] of a softmax that gives the weights divided by their sum, with
    minus infinity for experts that are not chosen; and the sum [B, T, 1].
    """
    B, T, E = router_BTE.shape
    logits = router_BTE.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if spec.scoring == "sigmoid" else softmax(logits)
    choice = scores if correction_E is None else scores + correction_E
    if spec.groups > 1:
        grouped = choice.reshape(B, T, spec.groups, E // spec.groups)
        rank_BTG = jnp.sum(lax.top_k(grouped, spec.group_top)[0], axis=-1)
        choice = jnp.where(_best(rank_BTG, spec.top_groups)[..., None], grouped, -jnp.inf).reshape(B, T, E)
    chosen = _best(choice, spec.top_k)
    total = jnp.sum(jnp.where(chosen, scores, 0.0), axis=-1, keepdims=True)
    return jnp.where(chosen, jnp.log(scores), -jnp.inf).astype(router_BTE.dtype), total.astype(router_BTE.dtype)


def _best(x: Array, k: int) -> Array:
    """Which elements along the last axis are the k largest; of equal ones, the first."""
    indices = lax.top_k(x, k)[1]
    return jnp.sum(jax.nn.one_hot(indices, x.shape[-1]), axis=-2) > 0


def _head(config: Config, params: Params, x_BPD: Array, delta_BPD: Array) -> Array:
    with jax.named_scope("head"):
        h_BPD, _ = _add_norm(config, params, "final_norm", x_BPD, delta_BPD)
        if config.tied:
            embed = params["embed"]
            dense = not isinstance(embed, Blocks)
            logits_BPV = jnp.einsum("bpd,vd->bpv", h_BPD, embed) if dense else _product(h_BPD, embed)
        else:
            logits_BPV = _linear(params, "head", h_BPD)
        logits_BPV = logits_BPV.astype(jnp.float32)
        if config.logit_scale != 1.0:
            logits_BPV = logits_BPV * config.logit_scale
        if config.logit_softcap is not None:
            logits_BPV = config.logit_softcap * jnp.tanh(logits_BPV / config.logit_softcap)
        return logits_BPV
