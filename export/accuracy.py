"""The arithmetic of products with blocks of integers: float32, or activations rounded to eight bits.

ONNX Runtime's ``MatMulNBits`` calls the two accuracy levels 1 and 4.  Level 1 unpacks every matrix at every call,
whatever the number of tokens; level 4 computes with the integers, many times as fast for a few tokens (docs/facts.md).
So both programs have 4 where the model bears it, else 1.
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
