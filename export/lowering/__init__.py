"""JAX functions as ONNX graphs: the jaxpr is walked once, and each named composite may become one fused operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import onnx_ir as ir

from diptych.export.lowering import composites as _composites  # noqa: F401  (registers its rules)
from diptych.export.lowering import primitives as _primitives  # noqa: F401
from diptych.export.lowering.graph import GraphBuilder, Operand
from diptych.export.lowering.rules import COMPOSITES, PRIMITIVES, Context
from diptych.export.tracing import Equation, Traced, literal, named_leaves, shaped, symbols, trace
from diptych.jax_model.config import CacheDtype, Config
from diptych.jax_model.decoder import Cache, forward_decode, forward_prefill
from diptych.jax_model.params import abstract
from diptych.jax_model.storage import Storage

__all__ = ["TARGETS", "Lowered", "Program", "Target", "convert", "lower"]

Program = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Target:
    """What the graph may use: an opset, and the dialects whose composite rules apply, the first that has one wins."""

    opset: int
    dialects: tuple[str, ...]


TARGETS = {
    "ort": Target(24, ("ort", "standard", "basic")),
    "onnx": Target(24, ("standard", "basic")),
    "primitive": Target(18, ("basic",)),
}


@dataclass(frozen=True)
class Lowered:
    """A graph whose parameters and large constants are initializers without data.

    Parameters have their paths as names; ``constants`` holds the large constants, named
    ``constants.<what>.<digest>``: the same name means the same bytes in every graph.
    """

    model: ir.Model
    constants: dict[str, np.ndarray]


def lower(
    program: Program,
    config: Config,
    target: str,
    max_context: int,
    dtype: Any = jnp.float32,
    *,
    storage: Storage | None = None,
    cache_dtype: CacheDtype = "float32",
    accuracy_level: int = 1,
) -> Lowered:
    """Lower one of the two programs for ``target`` ("ort", "onnx" or "primitive").

    Graph inputs and outputs: see the project's design page, "The artifact". ``max_context`` is the number of
    positions that rope tables cover. Raises ValueError for an unknown target, NotImplementedError for an operation
    without a rule.
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known targets: {', '.join(TARGETS)}")
    function, arguments, input_names, output_names = _signature(program, config, dtype, storage, cache_dtype)
    return convert(
        program, function, arguments, input_names, output_names, TARGETS[target], max_context, accuracy_level
    )


def convert(
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
    target: Target,
    max_context: int,
    accuracy_level: int = 1,
) -> Lowered:
    """Lower ``function(params, *inputs)``: the first argument's leaves become parameters, all others graph inputs."""
    builder = GraphBuilder(name, target.opset)
    parameters = [path for path, _ in named_leaves(arguments[0])]
    traced = trace(function, *arguments)
    values: list[Operand] = []
    for path, aval in zip(parameters, traced.input_avals, strict=False):
        values.append(builder.add_parameter(path, aval))
    for path, aval in zip(input_names, traced.input_avals[len(parameters) :], strict=True):
        values.append(builder.add_input(path, aval))
    outputs = _Interpreter(builder, target, max_context, accuracy_level).run(traced, values)
    for path, value, aval in zip(output_names, outputs, traced.output_avals, strict=True):
        builder.add_output(path, value, aval)
    return Lowered(builder.finish(), builder.large_constants)


def _signature(
    program: Program, config: Config, dtype: Any, storage: Storage | None, cache_dtype: CacheDtype
) -> tuple[Any, list[Any], list[str], list[str]]:
    """The function to trace, its abstract arguments, and the graph's names for inputs and outputs in their order."""
    B, T, S, P = symbols("B,T,S,P", constraints=["T<=S"])
    params = abstract(config, dtype, storage, cache_dtype)
    buffers = [shaped((B, config.K, S, config.H), jnp.dtype(cache_dtype)) for _ in config.layers]
    counts = shaped((B,), jnp.int32)
    pasts = [f"past_key_values.{i}.{part}" for i in range(config.L) for part in ("key", "value")]
    presents = [f"present.{i}.{part}" for i in range(config.L) for part in ("key", "value")]

    def interleave(cache: Cache) -> list[Any]:
        return [part for pair in zip(cache.k, cache.v, strict=True) for part in pair]

    def prefill(params: Any, tokens: Any, num_tokens: Any, positions: Any, length: Any, past: list[Any]) -> Any:
        cache = Cache(tuple(past[0::2]), tuple(past[1::2]), length)
        logits, cache = forward_prefill(config, params, cache, tokens, num_tokens, positions)
        return logits, cache.length, interleave(cache)

    def decode(params: Any, tokens: Any, length: Any, past: list[Any]) -> Any:
        cache = Cache(tuple(past[0::2]), tuple(past[1::2]), length)
        logits, cache = forward_decode(config, params, cache, jnp.squeeze(tokens, 1))
        return logits, cache.length, interleave(cache)

    past = [buffer for buffer in buffers for _ in range(2)]
    outputs = ["logits", "present_length", *presents]
    if program == "decode":
        tokens = shaped((B, 1), jnp.int32)
        return decode, [params, tokens, counts, past], ["input_ids", "past_length", *pasts], outputs
    tokens, positions = (shaped((B, n), jnp.int32) for n in (T, P))
    inputs = ["input_ids", "num_tokens", "logit_positions", "past_length", *pasts]
    return prefill, [params, tokens, counts, positions, counts, past], inputs, outputs


