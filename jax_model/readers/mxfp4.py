"""Four-bit floats with a power of two for each 32 of them (OCP Microscaling Formats v1.0): gpt-oss's experts.

Hugging Face stores such a tensor as two, ``NAME_blocks`` uint8 [E, rows, groups, 16] and ``NAME_scales`` uint8 [E,
rows, groups]; the model's own code knows it as NAME [E, 32 groups, rows].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.families import Foreign
from diptych.jax_model.readers import TensorInfo
from diptych.jax_model.readers.tensor_parts import Packed, Raw, steps

__all__ = ["unpack"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1: two bits of exponent, one of mantissa
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


def unpack(settings: Foreign, stored: Mapping[str, TensorInfo]) -> dict[str, Packed]:
    """Every tensor that is stored so. Raises ValueError when blocks and scales do not fit."""
    names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
    return {name: _tensor(name, stored, settings.origin) for name in names if name + _SCALES in stored}


def _tensor(name: str, stored: Mapping[str, TensorInfo], origin: str) -> Packed:
    blocks, scales = (stored[name + part].shape for part in (_BLOCKS, _SCALES))
    if len(blocks) != 4 or blocks != (*scales, 16):
        raise ValueError(f"{origin}: {name!r} has blocks {blocks}, which do not fit its scales {scales}")
    E, height, groups, _ = blocks

    def read(raw: Raw, rows: slice) -> NDArray[np.float32]:
        codes, exponents = raw(name + _BLOCKS), raw(name + _SCALES)
        out = np.empty((len(range(*rows.indices(E))), height, groups, 32), np.float32)
        for here, there in steps(rows, blocks):
            out[there] = _halves(codes[here])
            out[there] *= _powers(exponents[here])[..., None]
        return out.reshape(-1, height, groups * 32).swapaxes(1, 2)

    return Packed(TensorInfo((E, 32 * groups, height), "MXFP4"), (name + _BLOCKS, name + _SCALES), read)


def _halves(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The two numbers in each byte, the lower half first, behind one another along the last axis."""
    values: NDArray[np.float32] = _VALUES[np.stack([raw & 15, raw >> 4], axis=-1)]
    return values.reshape(*raw.shape[:-1], -1)


def _powers(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Two to the power of each byte less 127."""
    return np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
