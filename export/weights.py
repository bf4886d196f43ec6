"""Writing a safetensors file tensor by tensor, so that a model of any size passes through the memory of one tensor.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the header's length, little-endian;
the header, JSON with dtype, shape and byte range of every tensor, padded with spaces; the values, row-major,
little-endian, without holes.  Since names, dtypes and shapes are known before any value is, so is every tensor's place
in the file: that is what lets an ONNX graph point into it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["Slot", "Spec", "layout", "write"]

# NumPy's names for dtypes, and the format's.
_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_ALIGNMENT = 64  # of the first value: a cache line, and the widest vector register
_PIECE = 1 << 24  # bytes of a transposed tensor that are made contiguous at a time


@dataclass(frozen=True)
class Spec:
    """What a tensor will be: NumPy's name of its dtype (also ``bfloat16`` and the like) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Slot:
    """Where a tensor's bytes lie, counted from the start of the file."""

    offset: int
    length: int


def dtype_of(name: str) -> np.dtype:
    """The dtype called ``name``. Raises ValueError when the format has no such type."""
    if name not in _CODES:
        raise ValueError(f"safetensors has no dtype {name!r}; it has {', '.join(_CODES)}")
    return np.dtype(name) if name in np.sctypeDict else np.dtype(getattr(ml_dtypes, name))


def layout(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, Slot]]:
    """The file's head, up to the first value, and every tensor's slot.

    Wide dtypes come first, otherwise the order is that of ``specs``: so each tensor is aligned to its own items.
    Raises ValueError on a name that the format reserves and on an unknown dtype.
    """
    if "__metadata__" in specs:
        raise ValueError("a tensor cannot be called '__metadata__': safetensors keeps that name for itself")
    ordered = sorted(specs, key=lambda name: -specs[name].itemsize)
    starts: dict[str, int] = {}
    end = 0
    for name in ordered:
        starts[name] = end
        end += specs[name].nbytes
    entries = {name: _entry(specs[name], starts[name]) for name in ordered}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    head = struct.pack("<Q", len(header)) + header
    return head, {name: Slot(len(head) + starts[name], spec.nbytes) for name, spec in specs.items()}


def _entry(spec: Spec, start: int) -> dict[str, object]:
    offsets = [start, start + spec.nbytes]
    return {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}


def write(path: Path, specs: Mapping[str, Spec], values: Iterable[tuple[str, NDArray[np.generic]]]) -> dict[str, Slot]:
    """Write ``values``, which come in any order, to ``path``; return where each lies.

    ``values`` may be a generator: each value is let go before the next one is asked for.  Raises ValueError when a
    value was not announced in ``specs``, comes twice, has another dtype or shape, or never comes.
    """
    head, slots = layout(specs)
    missing = dict.fromkeys(specs)
    with path.open("wb") as file:
        file.write(head)
        for name, value in values:
            _check(name, value, specs, missing)
            del missing[name]
            _put(file, slots[name].offset, value)
            del value
    if missing:
        raise ValueError(f"{path.name}: no value came for {', '.join(missing)}")
    return slots


def _check(name: str, value: NDArray[np.generic], specs: Mapping[str, Spec], missing: Mapping[str, None]) -> None:
    if name not in missing:
        raise ValueError(f"tensor {name!r} " + ("came twice" if name in specs else "was not announced"))
    spec, dtype = specs[name], value.dtype.name
    if (dtype, value.shape) != (spec.dtype, spec.shape):
        raise ValueError(f"tensor {name!r}: announced as {spec.dtype} {spec.shape}, came as {dtype} {value.shape}")


def _put(file: BinaryIO, offset: int, value: NDArray[np.generic]) -> None:
    """Write the bytes of ``value``, some rows at a time: a transposed view never gets a whole second copy."""
    file.seek(offset)
    rows_first = np.atleast_1d(value)
    rows = max(1, _PIECE * len(rows_first) // max(1, rows_first.nbytes))
    native = rows_first.dtype.newbyteorder("=")
    for start in range(0, len(rows_first), rows):
        piece = np.ascontiguousarray(rows_first[start : start + rows], dtype=native)
        file.write(piece.reshape(-1).view(np.uint8).data)
