"""Artifact folders as checkpoints: the weights in one read back, under our own names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.config import CACHE_SCALES
from diptych.jax_model.readers import TensorInfo
from diptych.jax_model.readers.files import hashes, map_rows, read_json
from diptych.jax_model.readers.orbax import own_config, own_tokenizer
from diptych.jax_model.readers.safetensors_header import CONVERTERS, read_header
from diptych.jax_model.tokenizers import TokenizerFiles

__all__ = ["MANIFEST", "ArtifactCheckpoint"]

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
_CONSTANTS = "constants."  # and scales of a cache: an export makes its own of both


class ArtifactCheckpoint:
    """An artifact's parameters. See :class:`diptych.jax_model.readers.Checkpoint`."""

    format: Literal["artifact"] = "artifact"

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_json(path / MANIFEST)
        if manifest.get("quantization"):
            raise ValueError(f"{path}: its weights are blocks of integers; name the model that it was exported from")
        raw = manifest.get("config")
        self.config = own_config(raw if isinstance(raw, dict) else {}, path / MANIFEST)
        self.family = self.config.family
        if not (path / WEIGHTS).is_file():
            raise FileNotFoundError(f"{path}: no {WEIGHTS} beside {MANIFEST}")
        stored = read_header(path / WEIGHTS)
        self._stored = {name: one for name, one in stored.items() if _is_parameter(name)}
        self.tensors = {name: TensorInfo(one.shape, one.dtype) for name, one in self._stored.items()}

    @functools.cached_property
    def tokenizer(self) -> TokenizerFiles:
        return own_tokenizer(self.path)

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        stored = self._stored[name]
        if stored.dtype not in CONVERTERS:
            raise ValueError(f"{self.path}: {name!r} is stored as {stored.dtype}; name the model it was exported from")
        return map_rows(self.path / WEIGHTS, stored.offset, stored.shape, stored.nbytes, CONVERTERS[stored.dtype], rows)

    def provenance(self) -> dict[str, Any]:
        return {"format": self.format, "files": hashes(self.path / name for name in (MANIFEST, WEIGHTS))}


def _is_parameter(name: str) -> bool:
    return not name.startswith(_CONSTANTS) and name.rpartition(".")[2] not in CACHE_SCALES
