"""Checkpoints behind one interface: names, shapes, one tensor at a time, a configuration, a tokenizer.

A checkpoint is a ``.gguf`` file or a Hugging Face folder.  Opening one reads headers only, and checks them strictly: a
file that is cut short, damaged or not what its name says is refused with its name, its size and the likely reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.families import FAMILIES, MULTIMODAL, Foreign

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
    def format(self) -> Literal["gguf", "huggingface"]: ...

    @property
    def family(self) -> str:
        """Hugging Face's ``model_type``, known to be in ``FAMILIES``."""

    @property
    def config(self) -> Foreign:
        """The configuration under Hugging Face's keys."""

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


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a ``.gguf`` file or a Hugging Face folder.

    Raises FileNotFoundError when there is nothing there or a needed file is missing, and ValueError when a file is
    damaged or the architecture is not supported.
    """
    from diptych.jax_model.readers.gguf import GgufCheckpoint
    from diptych.jax_model.readers.huggingface import HuggingFaceCheckpoint

    path = Path(source)
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if path.suffix == ".safetensors" and path.is_file():
        raise ValueError(f"{path}: weights alone are no checkpoint; name the folder that holds them and config.json")
    if path.is_file():
        return GgufCheckpoint(path)
    raise FileNotFoundError(f"{source}: no such file or folder; expected a .gguf file or a Hugging Face folder")


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
