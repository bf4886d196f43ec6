"""The header of a GGUF file, read strictly.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian: the magic, a version, how
many tensors and how many key-value pairs; the pairs (key, type, value); for each tensor its name, dimensions (innermost
first), type and offset; padding up to ``general.alignment``; the tensors' bytes.  Strings and arrays carry their
length.

The ``gguf`` package has a reader, but it believes every number it reads and keeps an object per vocabulary entry (some
700 MB for 262144 tokens).  Here every length is checked against what is left of the file before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from diptych.jax_model.readers.files import Damaged, check_start

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_ALIGNMENT = 32  # where the file names no other
_MIN_PAIR, _MIN_TENSOR = 13, 32  # the fewest bytes that one takes
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_BOOL, _STRING, _ARRAY = 7, 8, 9
# The number types, by their codes in the file.
_NUMBERS = {
    code: struct.Struct("<" + letter)
    for code, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}.items()
}
_FLOAT32 = 6


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: ``nbytes`` at ``offset`` from the start of the file; its shape in row-major order."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_header(path: Path) -> Header:
    """Read and check the header of ``path``. Raises :class:`Damaged`, a ValueError, on anything out of place."""
    check_start(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(path, data).header()


class _Cursor:
    """A position in the file; whatever is taken moves it on, and taking more than there is raises."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, problem: str) -> NoReturn:
        raise Damaged(self.path, problem)

    def room(self, count: int, size: int, what: str) -> None:
        """Raise unless ``count`` things of at least ``size`` bytes each can follow."""
        if count * size > len(self.data) - self.at:
            self.fail(
                f"{what} at byte {self.at} cannot fit: {count} of at least {size} bytes each; "
                "the file is cut short (an interrupted download?) or damaged"
            )

    def number(self, kind: struct.Struct, what: str) -> Any:
        self.room(1, kind.size, what)
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        self.room(count, 8, what)
        data, at, size, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            start = at + 8
            at = start + (_U64.unpack_from(data, at)[0] if start <= size else size)
            if at > size:
                self.fail(f"{what}: a string ends behind the end of the file; it is cut short or damaged")
            try:
                found.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                self.fail(f"{what}: a string at byte {start} is no UTF-8; the file is damaged")
        self.at = at
        return found

    def header(self) -> Header:
        tensors, pairs = self._preamble()
        metadata = self._metadata(pairs)
        infos = self._tensor_infos(tensors)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment should be a power of two, found {alignment!r}")
        start = self.at + -self.at % alignment
        return Header(metadata, self._place(infos, start, alignment))

    def _preamble(self) -> tuple[int, int]:
        self.room(1, 24, "the preamble")
        if self.data[:4] != b"GGUF":
            self.fail(f"this is no GGUF file: it begins with {self.data[:4]!r} where GGUF files say b'GGUF'")
        self.at = 4
        version = self.number(_U32, "the version")
        if version not in _VERSIONS:
            order = "it is big-endian" if version & 0xFFFF == 0 else f"it has version {version}"
            self.fail(f"cannot read this GGUF file: {order}; little-endian versions 2 and 3 are supported")
        tensors, pairs = self.number(_U64, "the tensor count"), self.number(_U64, "the metadata count")
        self.room(pairs, _MIN_PAIR, "the metadata")
        self.room(tensors, _MIN_TENSOR, "the list of tensors")
        return tensors, pairs

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> Any:
        what = f"the value of {key!r}"
        code = self.number(_U32, what)
        if code != _ARRAY:
            value = self._plain(code, 1, what)[0]
            return _shortest(value) if code == _FLOAT32 else value
        code, count = self.number(_U32, what), self.number(_U64, what)
        return self._plain(code, count, what)

    def _plain(self, code: int, count: int, what: str) -> list[Any]:
        """``count`` values of one type that is not itself an array."""
        if code == _STRING:
            return self.strings(count, what)
        if code == _BOOL:
            self.room(count, 1, what)
            raw = self.data[self.at : self.at + count]
            self.at += count
            if raw.strip(b"\0\1"):
                self.fail(f"{what}: a truth value is neither 0 nor 1; the file is damaged")
            return [byte == 1 for byte in raw]
        if code not in _NUMBERS:
            self.fail(f"{what} has the unknown type {code}; the file is damaged, or newer than this reader")
        return self._numbers(code, count, what)

    def _numbers(self, code: int, count: int, what: str) -> list[Any]:
        kind = _NUMBERS[code]
        self.room(count, kind.size, what)
        end = self.at + count * kind.size
        values = [value for (value,) in kind.iter_unpack(self.data[self.at : end])]
        self.at = end
        return values

    def _tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Shape, type code and offset (from the start of the data) by name."""
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self.string("a tensor's name")
            what = f"tensor {name!r}"
            if name in infos:
                self.fail(f"{what} occurs twice")
            dimensions = self.number(_U32, what)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                self.fail(f"{what} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
            innermost_first = [self.number(_U64, what) for _ in range(dimensions)]
            infos[name] = (tuple(reversed(innermost_first)), self.number(_U32, what), self.number(_U64, what))
        return infos

    def _place(
        self, infos: dict[str, tuple[tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, Stored]:
        tensors = {
            name: self._stored(name, shape, code, start, offset, alignment)
            for name, (shape, code, offset) in infos.items()
        }
        end, before = start, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                self.fail(f"tensors {before!r} and {name!r} overlap; the file is damaged")
            end, before = tensor.offset + tensor.nbytes, name
        return tensors

    def _stored(self, name: str, shape: tuple[int, ...], code: int, start: int, offset: int, alignment: int) -> Stored:
        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.fail(f"tensor {name!r} has type {code}, which the installed gguf package does not know; update it")
        if min(shape) < 1 or shape[-1] % block:
            self.fail(f"tensor {name!r} of type {kind.name} cannot have the shape {shape}: rows are blocks of {block}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment:
            self.fail(f"tensor {name!r} lies at {offset}, no multiple of the file's alignment {alignment}")
        if start + offset + nbytes > len(self.data):
            self.fail(
                f"tensor {name!r} should end at byte {start + offset + nbytes}; "
                "the file is cut short (an interrupted download?) or damaged"
            )
        return Stored(shape, kind, start + offset, nbytes)


def _shortest(value: float) -> float:
    """The double with the fewest digits that names the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))
