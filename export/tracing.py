"""All contact with JAX's intermediate representation: tracing, equations, symbolic dimensions.

JAX moves these names between versions; nothing else in the exporter imports them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend import core as jex

__all__ = [
    "Aval",
    "Dim",
    "Equation",
    "Traced",
    "dim_expression",
    "is_static",
    "literal",
    "named_leaves",
    "symbols",
    "trace",
]

Dim: TypeAlias = Any  # an int, or JAX's symbolic dimension expression
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
    "composite",
)


@dataclass(frozen=True)
class Aval:
    """Shape and dtype of a value; dimensions are ints or symbolic expressions."""

    shape: tuple[Dim, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Traced:
    """A function as equations. ``inputs`` and ``outputs`` are keys of an environment; ``constants`` maps keys to
    arrays.
    """

    equations: Sequence[Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    constants: dict[Any, np.ndarray]

    @property
    def input_avals(self) -> list[Aval]:
        return [_aval(variable) for variable in self.inputs]

    @property
    def output_avals(self) -> list[Aval]:
        return [_aval(variable) for variable in self.outputs]


def trace(function: Callable[..., Any], *arguments: Any) -> Traced:
    """Trace ``function`` over pytrees of ``jax.ShapeDtypeStruct``; inputs are in the order of their leaves."""
    return _traced(jax.make_jaxpr(function)(*arguments))


def shaped(shape: Sequence[Dim], dtype: Any) -> Any:
    """An abstract array to trace with."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def symbols(names: str, constraints: Sequence[str] = ()) -> tuple[Dim, ...]:
    """Symbolic dimensions, ``symbols("B,T")``."""
    return tuple(jax.export.symbolic_shape(names, constraints=constraints))


def is_static(dim: Dim) -> bool:
    return isinstance(dim, (int, np.integer))


def dim_expression(dim: Dim, lookup: Callable[[str], Any]) -> Any:
    """Evaluate a symbolic dimension with ``lookup(symbol)`` giving operands of ``+ - * // %``."""
    return dim._evaluate({name: lookup(name) for name in dim._get_vars()})


def _traced(closed: Any) -> Traced:
    jaxpr = getattr(closed, "jaxpr", closed)
    constants = dict(zip(jaxpr.constvars, map(np.asarray, getattr(closed, "consts", ())), strict=True))
    return Traced(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, constants)


class Equation:
    """One equation of a jaxpr, in the exporter's terms."""

    def __init__(self, eqn: Any) -> None:
        self._eqn = eqn
        self.primitive: str = eqn.primitive.name
        self.inputs: list[Any] = eqn.invars
        self.outputs: list[Any] = eqn.outvars
        self.in_avals = [_aval(v) for v in eqn.invars]
        self.out_avals = [_aval(v) for v in eqn.outvars]

    @property
    def params(self) -> dict[str, Any]:
        return dict(self._eqn.params)

    @property
    def composite(self) -> str | None:
        """The composite's name, None for other equations."""
        return str(self._eqn.params["name"]) if self.primitive == "composite" else None

    @property
    def attributes(self) -> dict[str, Any]:
        """A composite's attributes. JAX drops those that are None; here they are None again."""
        return {key: tree.unflatten(leaves) for key, leaves, tree in self._eqn.params["attributes"]}

    @property
    def body(self) -> Traced | None:
        """What the equation calls, None when it calls nothing."""
        if self.primitive not in _CALLS:
            return None
        params = self._eqn.params
        return _traced(next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params))

    @property
    def scope(self) -> str:
        """The model's own scopes around the equation (``layers.0/attn``), relative to the caller's."""
        stack = str(self._eqn.source_info.name_stack)
        return "/".join(part for part in stack.split("/") if re.fullmatch(r"[\w.]+", part))

    @property
    def source(self) -> str:
        """The line of model code that the equation came from."""
        return str(source_info_util.summarize(self._eqn.source_info))

    def evaluate(self, values: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """The outputs, computed by JAX itself, or None when they are large or have no static size."""
        dims = [dim for aval in self.out_avals for dim in aval.shape]
        if self.body is not None or not all(map(is_static, dims)) or self._has_symbols():
            return None
        if sum(math.prod(aval.shape) for aval in self.out_avals) > 1 << 16:
            return None
        with jax.ensure_compile_time_eval():
            outputs = self._eqn.primitive.bind(*values, **self._eqn.params)
        return [np.asarray(x) for x in (outputs if self._eqn.primitive.multiple_results else [outputs])]

    def _has_symbols(self) -> bool:
        return any(hasattr(leaf, "_get_vars") for leaf in jax.tree.leaves(self._eqn.params))


def literal(variable: Any) -> np.ndarray | None:
    """The value of a literal operand, in the dtype of its aval; None for a variable."""
    if isinstance(variable, jex.Literal):
        return np.asarray(variable.val, dtype=_aval(variable).dtype)
    return None


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a pytree under dotted paths: ``layers.0.attn.qkv``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path), leaf


def _aval(variable: Any) -> Aval:
    return Aval(tuple(variable.aval.shape), np.dtype(variable.aval.dtype))