class _Interpreter:
    """Walks a jaxpr and emits nodes; an environment per call, since JAX shares the bodies of jitted helpers."""

    def __init__(self, builder: GraphBuilder, target: Target, max_context: int, accuracy_level: int) -> None:
        self.builder, self.target = builder, target
        self.max_context, self.accuracy_level = max_context, accuracy_level
        self.source = ""  # the line of model code at hand; JAX's own helpers have none and keep their caller's

    def run(self, traced: Traced, arguments: Sequence[Operand]) -> list[Operand]:
        env: dict[Any, Operand] = {**traced.constants, **dict(zip(traced.inputs, arguments, strict=True))}

        def read(variable: Any) -> Operand:
            known = literal(variable)
            return env[variable] if known is None else known

        for raw in traced.equations:
            equation = Equation(raw)
            outputs = self._equation(equation, [read(variable) for variable in equation.inputs])
            env.update(zip(equation.outputs, outputs, strict=True))
        return [read(variable) for variable in traced.outputs]

    def _equation(self, equation: Equation, operands: list[Operand]) -> Sequence[Operand]:
        outer = self.builder.scope, self.source
        self.builder.scope = "/".join(filter(None, (self.builder.scope, equation.scope)))
        self.source = equation.source or self.source
        try:
            return (
                self._composite(equation, operands)
                or self._folded(equation, operands)
                or self._lowered(equation, operands)
            )
        finally:
            self.builder.scope, self.source = outer

    def _composite(self, equation: Equation, operands: list[Operand]) -> Sequence[Operand] | None:
        for dialect in self.target.dialects:
            rule = COMPOSITES.get((equation.composite or "", dialect))
            if rule is not None:
                outputs = rule(self._context(equation), *self._full(equation, operands), **equation.attributes)
                if outputs is not NotImplemented:
                    return _several(outputs)
        return None

    def _folded(self, equation: Equation, operands: list[Operand]) -> Sequence[Operand] | None:
        arrays = [x for x in operands if isinstance(x, np.ndarray)]
        return equation.evaluate(arrays) if len(arrays) == len(operands) else None

    def _lowered(self, equation: Equation, operands: list[Operand]) -> Sequence[Operand]:
        if (body := equation.body) is not None:
            return self.run(body, operands)
        entry = PRIMITIVES.get(equation.primitive)
        if entry is None:
            raise NotImplementedError(f"{self.source}: {_no_rule(equation)}")
        operands = operands if entry.lazy else self._full(equation, operands)
        try:
            return _several(entry.rule(self._context(equation), *operands, **equation.params))
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.source}: no ONNX form for {error}") from None

    def _context(self, equation: Equation) -> Context:
        return Context(self.builder, equation.in_avals, equation.out_avals, self.max_context, self.accuracy_level)

    def _full(self, equation: Equation, operands: list[Operand]) -> list[Operand]:
        return [
            x if isinstance(x, np.ndarray) and x.shape == aval.shape else self.builder.full(x, aval)
            for x, aval in zip(operands, equation.in_avals, strict=True)
        ]


def _several(outputs: Any) -> Sequence[Operand]:
    return outputs if isinstance(outputs, (list, tuple)) else (outputs,)


def _no_rule(equation: Equation) -> str:
    shapes = ", ".join(f"{aval.dtype}[{', '.join(map(str, aval.shape))}]" for aval in equation.in_avals)
    return (
        f"no ONNX lowering for JAX primitive {equation.primitive!r} of ({shapes}). "
        "Write the model with primitives that have a rule (export/lowering/primitives.py), or add one there."
    )
