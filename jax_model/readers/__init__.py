"""Checkpoints behind one interface: names, shapes, one tensor at a time, a configuration, a tokenizer.

A checkpoint is a ``.gguf`` file, a Hugging Face folder, an Orbax checkpoint or an artifact.  Opening one reads headers
only, and checks them strictly: a file that is cut short, damaged or not what its name says is refused with its name,
its size and the likely reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES, MULTIMODAL, Foreign
from diptych.jax_model.families.table import Format

if TYPE_CHECKING:
    from diptych.jax_model.tokenizers import TokenizerFiles

__all__ = ["Checkpoint", "StoresBlocks", "TensorInfo", "open_checkpoint"]


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its shape in row-major order, whatever the format's own order, and its type as stored."""

    shape: tuple[int, ...]
    dtype: str  # "F32", "BF16", "Q4_1", …


class Checkpoint(Protocol):
    """An open checkpoint. Holds no weights: each :meth:`read` maps the file anew and lets it go."""

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> Format: ...

    @property
    def family(self) -> str:
        """Hugging Face's ``model_type``, known to be in ``FAMILIES``."""

    @property
    def config(self) -> Foreign | Config:
        """The configuration under Hugging Face's keys; or ours, where the tensors have our paths and layout as well."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor in the checkpoint, by its own name."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Made on first use. Raises ValueError or FileNotFoundError when there is none that can be used."""

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """One tensor, or some rows of a matrix, in float32. Raises KeyError, and ValueError for types of no weights."""

    def provenance(self) -> dict[str, Any]:
        """``{"format", "files": {name: {"sha256", "bytes"}}}``; reads every file once."""


@runtime_checkable
class StoresBlocks(Protocol):
    """A checkpoint whose tensors may lie in blocks of integers, which can be carried as they are."""

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a matrix stored in blocks, [rows, bytes of a row]."""


def open_checkpoint(source: str | Path, adapters: Iterable[tuple[str | Path, float]] = ()) -> Checkpoint:
    """Open a ``.gguf`` file, a Hugging Face folder, an Orbax checkpoint (its folder, a step's, or that of the steps, of
    which the last counts) or an artifact; what is none of them but has the form ``owner/name`` or
    ``owner/name@revision`` is fetched from the Hugging Face Hub, see :mod:`diptych.jax_model.readers.hub`.

    ``adapters`` are LoRA folders and their weights, merged into what is read; see :mod:`diptych.jax_model.adapters`.

    Raises FileNotFoundError when there is nothing there or a needed file is missing, and ValueError when a file is
    damaged, the architecture is not supported or an adapter does not fit.
    """
    checkpoint = _open(source)
    if adapters := list(adapters):
        from diptych.jax_model.adapters import Adapted

        return Adapted(checkpoint, adapters)
    return checkpoint


def _open(source: str | Path) -> Checkpoint:
    from diptych.jax_model.readers.artifact import MANIFEST, ArtifactCheckpoint
    from diptych.jax_model.readers.gguf import GgufCheckpoint
    from diptych.jax_model.readers.hub import fetch, is_repository
    from diptych.jax_model.readers.huggingface import HuggingFaceCheckpoint
    from diptych.jax_model.readers.orbax import OrbaxCheckpoint, find_item

    path = Path(source)
    if find_item(path) is not None:
        return OrbaxCheckpoint(path)
    if (path / MANIFEST).is_file():
        return ArtifactCheckpoint(path)
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if path.suffix == ".safetensors" and path.is_file():
        raise ValueError(f"{path}: weights alone are no checkpoint; name the folder that holds them and config.json")
    if path.is_file():
        return GgufCheckpoint(path)
    if is_repository(source):
        return HuggingFaceCheckpoint(fetch(source))
    raise FileNotFoundError(
        f"{source}: no such file or folder; expected a .gguf file, a Hugging Face folder, an Orbax checkpoint or an "
        "artifact"
    )


def supported(family: object, origin: str) -> str:
    """``family`` if there is one of that name. Raises ValueError with the list of those that there are."""
    if isinstance(family, str) and family in FAMILIES:
        return family
    known = ", ".join(sorted({*FAMILIES, *MULTIMODAL}))
    raise ValueError(f"{origin}: architecture {family!r} is not supported; supported: {known}")


def plausible_layers(count: object, tensors: int, origin: str) -> None:
    """Raise ValueError when a file claims more layers than it has tensors, before anything is built per layer."""
    if isinstance(count, int) and count > tensors:
        raise ValueError(f"{origin}: claims {count} layers, but the checkpoint has only {tensors} tensors")
