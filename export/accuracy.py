"""The arithmetic of products with blocks of integers: float32, or activations rounded to eight bits.

ONNX Runtime's ``MatMulNBits`` calls the two accuracy levels 1 and 4.  Decode is many times as fast with 4, and has it
where the model bears it.  Prefill has 1: the first tokens of a prompt, which all later ones attend to, have activations
so large that rounding them can turn an answer into noise, while means over a text hardly move (docs/facts.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["LEVEL_4", "Tolerance", "set_accuracy_level", "uses_blocks"]

_ATTRIBUTE = "accuracy_level"


@dataclass(frozen=True)
class Tolerance:
    """How far apart two results may be, and why so far and no further."""

    value: float
    reason: str


LEVEL_4 = Tolerance(
    0.02,
    "mean KL divergence from level 1, in nats, on the worst of our texts: measured 0.002 to 0.010 on SmolLM2 and "
    "Gemma 3, where perplexity moves by some 1 %; the default recipe of 4 bits costs five times as much",
)


def uses_blocks(model: ir.Model) -> bool:
    """Whether a graph has products whose accuracy level can be chosen."""
    return any(True for _ in _products(model))


def set_accuracy_level(model: ir.Model, level: int) -> None:
    for node in _products(model):
        node.attributes[_ATTRIBUTE] = ir.AttrInt64(_ATTRIBUTE, level)


def _products(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if node.op_type == "MatMulNBits")
