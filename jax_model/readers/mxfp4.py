"""Four-bit floats with a power of two for each 32 of them (OCP Microscaling Formats v1.0): gpt-oss's experts.

Hugging Face stores such a tensor as two, ``NAME_blocks`` uint8 [E, rows, groups, 16] and ``NAME_scales`` uint8 [E,
rows, groups]; the model's own code knows it as NAME [E, 32 groups, rows].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCKS", "METHOD", "SCALES", "VALUES", "halves", "pairs", "powers"]

METHOD, BLOCKS, SCALES = "mxfp4", "_blocks", "_scales"

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1: two bits of exponent, one of mantissa
VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


def halves(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The two numbers in each byte, the lower half first, behind one another along the last axis."""
    values: NDArray[np.float32] = VALUES[np.stack([raw & 15, raw >> 4], axis=-1)]
    return values.reshape(*raw.shape[:-1], -1)


def powers(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Two to the power of each byte less 127."""
    return np.ldexp(np.float32(1), raw.astype(np.int32) - 127)


def pairs(names: Iterable[str]) -> Iterator[str]:
    """The tensors among ``names`` that are stored so, by the name that both of their parts begin with."""
    known = set(names)
    for name in known:
        bare = name.removesuffix(BLOCKS)
        if bare != name and bare + SCALES in known:
            yield bare
