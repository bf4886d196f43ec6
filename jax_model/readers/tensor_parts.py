"""A tensor that is stored as several parts, whatever the method: what it is, and how the parts become numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.readers import TensorInfo

__all__ = ["Packed", "Raw", "steps"]

# A part's elements as stored, mapped from the file: floats of two bytes or four and integers as themselves, all others
# as bytes.
Raw: TypeAlias = Callable[[str], NDArray[Any]]

_CHUNK = 1 << 20  # elements that are converted at a time; the result itself is the only large thing in memory


@dataclass(frozen=True)
class Packed:
    """``parts`` are names of stored tensors, which the model does not know; ``read`` gives some rows in float32."""

    info: TensorInfo
    parts: tuple[str, ...]
    read: Callable[[Raw, slice], NDArray[np.float32]]


def steps(rows: slice, shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[slice, slice]]:
    """Some rows of a tensor of ``shape`` at a time: where they are, and where among ``rows`` they go."""
    start, stop, _ = rows.indices(shape[0])
    step = max(1, _CHUNK // max(1, int(np.prod(shape[1:])))) * multiple
    for low in range(start, stop, step):
        high = min(low + step, stop)
        yield slice(low, high), slice(low - start, high - start)
