"""An artifact is a folder that is either complete or not there.

It is assembled beside its final place, in ``.NAME.partial-XXXXXXXX``, and renamed when complete.  Whoever assembles
holds a lock on that folder, which the system lets go when the process dies: so a later run can tell what a dead one
left behind from what a living one is working on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import diptych
from diptych.jax_model.config import CacheDtype, Config

__all__ = ["SCHEMA_VERSION", "assemble", "describe_file", "manifest", "write_manifest", "write_text"]

SCHEMA_VERSION = 1
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"


# ------------------------------------------------------------------------------------------------------------ assembly


@contextlib.contextmanager
def assemble(output: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A fresh folder to fill; when the block ends it becomes ``output``, and if the block raises nothing is left.

    ``force`` lets it replace an artifact that is there already; the old one keeps its place until the new one is
    complete.  SIGTERM, SIGHUP and Ctrl-C clean up too; what a killed run left behind is removed by the next one.

    Raises, before the block runs: FileExistsError when ``output`` exists and may not be replaced; OSError when its
    parent cannot be made or written to; ValueError when ``output`` has no name.
    """
    final = Path(output).resolve()
    if not final.name:
        raise ValueError(f"{output} cannot be an artifact's folder: it has no name")
    with _interruptions() as interruptions, _parents_of(final):
        with _explaining(final.parent):
            _sweep(final)
        _refuse_existing(final, output, force)
        with _partial(final) as partial:
            with interruptions.allowed():
                yield partial
            _sync(partial)
            _publish(partial, final, force)


def _refuse_existing(final: Path, output: str | Path, force: bool) -> None:
    if not os.path.lexists(final):
        return
    if not force:
        raise FileExistsError(f"{output} exists already: name another folder, or replace it with --force (force=True)")
    if not final.is_dir() or (any(final.iterdir()) and not (final / MANIFEST).is_file()):
        raise FileExistsError(f"{output} exists and is no artifact (it has no {MANIFEST}): remove it yourself")


@contextlib.contextmanager
def _explaining(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise type(error)(f"cannot write to {parent}: {error.strerror}") from None


@contextlib.contextmanager
def _parents_of(final: Path) -> Iterator[None]:
    """Make the folders above ``final``; if the block raises, remove those that were made."""
    missing = [parent for parent in final.parents if not os.path.lexists(parent)]
    lowest = next(parent for parent in final.parents if parent not in missing)
    if not lowest.is_dir():
        raise NotADirectoryError(f"cannot write to {final.parent}: {lowest} is not a folder")
    try:
        with _explaining(final.parent):
            final.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: somebody else uses it by now
            for parent in missing:
                parent.rmdir()
        raise


@contextlib.contextmanager
def _partial(final: Path) -> Iterator[Path]:
    """A locked folder beside ``final``, removed at the end if something still has its name."""
    partial, lock = _create(final)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _create(final: Path) -> tuple[Path, int | None]:
    while True:
        partial = final.with_name(f"{_prefix(final)}{secrets.token_hex(4)}")
        with _explaining(final.parent):
            partial.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another run's sweep came in between: try again
            lock = _lock(partial, wait=True)
            if partial.is_dir():
                return partial, lock


def _prefix(final: Path) -> str:
    return f".{final.name[:48]}.partial-"  # a file name has at most 255 bytes


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor whose lock dies with this process; None where the system or file system has no such locks.

    Raises BlockingIOError when another process holds it and ``wait`` is false.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _sweep(final: Path) -> None:
    """Clear away what dead runs left beside ``final``: folders with our kind of name that nobody locks."""
    pattern = re.compile(re.escape(_prefix(final)) + r"[0-9a-f]{8}(\.old)?")
    for folder in sorted(final.parent.iterdir()):
        if pattern.fullmatch(folder.name):
            with contextlib.suppress(OSError):  # locked by a living run, or gone meanwhile, or not ours to remove
                _clear(folder, final)


def _clear(folder: Path, final: Path) -> None:
    lock = _lock(folder, wait=False)
    if lock is None:
        return
    if folder.suffix == ".old" and not final.exists():  # the run died between two renames: see _exchange
        folder.rename(final)
    elif all(entry.is_file() and not entry.is_symlink() for entry in folder.iterdir()):
        shutil.rmtree(folder)
    os.close(lock)


class _Interruptions:
    """Signals that end a process, as exceptions that come only where they are allowed: not amid making or removing."""

    def __init__(self) -> None:
        self._allowed = False
        self._pending: int | None = None

    def arrive(self, number: int, frame: FrameType | None = None) -> None:
        self._pending = number
        if self._allowed:
            self.deliver()

    def deliver(self) -> None:
        number, self._pending = self._pending, None
        if number is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True
        try:
            self.deliver()
            yield
        finally:
            self._allowed = False


@contextlib.contextmanager
def _interruptions() -> Iterator[_Interruptions]:
    """Catch the signals that nobody else has a handler for. Only the main thread can, so elsewhere none are caught."""
    interruptions = _Interruptions()
    default = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) in default}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number in before:
        signal.signal(number, interruptions.arrive)
    try:
        yield interruptions
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    interruptions.deliver()


