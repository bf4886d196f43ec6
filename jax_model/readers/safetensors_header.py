"""The header of a safetensors file, read strictly.

The format (https://github.com/huggingface/safetensors#format): the header's length as eight bytes, little-endian; the
header, a JSON object with dtype, shape and byte range of every tensor; the tensors' bytes, row-major, little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.readers.files import Damaged, check_start

_LIMIT = 100_000_000  # bytes of header; the safetensors library draws the same line
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: ``nbytes`` at ``offset`` from the start of the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


def _widen_bfloat16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A bfloat16 is the upper half of a float32."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


# What weights may be stored as.
CONVERTERS: Mapping[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": _widen_bfloat16,
}


_ELEMENTS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}


def elements(path: Path, stored: Stored) -> NDArray[Any]:
    """A tensor as it lies in the file, mapped; bfloat16 widened, other types that NumPy does not know as bytes."""
    if stored.nbytes == 0:
        return np.zeros(stored.shape, np.float32)
    mapped = np.memmap(path, np.uint8, "r", stored.offset, (stored.nbytes,))
    if stored.dtype == "BF16":
        return _widen_bfloat16(mapped).reshape(stored.shape)
    return mapped.view(_ELEMENTS.get(stored.dtype, "u1")).reshape(stored.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of ``path``. Raises :class:`Damaged`, a ValueError, on anything out of place."""
    size = check_start(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise Damaged(
                path,
                f"the header should be {length} bytes; the file is cut short (an interrupted download?) or damaged",
            )
        if length > _LIMIT:
            raise Damaged(path, f"the header claims {length} bytes, more than any real one; the file is damaged")
        entries = _parse(path, file.read(length))
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _parse(path: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"the header is no JSON ({error}); the file is damaged") from None
    if not isinstance(entries, dict):
        raise Damaged(path, "the header is no JSON object; the file is damaged")
    entries.pop("__metadata__", None)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return result


def _stored(path: Path, name: str, entry: Any, start: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = _BITS[dtype]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise Damaged(path, f"tensor {name!r} is described by {_brief(entry)}; the file is damaged") from None
    if (end - begin) * 8 != math.prod(shape) * bits:
        problem = f"tensor {name!r}, {dtype} {tuple(shape)}, cannot take {end - begin} bytes"
        raise Damaged(path, f"{problem}; the file is damaged")
    return Stored(tuple(shape), dtype, start + begin, end - begin)


def _brief(entry: Any) -> str:
    text = repr(entry)
    return text if len(text) <= 80 else text[:80] + "…"


def _check_cover(path: Path, tensors: Mapping[str, Stored], start: int, size: int) -> None:
    """The tensors must follow one another without overlap and end where the file does."""
    end, before = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise Damaged(path, f"tensors {before!r} and {name!r} overlap or leave a gap; the file is damaged")
        end, before = tensor.offset + tensor.nbytes, name
    if end != size:
        reason = "cut short (an interrupted download?)" if end > size else "longer than its header says; it is damaged"
        raise Damaged(path, f"the tensors should end at byte {end}; the file is {reason}")
