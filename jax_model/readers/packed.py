"""Weights that a Hugging Face folder stores packed: several stored tensors that together mean one in float32.

``quantization_config`` in ``config.json`` names the method.  Each method lists the tensors that its parts stand for;
whatever it says that could change their meaning is understood or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diptych.jax_model.families import Foreign
from diptych.jax_model.readers import TensorInfo, float8, integers, mxfp4
from diptych.jax_model.readers.tensor_parts import Packed

__all__ = ["METHODS", "unpack"]

_Method = Callable[[Foreign, Mapping[str, TensorInfo]], dict[str, Packed]]

# By ``quant_method``.
METHODS: dict[str, _Method] = {
    "awq": integers.unpack_awq,
    "fbgemm_fp8": float8.unpack,
    "fp8": float8.unpack,
    "gptq": integers.unpack_gptq,
    "mxfp4": mxfp4.unpack,
}


def unpack(settings: Foreign, stored: Mapping[str, TensorInfo]) -> dict[str, Packed]:
    """The tensors that parts among ``stored`` stand for, by name.

    ``settings`` are the ``quantization_config``.  Raises ValueError on methods and settings that are not known, and on
    parts that do not fit together.
    """
    method = settings.get("quant_method", "by an unnamed method")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(
            f"{settings.origin}: these weights are quantised already ({method}); name the unquantised model, or one "
            f"quantised by a method that is read: {known}"
        )
    return METHODS[method](settings, stored)
