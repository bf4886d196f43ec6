"""The model's composites as fused operators, per dialect.

``standard`` is ai.onnx at opset 24; ``ort`` adds the operators of ONNX Runtime's com.microsoft domain.  A composite
without a rule in a target's dialects is lowered through its decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import onnx_ir as ir

from diptych.export.lowering.graph import Operand
from diptych.export.lowering.rules import Context, arange, broadcast, composite, int64
from diptych.export.tracing import Aval, is_static

_FLOAT32, _INT32, _INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


@composite("diptych.softmax", "basic")
def _softmax(ctx: Context, x: Operand) -> Operand:
    return ctx.op("Softmax", x, axis=-1)


@composite("diptych.layer_norm", "basic")
def _layer_norm(ctx: Context, x: Operand, scale: Operand, *bias: Operand, eps: float) -> Operand:
    return ctx.op("LayerNormalization", x, scale, *bias, axis=-1, epsilon=eps)


@composite("diptych.add_layer_norm", "ort")
def _skip_layer_norm(
    ctx: Context, x: Operand, delta: Operand, scale: Operand, *bias: Operand, eps: float
) -> Sequence[Operand]:
    return _skip(ctx, "SkipLayerNormalization", x, delta, scale, *bias, eps=eps)


@composite("diptych.block_linear", "ort")
def _mat_mul_n_bits(
    ctx: Context, x: Operand, packed: Operand, scale: Operand, *offsets: Operand, bits: int, block: int
) -> Operand:
    """``MatMulNBits``, and for shifted blocks the means of the inputs' blocks times the shifts."""
    x_aval, (outputs, blocks, _) = ctx.in_avals[0], ctx.in_avals[1].shape
    shift, zero = _offsets(offsets, ctx.in_avals[3:])
    product = ctx.op(
        "MatMulNBits",
        x,
        packed,
        scale,
        *zero,
        domain="com.microsoft",
        K=blocks * block,
        N=outputs,
        bits=bits,
        block_size=block,
        accuracy_level=ctx.accuracy_level,
    )
    if not shift:
        return product
    like = Aval((*x_aval.shape[:-1], blocks), x_aval.dtype)
    means = ctx.op("AveragePool", x, like=like, kernel_shape=[block], strides=[block])
    return ctx.op("Add", product, ctx.op("MatMul", means, shift[0]))


@composite("diptych.block_dequantize", "standard")
def _dequantize_linear(ctx: Context, packed: Operand, scale: Operand, *offsets: Operand, bits: int) -> Any:
    (rows, blocks, size), out = ctx.in_avals[0].shape, ctx.out_avals[0]
    shift, zero = _offsets(offsets, ctx.in_avals[2:])
    padded = bool(zero) and blocks * bits % 8 != 0  # rows of zero points that end in half a byte
    if bits not in (4, 8) or not is_static(rows) or padded:
        return NotImplemented
    dtype = np.dtype(np.uint8 if bits == 8 else ml_dtypes.uint4)
    integers = ctx.graph.view(packed, Aval(out.shape, dtype))
    like = Aval((rows, blocks), dtype)
    points = ctx.graph.view(zero[0], like) if zero else _centre(ctx, bits, like)
    block = size * 8 // bits
    values: Operand = ctx.op("DequantizeLinear", integers, scale, points, axis=1, block_size=block)
    if not shift:
        return values
    apart = Aval((rows, blocks, block), out.dtype)
    scaled = ctx.op("Mul", shift[0], np.array(1 / block, np.float32), like=Aval((blocks, rows), out.dtype))
    each = ctx.graph.unsqueeze(ctx.graph.transpose(scaled, (blocks, rows), (1, 0)), [2])
    shifted = ctx.op("Add", ctx.graph.reshape(values, out.shape, apart.shape), each, like=apart)
    return ctx.graph.reshape(shifted, apart.shape, out.shape)


def _centre(ctx: Context, bits: int, like: Aval) -> Operand:
    """The zero points of centred blocks, out of one: a runtime spreads it once, when it opens the graph."""
    with ctx.graph.shared():
        one = np.full((1, 1), 1 << (bits - 1), np.uint8)  # Expand has no integers of four bits
        return ctx.graph.cast(ctx.graph.full(one, Aval(like.shape, one.dtype)), like.dtype)


def _offsets(operands: Sequence[Operand], avals: Sequence[Aval]) -> tuple[list[Operand], list[Operand]]:
    """The shifts of blocks, which are real numbers, and their zero points: lists of one, or empty."""
    whole = [aval.dtype == np.uint8 for aval in avals]
    shifts = [x for x, is_whole in zip(operands, whole, strict=True) if not is_whole]
    return shifts, [x for x, is_whole in zip(operands, whole, strict=True) if is_whole]


@composite("diptych.gelu", "standard")
def _gelu(ctx: Context, x: Operand) -> Operand:
    return ctx.op("Gelu", x)


@composite("diptych.gelu_tanh", "standard")
def _gelu_tanh(ctx: Context, x: Operand) -> Operand:
    return ctx.op("Gelu", x, approximate="tanh")


