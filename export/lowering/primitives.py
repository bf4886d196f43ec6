"""JAX primitives as ONNX operators. A plain elementwise primitive is one line of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from diptych.export.lowering.graph import Operand, shape_of
from diptych.export.lowering.rules import Context, arange, broadcast, int64, primitive
from diptych.export.tracing import Aval, Dim

_ELEMENTWISE = {
    "abs": "Abs", "add": "Add", "ceil": "Ceil", "cos": "Cos", "div": "Div", "eq": "Equal", "erf": "Erf", "exp": "Exp",
    "floor": "Floor", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "log": "Log", "logistic": "Sigmoid",
    "lt": "Less", "max": "Max", "min": "Min", "mul": "Mul", "neg": "Neg", "pow": "Pow", "sign": "Sign", "sin": "Sin",
    "sqrt": "Sqrt", "sub": "Sub", "tanh": "Tanh",
}  # fmt: skip
_LOGICAL = {"and": "And", "or": "Or", "not": "Not"}
_BITWISE = {"and": "BitwiseAnd", "or": "BitwiseOr", "not": "BitwiseNot"}
_REDUCTIONS = {
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
    "reduce_sum": "ReduceSum",
}


def _elementwise(op_type: str) -> Any:
    def rule(ctx: Context, *operands: Operand, **_: Any) -> Operand:
        return ctx.op(op_type, *operands, like=broadcast(ctx, *operands))

    return rule


for _name, _op_type in _ELEMENTWISE.items():
    primitive(_name, lazy=True)(_elementwise(_op_type))


@primitive("add", lazy=True)
def _add(ctx: Context, x: Operand, y: Operand, **_: Any) -> Operand:
    for one, other in ((x, y), (y, x)):  # nothing to add: positions of a single token
        if isinstance(one, np.ndarray) and one.size == 1 and not one.any() and one.ndim <= len(shape_of(other)):
            return other
    return ctx.op("Add", x, y, like=broadcast(ctx, x, y))


def _logic(name: str) -> Any:
    def rule(ctx: Context, *operands: Operand, **_: Any) -> Operand:
        table = _LOGICAL if ctx.out_avals[0].dtype == np.bool_ else _BITWISE
        return ctx.op(table[name], *operands, like=broadcast(ctx, *operands))

    return rule


for _name in _LOGICAL:
    primitive(_name, lazy=True)(_logic(_name))


@primitive("shift_right_logical", lazy=True)
def _shift_right(ctx: Context, x: Operand, y: Operand, **_: Any) -> Operand:
    return ctx.op("BitShift", x, y, like=broadcast(ctx, x, y), direction="RIGHT")


@primitive("ne", lazy=True)
def _ne(ctx: Context, x: Operand, y: Operand, **_: Any) -> Operand:
    aval = broadcast(ctx, x, y)
    return ctx.op("Not", ctx.op("Equal", x, y, like=aval), like=aval)


@primitive("rem", lazy=True)
def _rem(ctx: Context, x: Operand, y: Operand, **_: Any) -> Operand:
    return ctx.op("Mod", x, y, like=broadcast(ctx, x, y), fmod=1)  # the sign of the dividend, as in JAX


@primitive("square", lazy=True)
def _square(ctx: Context, x: Operand, **_: Any) -> Operand:
    return ctx.op("Mul", x, x, like=broadcast(ctx, x))


@primitive("rsqrt", lazy=True)
def _rsqrt(ctx: Context, x: Operand, **_: Any) -> Operand:
    aval = broadcast(ctx, x)
    return ctx.op("Reciprocal", ctx.op("Sqrt", x, like=aval), like=aval)


@primitive("erfc", lazy=True)
def _erfc(ctx: Context, x: Operand, **_: Any) -> Operand:
    aval = broadcast(ctx, x)
    return ctx.op("Sub", np.array(1, aval.dtype), ctx.op("Erf", x, like=aval), like=aval)


@primitive("integer_pow", lazy=True)
def _integer_pow(ctx: Context, x: Operand, *, y: int, **_: Any) -> Operand:
    return ctx.op("Pow", x, np.array(y, ctx.in_avals[0].dtype), like=broadcast(ctx, x))


@primitive("round", lazy=True)
def _round(ctx: Context, x: Operand, *, rounding_method: Any, **_: Any) -> Operand:
    if rounding_method != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise NotImplementedError(f"{rounding_method}; jnp.round goes to even numbers, as Round does")
    return ctx.op("Round", x, like=broadcast(ctx, x))


@primitive("select_n", lazy=True)
def _select_n(ctx: Context, which: Operand, *cases: Operand, **_: Any) -> Operand:
    no, yes = cases
    return ctx.op("Where", which, yes, no, like=broadcast(ctx, which, yes, no))


@primitive("stop_gradient", "copy", "copy_p", "optimization_barrier", lazy=True)
def _same(ctx: Context, *operands: Operand, **_: Any) -> Sequence[Operand]:
    return operands


@primitive("convert_element_type", lazy=True)
def _convert(ctx: Context, x: Operand, *, new_dtype: Any, **_: Any) -> Operand:
    return ctx.graph.cast(x, new_dtype)


def _reduction(op_type: str) -> Any:
    def rule(ctx: Context, x: Operand, *, axes: Sequence[int], **_: Any) -> Operand:
        return ctx.op(op_type, x, int64(*axes), keepdims=0)

    return rule


for _name, _op_type in _REDUCTIONS.items():
    primitive(_name)(_reduction(_op_type))


@primitive("argmax")
def _argmax(ctx: Context, x: Operand, *, axes: Sequence[int], index_dtype: Any, **_: Any) -> Operand:
    index = ctx.op("ArgMax", x, like=Aval(ctx.out_avals[0].shape, np.dtype(np.int64)), axis=axes[0], keepdims=0)
    return ctx.graph.cast(index, index_dtype)


@primitive("reshape", "squeeze", "expand_dims")
def _reshape(ctx: Context, x: Operand, **_: Any) -> Operand:
    return ctx.graph.reshape(x, ctx.in_avals[0].shape, ctx.out_avals[0].shape)


@primitive("transpose")
def _transpose(ctx: Context, x: Operand, *, permutation: Sequence[int], **_: Any) -> Operand:
    return ctx.graph.transpose(x, ctx.in_avals[0].shape, permutation)


@primitive("broadcast_in_dim", lazy=True)
def _broadcast_in_dim(ctx: Context, x: Operand, *, broadcast_dimensions: Sequence[int], **_: Any) -> Operand:
    """Insert axes of size one where the result has new axes; nothing is repeated. Leading ones need no axis at all."""
    missing = ctx.in_avals[0].ndim - len(shape_of(x))
    kept = list(broadcast_dimensions)[missing:]  # a narrow operand lacks leading axes
    if not kept:
        return x
    return ctx.graph.unsqueeze(
        x, [axis - kept[0] for axis in range(kept[0], ctx.out_avals[0].ndim) if axis not in kept]
    )


@primitive("iota")
def _iota(ctx: Context, *, dtype: Any, shape: Sequence[Dim], dimension: int, **_: Any) -> Operand:
    return ctx.graph.unsqueeze(arange(ctx, shape[dimension], dtype), range(1, len(shape) - dimension))


@primitive("dim_as_value")
def _dim_as_value(ctx: Context, *, dim: Dim, **_: Any) -> Operand:
    return ctx.graph.cast(ctx.graph.reshape(ctx.graph.dim(dim), (1,), ()), ctx.out_avals[0].dtype)


@primitive("concatenate")
def _concatenate(ctx: Context, *operands: Operand, dimension: int, **_: Any) -> Operand:
    return ctx.op("Concat", *operands, axis=dimension)


@primitive("stack")
def _stack(ctx: Context, *operands: Operand, axis: int, **_: Any) -> Operand:
    return ctx.op("Concat", *(ctx.graph.unsqueeze(x, [axis]) for x in operands), axis=axis)


@primitive("split")
def _split(ctx: Context, x: Operand, *, sizes: Sequence[Dim], axis: int, **_: Any) -> Sequence[Operand]:
    return ctx.graph.ops("Split", x, ctx.graph.shape(sizes), like=list(ctx.out_avals), axis=axis)


@primitive("slice")
def _slice(ctx: Context, x: Operand, *, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> Operand:
    rank = range(len(start_indices))
    steps = strides or [1 for _ in rank]
    return ctx.op("Slice", x, *map(ctx.graph.shape, (start_indices, limit_indices)), int64(*rank), int64(*steps))


@primitive("cumsum")
def _cumsum(ctx: Context, x: Operand, *, axis: int, reverse: bool, **_: Any) -> Operand:
    return ctx.op("CumSum", x, np.array(axis), reverse=int(reverse))


@primitive("top_k")
def _top_k(ctx: Context, x: Operand, *, k: int, axis: int = -1, **_: Any) -> Sequence[Operand]:
    values, indices = ctx.out_avals
    found = ctx.graph.ops("TopK", x, int64(k), like=[values, Aval(indices.shape, np.dtype(np.int64))], axis=axis)
    return found[0], ctx.graph.cast(found[1], indices.dtype)


@primitive("dot_general")
def _dot_general(
    ctx: Context, left: Operand, right: Operand, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any
) -> Operand:
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    one, other = ctx.in_avals
    if preferred_element_type is not None:
        left, right = (ctx.graph.cast(x, preferred_element_type) for x in (left, right))
    if not left_batch and tuple(left_sum) == (one.ndim - 1,) and other.ndim == 2:
        return _projection(ctx, left, right, transposed=tuple(right_sum) == (1,))
    left_free = [i for i in range(one.ndim) if i not in (*left_sum, *left_batch)]
    right_free = [i for i in range(other.ndim) if i not in (*right_sum, *right_batch)]
    x = _merge(ctx, left, one, [left_batch, left_free, left_sum])
    y = _merge(ctx, right, other, [right_batch, right_sum, right_free])
    batch = [one.shape[i] for i in left_batch]
    merged = (*batch, _product(one, left_free), _product(other, right_free))
    product = ctx.op("MatMul", x, y, like=Aval(merged, ctx.out_avals[0].dtype))
    return ctx.graph.reshape(product, merged, ctx.out_avals[0].shape)


def _projection(ctx: Context, x: Operand, weight: Operand, *, transposed: bool) -> Operand:
    """``x @ weight`` or ``x @ weight.T``; the latter as Gemm, which reads the matrix as it lies."""
    if not transposed:
        return ctx.op("MatMul", x, weight)
    aval, out = ctx.in_avals[0], ctx.out_avals[0]
    rows = _product(aval, range(aval.ndim - 1))
    flat = ctx.graph.reshape(x, aval.shape, (rows, aval.shape[-1]))
    like = Aval((rows, out.shape[-1]), out.dtype)
    return ctx.graph.reshape(ctx.op("Gemm", flat, weight, like=like, transB=1), like.shape, out.shape)


def _merge(ctx: Context, x: Operand, aval: Aval, groups: Sequence[Sequence[int]]) -> Operand:
    """Bring the axes of ``x`` into the order batch, group, group, each group merged into one axis."""
    order = [axis for group in groups for axis in group]
    x = ctx.graph.transpose(x, aval.shape, order)
    batch, *merged = groups
    new = [*(aval.shape[i] for i in batch), *(_product(aval, group) for group in merged)]
    return ctx.graph.reshape(x, [aval.shape[i] for i in order], new)


def _product(aval: Aval, axes: Sequence[int]) -> Dim:
    return math.prod(aval.shape[i] for i in axes)


@primitive("gather")
def _gather(ctx: Context, x: Operand, index: Operand, *, dimension_numbers: Any, slice_sizes: Any, **_: Any) -> Operand:
    """The two forms that ``jnp.take`` along an axis traces to: one index list, or one per row under ``vmap``."""
    numbers, (x_aval, index_aval) = dimension_numbers, ctx.in_avals
    rows = tuple(numbers.operand_batching_dims)
    axis = numbers.start_index_map[0]
    whole = all(
        str(size) == str(dim)
        for i, (size, dim) in enumerate(zip(slice_sizes, x_aval.shape, strict=True))
        if i not in (axis, *rows)
    )
    single = len(numbers.start_index_map) == 1 and tuple(numbers.collapsed_slice_dims) == (axis,) and whole
    n = index_aval.ndim - 1
    offset = tuple(
        i for i in range(len(ctx.out_avals[0].shape)) if not axis <= i < axis + n - len(rows) and i not in rows
    )
    if single and not rows and tuple(numbers.offset_dims) == offset:
        return ctx.op("Gather", x, ctx.graph.reshape(index, index_aval.shape, index_aval.shape[:-1]), axis=axis)
    if (
        single
        and rows == (0,) == tuple(numbers.start_indices_batching_dims)
        and axis == 1
        and tuple(numbers.offset_dims) == offset
    ):
        return ctx.op("GatherND", x, ctx.graph.cast(index, np.int64), batch_dims=1)
    raise NotImplementedError(
        f"a gather of the form {numbers} with slices {slice_sizes}; jnp.take along one axis works"
    )


@primitive("scatter")
def _scatter(ctx: Context, x: Operand, index: Operand, update: Operand, *, dimension_numbers: Any, **_: Any) -> Operand:
    """``x.at[i, j, ...].set(update)`` with indices for the leading axes, which must be in range."""
    numbers, index_aval, update_aval = dimension_numbers, ctx.in_avals[1], ctx.in_avals[2]
    leading = tuple(range(index_aval.shape[-1]))
    trailing = tuple(range(index_aval.ndim - 1, update_aval.ndim))
    if not (
        tuple(numbers.inserted_window_dims) == tuple(numbers.scatter_dims_to_operand_dims) == leading
        and tuple(numbers.update_window_dims) == trailing
        and not numbers.operand_batching_dims
    ):
        raise NotImplementedError(f"a scatter of the form {numbers}; x.at[i, j].set(y) on leading axes works")
    return ctx.op("ScatterND", x, ctx.graph.cast(index, np.int64), update)
