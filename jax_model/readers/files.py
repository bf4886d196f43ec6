"""What both formats do with files: tell what is wrong with one, map some rows of it, hash it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What is mapped and converted at a time; the result itself is the only large thing in memory.
_CHUNK = 1 << 20  # elements


class Damaged(ValueError):
    """A file that is not what its name says; the message has its name, its size and the likely reason."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem} ({path.stat().st_size} bytes in all)")


def check_start(path: Path) -> int:
    """The size of ``path``. Raises :class:`Damaged` when it is empty or holds what a failed download leaves behind."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    if not start:
        raise Damaged(path, "the file is empty; the download did not start, or the disk was full")
    if start.startswith(b"version https://git-lfs"):
        raise Damaged(path, "this is a Git LFS pointer, not the file itself; run 'git lfs pull' in its repository")
    if start[:9].lower().startswith((b"<!doctype", b"<html")):
        raise Damaged(path, "this is a web page, not the file; the download needed a login or another address")
    return size


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises :class:`Damaged`, a ValueError, when it holds none."""
    check_start(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Damaged(path, "this is no JSON object")
    return value


def map_rows(
    path: Path,
    offset: int,
    shape: tuple[int, ...],
    nbytes: int,
    convert: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
    rows: slice | None,
) -> NDArray[np.float32]:
    """Some or all rows of the tensor of ``shape`` that lies in ``nbytes`` at ``offset``, converted to float32.

    ``convert`` takes bytes [rows, bytes of a row].  The file is mapped a chunk at a time and let go, so that neither
    its pages nor the converter's intermediate values add up.
    """
    assert len(shape) > 1 or rows is None, "a vector has no rows"
    table = shape if len(shape) > 1 else (1, *shape)
    row_bytes = nbytes // max(1, table[0])
    start, stop, _ = (rows or slice(None)).indices(table[0])
    out = np.empty((max(0, stop - start), *table[1:]), np.float32)
    step = max(1, _CHUNK // max(1, math.prod(table[1:])))
    for low in range(start, stop, step):
        high = min(low + step, stop)
        if row_bytes:
            stored = np.memmap(path, np.uint8, "r", offset + low * row_bytes, (high - low, row_bytes))
            out[low - start : high - start] = convert(stored).reshape(high - low, *table[1:])
    return out if len(shape) > 1 else out.reshape(shape)


def hashes(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """``{name: {"sha256", "bytes"}}``, by name."""
    result = {}
    for path in sorted(files):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        result[path.name] = {"sha256": digest, "bytes": path.stat().st_size}
    return result