@composite("diptych.rms_norm", "standard")
def _rms_norm(ctx: Context, x: Operand, scale: Operand, *, eps: float, scale_first: bool) -> Operand:
    return ctx.op("RMSNormalization", x, scale, axis=-1, epsilon=eps)


@composite("diptych.rms_norm", "ort")
def _simplified_norm(ctx: Context, x: Operand, scale: Operand, *, eps: float, scale_first: bool) -> Operand:
    return ctx.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=eps)


@composite("diptych.add_rms_norm", "ort")
def _skip_norm(
    ctx: Context, x: Operand, delta: Operand, scale: Operand, *, eps: float, scale_first: bool
) -> Sequence[Operand]:
    return _skip(ctx, "SkipSimplifiedLayerNormalization", x, delta, scale, eps=eps)


def _skip(ctx: Context, op_type: str, *operands: Operand, eps: float) -> Sequence[Operand]:
    normed, total = ctx.out_avals
    outputs = ctx.graph.ops(op_type, *operands, like=[normed, None, None, total], domain="com.microsoft", epsilon=eps)
    return outputs[0], outputs[3]


def _rope_tables(ctx: Context, inv_freq: np.ndarray, magnitude: float) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine of each position's angles times ``magnitude``, float32 [max_context, R] each.

    They depend on constants alone, so a runtime computes them once, when it opens the graph, and nothing is stored.
    The angle is rounded to float32, as the model's own code does it in training. Its cosine is taken in float32 too:
    ONNX Runtime is right to a unit in the last place there, and not all versions have a cosine of doubles.
    """
    like = Aval((ctx.max_context, inv_freq.size), _FLOAT32)
    with ctx.graph.shared():
        positions = ctx.op("Range", *map(_float32, (0, ctx.max_context, 1)), like=Aval(like.shape[:1], _FLOAT32))
        angles = ctx.op("Mul", ctx.graph.unsqueeze(positions, [1]), inv_freq, like=like)
        cos, sin = (ctx.op(function, angles, like=like) for function in ("Cos", "Sin"))
        if magnitude != 1.0:
            cos, sin = (ctx.op("Mul", table, _float32(magnitude), like=like) for table in (cos, sin))
    return cos, sin


def _float32(value: float) -> np.ndarray:
    return np.array(value, _FLOAT32)


@composite("diptych.rotary", "standard")
def _rotary(
    ctx: Context,
    x: Operand,
    positions: Operand,
    inv_freq: Operand,
    *,
    heads: int,
    interleaved: bool,
    magnitude: float,
) -> Any:
    if not isinstance(inv_freq, np.ndarray):
        return NotImplemented
    head_size, width = ctx.in_avals[0].shape[-1] // heads, 2 * inv_freq.size
    options: dict[str, Any] = {} if width == head_size else {"rotary_embedding_dim": width}
    return ctx.op(
        "RotaryEmbedding",
        x,
        *_rope_tables(ctx, inv_freq, magnitude),
        ctx.graph.cast(positions, np.int64),
        num_heads=heads,
        **({"interleaved": 1, **options} if interleaved else options),
    )


@composite("diptych.cache_write", "standard")
def _cache_write(ctx: Context, cache: Operand, new: Operand, length: Operand) -> Operand:
    cache_aval, new_aval = ctx.in_avals[:2]
    (_, K, _, H), (B, T, _) = cache_aval.shape, new_aval.shape
    new = ctx.graph.cast(new, cache_aval.dtype)
    heads_first = ctx.graph.transpose(ctx.graph.reshape(new, new_aval.shape, (B, T, K, H)), (B, T, K, H), (0, 2, 1, 3))
    return ctx.op("TensorScatter", cache, heads_first, ctx.graph.cast(length, np.int64), axis=2)


@composite("diptych.attention", "standard")
def _attention(
    ctx: Context,
    q: Operand,
    k: Operand,
    v: Operand,
    length: Operand,
    *sink: Operand,
    heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Any:
    if sink:
        return NotImplemented
    B, T, E = ctx.in_avals[0].shape
    H = E // heads
    q = ctx.graph.transpose(ctx.graph.reshape(q, (B, T, E), (B, T, heads, H)), (B, T, heads, H), (0, 2, 1, 3))
    like = Aval((B, heads, T, H), ctx.out_avals[0].dtype)
    options: dict[str, Any] = {"scale": scale, **({} if softcap is None else {"softcap": softcap})}
    if window is None:
        with ctx.graph.shared():
            end = _plus(ctx, ctx.graph.cast(length, np.int64), T, _INT64)
        out = ctx.op("Attention", q, k, v, None, None, None, end, like=like, is_causal=1, **options)
    else:
        out = ctx.op("Attention", q, k, v, _window_mask(ctx, length, window), like=like, **options)
    return ctx.graph.reshape(ctx.graph.transpose(out, like.shape, (0, 2, 1, 3)), (B, T, heads, H), (B, T, E))


def _window_mask(ctx: Context, length: Operand, window: int) -> ir.Value:
    """Which slots each new token sees, bool [B, 1, T, S]: those at most ``window`` - 1 behind it, and itself."""
    graph, (B, T, _), S = ctx.graph, ctx.in_avals[0].shape, ctx.in_avals[1].shape[2]
    mask = Aval((B, 1, T, S), np.dtype(np.bool_))
    with graph.shared():
        position = graph.unsqueeze(_plus(ctx, graph.unsqueeze(length, [1]), arange(ctx, T, np.int32), _INT32), [1, 3])
        behind = ctx.op("Sub", position, arange(ctx, S, np.int32), like=Aval(mask.shape, _INT32))
        past = ctx.op("GreaterOrEqual", behind, np.array(0, np.int32), like=mask)
        near = ctx.op("Less", behind, np.array(window, np.int32), like=mask)
        return ctx.op("And", past, near, like=mask)


@composite("diptych.experts", "ort")
def _mixture(
    ctx: Context,
    *operands: Operand,
    top_k: int,
    normalised: bool,
    alpha: float,
    beta: float,
    limit: float | None,
) -> Any:
    """``MoE``, which computes the chosen experts only. In float32 its kernel takes nothing but interleaved SwiGLU."""
    x, router, gate_up, down, *biases = operands
    gate_up_bias, down_bias = biases or (None, None)
    clip: dict[str, Any] = {} if limit is None else {"swiglu_limit": limit}
    aval = ctx.in_avals[1]
    if aval.dtype != np.float32:
        return NotImplemented
    B, T, E = aval.shape
    return ctx.op(
        "MoE",
        x,
        ctx.graph.reshape(router, aval.shape, (B * T, E)),
        gate_up,
        gate_up_bias,
        down,
        *(() if down_bias is None else (down_bias,)),
        domain="com.microsoft",
        k=top_k,
        normalize_routing_weights=int(normalised),
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=alpha,
        activation_beta=beta,
        **clip,
    )


@composite("diptych.cached_attention", "ort")
def _group_query_attention(
    ctx: Context,
    *operands: Operand,
    heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    interleaved: bool,
    magnitude: float,
    sinks: bool,
) -> Any:
    """``GroupQueryAttention`` with rotary inside and the cache written in place.

    Padding is treated as tokens: it lies behind the row's length, where causal attention never looks.
    """
    out, present, _ = ctx.out_avals
    K, H, T = present.shape[1], present.shape[3], out.shape[1]
    packed = ctx.in_avals[0].shape[2] != out.shape[2]
    qkv, (cache_k, cache_v, length, *rest) = operands[: 1 if packed else 3], operands[1 if packed else 3 :]
    rest, scales = (rest[:-2], rest[-2:]) if present.dtype == np.int8 else (rest, [])
    inv_freq, sink = (rest[:-1], rest[-1:]) if sinks else (rest, [])
    turning = [table for table in inv_freq if _turns(table, H)]
    if H % 8 or out.dtype != np.float32 or len(turning) < len(inv_freq):
        return NotImplemented
    options: dict[str, Any] = {}
    if turning:  # the tables' width says how much of a head turns
        options |= {"do_rotary": 1, **({"rotary_interleaved": 1} if interleaved else {})}
    if softcap is not None:
        options["softcap"] = softcap
    if scales:
        options |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    with ctx.graph.shared():
        last = _plus(ctx, length, T - 1, _INT32)
        longest = ctx.op("ReduceMax", last, like=Aval((), _INT32), keepdims=0)
        total = ctx.op("Add", longest, np.array(1, np.int32), like=Aval((), _INT32))
    tables = [part for table in turning for part in _rope_tables(ctx, table, magnitude)]
    # Positions and a bias, which nobody gives, lie between tables and sink.
    optional: list[Operand | None] = [*(tables or (None, None)), None, None, *(sink or (None,)), *scales]
    while optional and optional[-1] is None:
        optional.pop()
    return ctx.graph.ops(
        "GroupQueryAttention",
        *((qkv[0], None, None) if packed else qkv),
        cache_k,
        cache_v,
        last,
        total,
        *optional,
        like=list(ctx.out_avals),
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=K,
        scale=scale,
        local_window_size=-1 if window is None else window,
        **options,
    )


def _turns(inv_freq: Operand, H: int) -> TypeGuard[np.ndarray]:
    """Whether GroupQueryAttention can rotate a head of size H so; its kernel works in vectors of eight."""
    return isinstance(inv_freq, np.ndarray) and H % 16 == 0 and inv_freq.size % 8 == 0


def _plus(ctx: Context, x: Operand, amount: Any, dtype: np.dtype[Any]) -> Operand:
    """``x + amount``, where the amount is a dimension or a value."""
    if is_static(amount):
        amount = int64(amount).astype(dtype) if amount else None
    elif not isinstance(amount, (np.ndarray, ir.Value)):
        amount = ctx.graph.cast(ctx.graph.dim(amount), dtype)
    if amount is None or (isinstance(amount, np.ndarray) and not amount.any()):
        return x
    return ctx.op("Add", x, amount, like=Aval(broadcast(ctx, x, amount).shape, dtype))
