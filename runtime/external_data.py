"""Where an ONNX file says that its weights are, read without the onnx package.

ONNX Runtime opens those places while it loads a graph, so they are checked before it sees the file.  A model is a
protobuf message, a list of fields ``(number << 3 | wire type, payload)``
(https://protobuf.dev/programming-guides/encoding); only the messages on the way to a tensor's ``external_data`` are
followed, with the numbers of ``onnx.proto`` (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

# Message -> the fields of it that lead to tensors: field number -> message.
_FIELDS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
_KEY, _VALUE = 1, 2  # of an Entry
_LOCATION = b"location"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_DEEPEST = 100  # protobuf's own limit


def external_locations(path: Path) -> set[str]:
    """The files, relative to the graph's folder, that a graph reads tensors from.

    Raises ValueError when the file is damaged.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty: copy or export the artifact again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return set(_locations(content, 0, len(content), "Model", 0))
            except (IndexError, UnicodeDecodeError, _Malformed) as error:
                raise ValueError(f"{path} is not a valid ONNX file ({error}): copy or export it again") from None


class _Malformed(Exception):
    pass


def _locations(content: mmap.mmap, start: int, end: int, message: str, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise _Malformed("messages are nested too deeply")
    children = _FIELDS[message]
    for number, first, last in _payloads(content, start, end):
        child = children.get(number)
        if child == "Entry":
            yield from _location(content, first, last)
        elif child and content.find(_LOCATION, first, last) >= 0:  # most nodes and attributes hold no tensor
            yield from _locations(content, first, last, child, depth + 1)


def _location(content: mmap.mmap, start: int, end: int) -> Iterator[str]:
    """The value of an entry whose key is "location". Of a field that is repeated the last one counts."""
    fields = {number: content[first:last] for number, first, last in _payloads(content, start, end)}
    if fields.get(_KEY) == _LOCATION:
        yield fields.get(_VALUE, b"").decode("utf-8")


def _payloads(content: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, first byte, end) of every length-delimited field; the others are stepped over."""
    position = start
    while position < end:
        tag, position = _varint(content, position)
        if tag >= 1 << 32:  # other parsers drop the upper bits, and would see another field than we do
            raise _Malformed("a field number is too large")
        wire = tag & 7
        if wire == _BYTES:
            length, position = _varint(content, position)
            if position + length > end:
                raise _Malformed("a field is longer than the file")
            yield tag >> 3, position, position + length
            position += length
        elif wire == _VARINT:
            _, position = _varint(content, position)
        elif wire in (_FIXED32, _FIXED64):
            position += 4 if wire == _FIXED32 else 8
        else:
            raise _Malformed(f"unknown wire type {wire}")
    if position != end:
        raise _Malformed("a field ends behind its message")


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    """A base-128 number, lowest seven bits first, and where it ends."""
    value = shift = 0
    while shift < 70:
        byte = content[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise _Malformed("a number has more than ten bytes")
