"""Weights in floats of eight bits, with scales: for the whole matrix, for each row, or for blocks of it.

DeepSeek (arXiv:2412.19437, §3.3) stores beside ``NAME.weight`` [O, I] a ``NAME.weight_scale_inv`` [O / 128, I / 128],
rounded up, which *multiplies* the blocks, despite its name; others a ``NAME.weight_scale``, [], [1], [O] or [O, 1].
What else there is for activations does not concern weights: activations are computed in full.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.families import Foreign
from diptych.jax_model.readers import TensorInfo
from diptych.jax_model.readers.tensor_parts import Packed, Raw, steps

__all__ = ["unpack"]

_SCALE_INV, _SCALE, _INPUT = "_scale_inv", "_scale", "input_scale"
_BYTES = np.arange(256, dtype=np.uint8)
# The numbers behind all bytes, by the type's name in safetensors files.
VALUES: Mapping[str, NDArray[np.float32]] = {
    "F8_E4M3": _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "F8_E5M2": _BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32),
}


def unpack(settings: Foreign, stored: Mapping[str, TensorInfo]) -> dict[str, Packed]:
    """Every float8 tensor. Raises ValueError on one without a scale, or with one that does not fit."""
    settings.expect("fmt", "e4m3", "e5m2")
    settings.expect("activation_scheme", "dynamic", "static")
    settings.expect("scale_fmt", "float", "ue8m0")
    block = settings.get("weight_block_size", [1, 1])
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"{settings.origin}: 'weight_block_size' should be two sizes, found {block!r}")
    found = {name: info for name, info in stored.items() if info.dtype in VALUES}
    return {name: _tensor(name, info, stored, (block[0], block[1]), settings.origin) for name, info in found.items()}


def _tensor(
    name: str, info: TensorInfo, stored: Mapping[str, TensorInfo], block: tuple[int, int], origin: str
) -> Packed:
    scale = next((name + end for end in (_SCALE_INV, _SCALE) if name + end in stored), None)
    if scale is None:
        raise ValueError(f"{origin}: tensor {name!r} is stored as {info.dtype} without {name + _SCALE!r} beside it")
    found = stored[scale]
    blocks = tuple(-(-size // each) for size, each in zip(info.shape, block, strict=False))
    per_row = (info.shape[0], *(1 for _ in info.shape[1:]))
    blocked = scale.endswith(_SCALE_INV)
    fitting = (blocks,) if blocked else ((), (1,), info.shape[:1], per_row)
    if len(info.shape) != 2 or found.shape not in fitting:
        raise ValueError(f"{origin}: {name!r} {info.shape} has the scales {found.shape}, expected {fitting[-1]}")
    inputs = name.removesuffix("weight") + _INPUT
    parts = (name, scale, *(one for one in (inputs, f"{name}_{_INPUT}") if one in stored))

    def read(raw: Raw, rows: slice) -> NDArray[np.float32]:
        codes, scales = raw(name), _scales(raw(scale), found.dtype)
        size = block if blocked else (1, info.shape[1])
        table = scales if blocked else np.broadcast_to(scales.reshape(-1, 1), (info.shape[0], 1))
        out = np.empty((len(range(*rows.indices(info.shape[0]))), info.shape[1]), np.float32)
        for here, there in steps(rows, info.shape):
            values = VALUES[info.dtype][codes[here]]
            each = table[np.arange(here.start, here.stop) // size[0]]
            out[there] = values * np.repeat(each, size[1], axis=1)[:, : info.shape[1]]
        return out

    return Packed(info, parts, read)


def _scales(raw: NDArray[np.generic], dtype: str) -> NDArray[np.float32]:
    """Scales in float32; of a power of two, only the exponent may be stored."""
    if dtype == "F8_E8M0":
        return np.asarray(raw.view(ml_dtypes.float8_e8m0fnu), np.float32)
    return np.asarray(raw, np.float32)