# --------------------------------------------------------------------------------------------------------- publication


def _sync(folder: Path) -> None:
    """Make the system write the folder's files down: a rename must not outlive what it names."""
    for entry in (*folder.iterdir(), folder):
        if entry.is_dir() and sys.platform == "win32":
            continue
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(partial: Path, final: Path, force: bool) -> None:
    """Give the complete folder its name. What it replaces has the partial name afterwards and is removed with it."""
    _refuse_existing(final, final, force)  # again: minutes have passed
    if final.exists():
        _exchange(partial, final)
    else:
        partial.rename(final)
    _sync_parent(final)


def _sync_parent(final: Path) -> None:
    if sys.platform != "win32":
        descriptor = os.open(final.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders, in one step where the system can."""
    if not _renameat2_exchange(one, other):
        aside = one.with_name(f"{one.name}.old")
        other.rename(aside)
        try:
            one.rename(other)
        except BaseException:
            aside.rename(other)
            raise
        aside.rename(one)


def _renameat2_exchange(one: Path, other: Path) -> bool:
    """Linux: both names change in one step, so that no crash can fall between. False where there is no such call."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP):
        return False
    raise OSError(code, f"cannot replace {other}: {os.strerror(code)}")


# ------------------------------------------------------------------------------------------------------------- content


def write_text(folder: Path, name: str, text: str) -> None:
    """Write ``text`` to a file directly inside ``folder``. Raises ValueError when ``name`` would lead anywhere else."""
    if name in ("", ".", "..") or any(separator in name for separator in "/\\:\0"):
        raise ValueError(f"{name!r} is no file name: an artifact's files lie directly in its folder")
    (folder / name).write_bytes(text.encode())


def describe_file(path: Path) -> dict[str, Any]:
    """A file's SHA-256 and size, as manifests state them."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def manifest(
    *,
    name: str,
    target: str,
    device: str,
    dtype: str,
    cache_dtype: CacheDtype,
    max_context: int,
    config: Config,
    vocabulary: Mapping[str, Any],
    programs: Mapping[str, Any],
    files: Mapping[str, Any],
    tensors: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    source: Mapping[str, Any],
    verification: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest, its keys in a fixed order, without dates or machine names: same inputs, same bytes.

    ``quantization`` is None, and absent from the file, where all parameters are floats.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "diptych_version": diptych.__version__,
        "target": target,
        "device": device,
        "dtype": dtype,
        "max_context": max_context,
        "config": config.to_json(),
        "cache": {"layers": config.L, "heads": config.K, "head_size": config.H, "dtype": cache_dtype},
        "vocabulary": dict(vocabulary),
        "programs": dict(programs),
        "files": dict(sorted(files.items())),
        "tensors": dict(tensors),
        **({} if quantization is None else {"quantization": dict(quantization)}),
        "source": dict(source),
        "tools": {tool.replace("-", "_"): version(tool) for tool in ("jax", "onnx-ir", "onnxruntime")},
        "verification": dict(verification),
    }


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``manifest.json``. Raises ValueError when a number is not finite: JSON has no such numbers."""
    write_text(folder, MANIFEST, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
