"""An artifact's graph with everything in float32 that it rounds: what it must agree with JAX in, to the last digits.

Roundings hide faults: whatever comes out in the last bit of a sum may turn a rounded number to its neighbour, and each
such turn moves all that follows.  Two sides that round alike drift apart by as much as rounding itself costs.
"""

from __future__ import annotations

import onnx_ir as ir

from diptych.export.accuracy import set_accuracy_level

__all__ = ["in_float32"]

_NARROW = (ir.DataType.INT8, ir.DataType.FLOAT16)  # nothing but a cache has these types
_QUANTIZED = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
_SCALES = (12, 13)  # GroupQueryAttention's inputs


def in_float32(model: ir.Model) -> None:
    """Activations of products are not rounded any more, and the cache is float32: its inputs and outputs are, too."""
    set_accuracy_level(model, 1)
    for value in model.graph.inputs:
        _widen(value)
    for node in model.graph:
        for value in node.outputs:
            _widen(value)
        if node.op_type == "GroupQueryAttention":
            for name in _QUANTIZED:
                node.attributes.pop(name, None)
            for i in _SCALES[: max(0, len(node.inputs) - _SCALES[0])]:
                node.replace_input_with(i, None)
        elif node.op_type == "Cast" and node.attributes["to"].as_int() in _NARROW:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
            node.replace_input_with(0, _unrounded(node.inputs[0]))


def _widen(value: ir.Value) -> None:
    if value.dtype in _NARROW:
        value.dtype = ir.DataType.FLOAT


def _unrounded(value: ir.Value | None) -> ir.Value | None:
    """What was rounded and clipped to become ``value``, or ``value`` where nothing was."""
    node = None if value is None else value.producer()
    if node is None or node.op_type not in ("Round", "Max", "Min"):
        return value
    if node.op_type == "Round":
        return node.inputs[0]
    return _unrounded(next(x for x in node.inputs if x is not None and x.producer() is not None))  # not the bound
