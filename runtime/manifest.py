"""What an artifact says about itself, checked before anything else reads its files.

An artifact may come from anywhere, so nothing here trusts it: every path must stay inside the folder, including the
ones inside the graphs (:mod:`diptych.runtime.external_data`), and every file must have the size that was promised.
Fields that this version does not know are left alone: a newer writer may add some without a new schema version.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from diptych.runtime.external_data import external_locations

SCHEMA_VERSION = 1
FILE = "manifest.json"


@dataclass(frozen=True)
class Signature:
    """One graph input or output; a dimension is a size or, where it varies, the letter of it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Program:
    """A graph and what goes in and out of it."""

    file: str
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]


@dataclass(frozen=True)
class CacheLayout:
    """Every layer holds keys and values, each [B, heads, S, head_size]."""

    layers: int
    heads: int
    head_size: int
    dtype: str


@dataclass(frozen=True)
class Vocabulary:
    """``size`` is the number of logits; ids at or above it cannot be fed."""

    size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """A checked manifest. ``data`` is the whole of it as it stands in the file, provenance and certificate included."""

    folder: Path
    name: str
    target: str
    device: str
    dtype: str
    max_context: int
    cache: CacheLayout
    vocabulary: Vocabulary
    programs: Mapping[str, Program]
    files: Mapping[str, FileEntry]
    verification: str
    data: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | Path, *, check_hashes: bool = False) -> Manifest:
        """Read and check the manifest of an artifact, and every path and size in it; with ``check_hashes`` every byte.

        Raises FileNotFoundError when there is no artifact or a file of it is missing, ValueError for everything else.
        """
        root = _resolve(Path(folder))
        manifest = _parse(root, _read_json(inside(root, FILE, f"{root / FILE}")))
        for name, entry in manifest.files.items():
            _check_file(root, name, entry)
        for program in manifest.programs.values():
            _check_external_data(manifest, program.file)
        if check_hashes:
            manifest.check_hashes()
        return manifest

    def path(self, name: str) -> Path | None:
        """Where a file of the artifact is; None if the artifact has no such file."""
        return self.folder / name if name in self.files else None

    def check_hashes(self) -> None:
        """Read every file and compare it with its SHA-256. Raises ValueError naming the first that differs."""
        for name, entry in self.files.items():
            with (self.folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry.sha256.lower():
                raise ValueError(
                    f"{self.folder / name} has SHA-256 {found}, but {FILE} promises {entry.sha256}: "
                    "it was changed or damaged after the export. Copy or export the artifact again"
                )

    def to_json(self) -> dict[str, Any]:
        return dict(self.data)


def inside(folder: Path, name: str, where: str) -> Path:
    """The path of ``name`` in ``folder`` (which is resolved). Raises ValueError when it leads or links out of it.

    Both kinds of path are checked on every system: an artifact travels.
    """
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    # "*" is in no file name that Windows allows, and in ONNX Runtime's name for "not a file but an address in memory".
    odd = not name or any(character in name for character in "\0\\*")
    if odd or posix.is_absolute() or windows.anchor or ".." in posix.parts:
        raise ValueError(f"{where}: the path {name!r} must be relative and stay inside the artifact's folder")
    path = folder / name
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(folder):
        raise ValueError(
            f"{where}: {name!r} is a link that leaves the artifact's folder (to {target}), which is not followed. "
            f"Copy the artifact with its links resolved: cp -rL {folder} NEW_FOLDER"
        )
    return path


def _resolve(folder: Path) -> Path:
    if folder.is_dir():
        if (folder / FILE).exists():
            return folder.resolve()
        raise FileNotFoundError(
            f"{folder} is no artifact: it has no {FILE}. Make one with: diptych export SOURCE -o FOLDER"
        )
    if folder.exists():
        raise ValueError(f"{folder} is a file, an artifact is a folder. Make one: diptych export {folder} -o FOLDER")
    raise FileNotFoundError(f"there is no folder {folder}. Make an artifact with: diptych export SOURCE -o {folder}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Export the artifact again") from None


def _check_file(folder: Path, name: str, entry: FileEntry) -> None:
    path = inside(folder, name, f"{folder / FILE}: files")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, but {FILE} lists it: the artifact is incomplete. Copy it again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise ValueError(
            f"{path} has {size} bytes, but {FILE} promises {entry.bytes}: the artifact is incomplete or was changed. "
            "Copy or export it again"
        )


def _check_external_data(manifest: Manifest, graph: str) -> None:
    """Every place a graph reads weights from is a file that the manifest lists, so inside the folder, and checked."""
    path = manifest.folder / graph
    for location in external_locations(path):
        inside(manifest.folder, location, f"{path}: external data")
        listed = str(PurePosixPath(graph).parent / location)
        if listed not in manifest.files:
            raise ValueError(f"{path} has weights in {location!r}, which {FILE} does not list: export it again")


# ------------------------------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class _Object:
    """A JSON object that knows its place, so that every complaint can name it."""

    fields: dict[str, Any]
    place: str

    @classmethod
    def of(cls, value: Any, place: str) -> _Object:
        if not isinstance(value, dict):
            raise _wrong(place, "a JSON object", value)
        return cls(value, place)

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.place} has no {name!r}: the file is incomplete. Export the artifact again")
        return self.fields[name]

    def at(self, name: str) -> str:
        return f"{self.place}: {name}"

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise _wrong(self.at(name), "a non-empty string", value)
        return value

    def size(self, name: str, least: int = 1) -> int:
        return _size(self.get(name), self.at(name), least)

    def object(self, name: str) -> _Object:
        return _Object.of(self.get(name), self.at(name))

    def list(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise _wrong(self.at(name), "a list", value)
        return value

    def objects(self) -> Iterator[tuple[str, _Object]]:
        for name in self.fields:
            yield name, self.object(name)


def _wrong(place: str, expected: str, found: Any) -> ValueError:
    return ValueError(f"{place} must be {expected}, not {found!r:.80}")


def _size(value: Any, place: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise _wrong(place, f"an integer of at least {least}", value)
    return value


def _parse(folder: Path, content: Any) -> Manifest:
    top = _Object.of(content, str(folder / FILE))
    _check_version(top)
    entries = top.object("files").objects()
    files = {name: FileEntry(entry.text("sha256"), entry.size("bytes", 0)) for name, entry in entries}
    cache = top.object("cache")
    return Manifest(
        folder=folder,
        name=top.text("name"),
        target=top.text("target"),
        device=top.text("device"),
        dtype=top.text("dtype"),
        max_context=top.size("max_context"),
        cache=CacheLayout(cache.size("layers"), cache.size("heads"), cache.size("head_size"), cache.text("dtype")),
        vocabulary=_vocabulary(top.object("vocabulary")),
        programs={name: _program(top.object("programs").object(name), files) for name in ("prefill", "decode")},
        files=files,
        verification=top.object("verification").text("status"),
        data=top.fields,
    )


def _check_version(top: _Object) -> None:
    version = top.size("schema_version")
    if version != SCHEMA_VERSION:
        remedy = "Upgrade diptych" if version > SCHEMA_VERSION else "Export the artifact again"
        raise ValueError(f"{top.place} has schema version {version}; this diptych reads {SCHEMA_VERSION}. {remedy}")


def _vocabulary(entry: _Object) -> Vocabulary:
    size = entry.size("size")
    eos = tuple(_token_id(value, size, entry.at("eos_token_ids")) for value in entry.list("eos_token_ids"))
    single = {
        name: None if entry.get(name) is None else _token_id(entry.get(name), size, entry.at(name))
        for name in ("bos_token_id", "pad_token_id")
    }
    return Vocabulary(size, eos, **single)


def _token_id(value: Any, size: int, place: str) -> int:
    if _size(value, place, 0) >= size:
        raise _wrong(place, f"a token id below {size}", value)
    return int(value)


def _program(entry: _Object, files: Mapping[str, FileEntry]) -> Program:
    file = entry.text("file")
    if file not in files or not file.endswith(".onnx"):
        raise _wrong(entry.at("file"), "the name of an .onnx file listed under 'files'", file)
    return Program(file, _signatures(entry, "inputs"), _signatures(entry, "outputs"))


def _signatures(entry: _Object, name: str) -> tuple[Signature, ...]:
    return tuple(_signature(_Object.of(value, f"{entry.at(name)}[{i}]")) for i, value in enumerate(entry.list(name)))


def _signature(entry: _Object) -> Signature:
    shape = entry.list("shape")
    for dimension in shape:
        if not isinstance(dimension, str):
            _size(dimension, entry.at("shape"), 1)
    return Signature(entry.text("name"), entry.text("dtype"), tuple(shape))
