"""A GGUF model in one file or in several parts, which llama.cpp names ``NAME-00001-of-00003.gguf``.

Only the first part carries the model's metadata; every part says which it is (``split.no``, from 0) and how many there
are (``split.count``), and the first how many tensors they hold in all (``split.tensors.count``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.jax_model.readers.gguf_header import Header, Stored, read_header

__all__ = ["Placed", "Whole", "read_whole"]

_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


@dataclass(frozen=True)
class Placed:
    """A tensor and the file that it lies in."""

    file: Path
    stored: Stored


@dataclass(frozen=True)
class Whole:
    """What all parts hold together."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Placed]


def read_whole(path: Path) -> Whole:
    """The headers of ``path`` and, if it is a part of a model, of all other parts, whichever is named.

    Raises FileNotFoundError when a part is missing, ValueError when parts do not belong together or one is damaged.
    """
    header = read_header(path)
    count = _number(path, header, _COUNT, 1)
    if count <= 1:
        return _joined({path: header})
    files = _parts_beside(path, count)
    parts = {file: header if file == path else read_header(file) for file in files}
    for i, (file, part) in enumerate(parts.items()):
        found = _number(file, part, _NUMBER, -1), _number(file, part, _COUNT, 1)
        if found != (i, count):
            raise ValueError(f"{file}: should be part {i + 1} of {count}, but says it is {found[0] + 1} of {found[1]}")
    whole = _joined(parts)
    promised = _number(files[0], parts[files[0]], _TENSORS, len(whole.tensors))
    if promised != len(whole.tensors):
        raise ValueError(f"{files[0]}: all {count} parts should hold {promised} tensors, found {len(whole.tensors)}")
    return whole


def _number(path: Path, header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int:
        raise ValueError(f"{path}: {key!r} should be a number, found {value!r}")
    return value


def _parts_beside(path: Path, count: int) -> list[Path]:
    """All parts in their order."""
    named = _NUMBERED.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ValueError(
            f"{path}: one of {count} parts of a model, but not named NAME-00001-of-{count:05d}.gguf as the others can "
            "be found by; name the parts so, or join them (llama-gguf-split --merge)"
        )
    files = []
    for i in range(1, count + 1):
        files.append(path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf"))
        if not files[-1].is_file():
            raise FileNotFoundError(f"{path}: {files[-1].name} is missing beside it; download it as well")
    return files


def _joined(parts: Mapping[Path, Header]) -> Whole:
    tensors: dict[str, Placed] = {}
    for file, header in parts.items():
        for name, stored in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{file}: tensor {name!r} is in {tensors[name].file.name} as well")
            tensors[name] = Placed(file, stored)
    return Whole(tuple(parts), next(iter(parts.values())).metadata, tensors)
