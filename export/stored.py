"""Whether an artifact's weights are those of the checkpoint that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from diptych.export.artifact import WEIGHTS
from diptych.jax_model.blocks import Blocks, dequantize
from diptych.jax_model.params import outputs_first
from diptych.jax_model.storage import Form, Storage

__all__ = ["Stored", "max_abs_error"]

_PIECE = 1 << 24  # bytes of a weight that are compared at a time
_F32 = NDArray[np.float32]


@dataclass
class Found:
    """How far the artifact's values are from the checkpoint's, and how many were compared."""

    count: int = 0
    errors: list[float] = field(default_factory=list)


class Stored:
    """An artifact's weights, opened for comparison; floats and blocks are counted apart.

    Blocks that the checkpoint's own became are ``kept``: their errors are counted in units in the last place of the
    largest number that a block could mean.  Others are new, and have a relative error, that of the whole matrix.
    """

    def __init__(self, folder: Path, storage: Storage, *, kept: bool) -> None:
        self._file: Any = safetensors.safe_open(folder / WEIGHTS, framework="numpy")
        self._storage, self._kept = storage, kept
        self.floats, self.blocks = Found(), Found()

    def compare(self, path: str, value: _F32) -> None:
        """Compare a parameter with the checkpoint's values of it, in our layout."""
        forms = self._storage.get(path)
        found = self.floats if forms is None else self.blocks
        found.count += value.size
        if forms is None:
            found.errors += self._differences(path, value)
            return
        matrix, start = outputs_first(path, value), 0
        for i, form in enumerate(forms):
            name = path if len(forms) == 1 else f"{path}.{i}"
            rows = self._file.get_slice(f"{name}.packed").get_shape()[0]
            found.errors.append(self._distance(name, form, matrix[start : start + rows]))
            start += rows

    def _differences(self, path: str, value: _F32) -> Iterator[float]:
        """The largest difference of every few rows: an embedding compared whole would need three more of its size."""
        stored = self._file.get_slice(path)
        for rows in _pieces(value):
            yield max_abs_error(value[rows], stored[rows])

    def _distance(self, name: str, form: Form, matrix: _F32) -> float:
        worst = squares = norm = 0.0
        for rows in _pieces(matrix):
            piece, blocks = matrix[rows], self._blocks(name, form, rows)
            difference = (
                np.asarray(dequantize(blocks.packed, blocks.scale, blocks.shift, blocks.zero, bits=form.bits)) - piece
            )
            if self._kept:
                each = np.abs(difference).reshape(len(piece), -1, form.block).max(-1)
                worst = max(worst, float((each / _last_place(blocks)).max()))
            else:
                squares += float(np.vdot(difference, difference))
                norm += float(np.vdot(piece, piece))
        return worst if self._kept else float(np.sqrt(squares / norm)) if norm else squares

    def _blocks(self, name: str, form: Form, rows: slice) -> Blocks:
        def part(leaf: str) -> Any:
            return self._file.get_slice(f"{name}.{leaf}")

        return Blocks(
            part("packed")[rows],
            part("scale")[rows],
            part("shift")[:, rows] if form.shifted else None,
            form.bits,
            form.block,
            part("zero")[rows] if form.zero_points else None,
        )


def _pieces(value: _F32) -> Iterator[slice]:
    rows = max(1, len(value) * _PIECE // value.nbytes)
    return (slice(start, min(start + rows, len(value))) for start in range(0, len(value), rows))


def _last_place(blocks: Blocks) -> _F32:
    """The unit in the last place of the largest number that each block can mean, [out, in / block]."""
    largest = np.abs(np.asarray(blocks.scale)) * np.float32(1 << blocks.bits)
    if blocks.shift is not None:
        largest = np.maximum(largest, np.abs(np.asarray(blocks.shift)).T / np.float32(blocks.block))
    unit: _F32 = np.spacing(largest)
    return unit


def max_abs_error(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference; NaN where either is not finite, 0 of nothing."""
    with np.errstate(invalid="ignore"):
        worst = np.abs(one - other).max(initial=0)
    return float(worst) if np.isfinite(worst) else float("nan")
