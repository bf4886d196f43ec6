"""The registries of lowering rules, and what a rule is given.

A rule is a function ``rule(ctx, *operands, **params)`` that returns the value (or the values) of an equation.
Operands are ONNX values, or NumPy arrays where they are known.  A rule for a composite may return ``NotImplemented``
when its operator cannot honour a shape, dtype or attribute: then the composite's decomposition is lowered instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from diptych.export.lowering.graph import GraphBuilder, Operand, shape_of
from diptych.export.tracing import Aval, Dim, is_static

__all__ = [
    "COMPOSITES",
    "PRIMITIVES",
    "Context",
    "Rule",
    "arange",
    "broadcast",
    "composite",
    "int64",
    "primitive",
]

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Context:
    """The equation at hand: what its operands and results are in JAX, and the graph to emit into."""

    graph: GraphBuilder
    in_avals: Sequence[Aval]
    out_avals: Sequence[Aval]
    max_context: int
    accuracy_level: int  # of integer matrix products: 1 computes in float32, 4 rounds activations to 8 bits

    def op(
        self, op_type: str, *inputs: Operand | None, like: Aval | None = None, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """One operator whose result looks like the equation's first result, unless ``like`` says otherwise."""
        return self.graph.op(op_type, *inputs, like=like or self.out_avals[0], domain=domain, **attributes)


@dataclass(frozen=True)
class _Primitive:
    rule: Rule
    lazy: bool  # operands may be narrower than their avals


PRIMITIVES: dict[str, _Primitive] = {}
COMPOSITES: dict[tuple[str, str], Rule] = {}  # (composite, dialect)


def primitive(*names: str, lazy: bool = False) -> Callable[[Rule], Rule]:
    """Register the rule of JAX primitives. ``lazy`` rules accept operands that merely broadcast to their shapes."""

    def register(rule: Rule) -> Rule:
        PRIMITIVES.update({name: _Primitive(rule, lazy) for name in names})
        return rule

    return register


def composite(name: str, *dialects: str) -> Callable[[Rule], Rule]:
    """Register the rule of a composite for some dialects. Its operands come in full shape, or as arrays."""

    def register(rule: Rule) -> Rule:
        COMPOSITES.update({(name, dialect): rule for dialect in dialects})
        return rule

    return register


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def arange(ctx: Context, end: Dim, dtype: Any) -> Operand:
    """0, 1, … end - 1 in ``dtype``, shape [end]; an array where the end is known."""
    if is_static(end):
        return np.arange(end).astype(dtype)
    stop = ctx.graph.reshape(ctx.graph.dim(end), (1,), ())
    line = ctx.op("Range", np.array(0), stop, np.array(1), like=Aval((end,), np.dtype(np.int64)))
    return ctx.graph.cast(line, dtype)


def broadcast(ctx: Context, *operands: Operand) -> Aval:
    """What an elementwise operator makes of operands that may be narrower than the equation's result."""
    shapes = [shape_of(x) for x in operands]
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    return Aval(tuple(next((dim for dim in column if dim != 1), 1) for column in columns), ctx.out_avals[0].dtype)
