"""GGUF models: the ``gguf`` package says what the blocks mean, our own strict header reader where they lie."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.families import Foreign
from diptych.jax_model.readers import TensorInfo, plausible_layers
from diptych.jax_model.readers.files import hashes, map_rows
from diptych.jax_model.readers.gguf_metadata import translate
from diptych.jax_model.readers.gguf_parts import Placed, read_whole
from diptych.jax_model.readers.gguf_tokenizer import read_tokenizer
from diptych.jax_model.tokenizers import TokenizerFiles

__all__ = ["GgufCheckpoint"]

EMBED, HEAD = "token_embd.weight", "output.weight"
FACTORS = {
    "rope.factors": "rope_freqs.weight",
    "rope.factors.long": "rope_factors_long.weight",
    "rope.factors.short": "rope_factors_short.weight",
}
OPTIONAL = {
    "bias.qkv": "blk.0.attn_q.bias",
    "bias.out": "blk.0.attn_output.bias",
    "bias.mlp": "blk.0.ffn_up.bias",
    "norm.mlp": "blk.0.ffn_norm.weight",
    "norm.qk": "blk.0.attn_q_norm.weight",
}


class GgufCheckpoint:
    """An open GGUF file, with all other parts if it is one. See :class:`diptych.jax_model.readers.Checkpoint`."""

    format: Literal["gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole = read_whole(path)
        self.tensors = {
            name: TensorInfo(_without_units(placed.stored.shape), placed.stored.type.name)
            for name, placed in self._whole.tensors.items()
        }
        self.family, values = self._translated()
        self.config = Foreign(values, str(path))

    def _translated(self) -> tuple[str, dict[str, Any]]:
        metadata, origin = self._whole.metadata, str(self.path)
        for key, value in metadata.items():
            if key.endswith(".block_count"):
                plausible_layers(value, len(self.tensors), origin)
        embed = self.tensors.get(EMBED) or self.tensors.get(HEAD)
        return translate(
            {**metadata, **self._said_by_tensors()},
            vocabulary=embed.shape[0] if embed else 1,
            tied=self._tied(),
            origin=origin,
        )

    def _said_by_tensors(self) -> dict[str, Any]:
        """What the metadata leave to the tensors: which parts there are, and by what rope's pairs slow down."""
        prefix = self._whole.metadata.get("general.architecture", "")
        said: dict[str, Any] = {f"{prefix}.{key}": name in self.tensors for key, name in OPTIONAL.items()}
        for key, name in FACTORS.items():
            if name in self.tensors:
                said[f"{prefix}.{key}"] = self.read(name).tolist()
        return said

    def _tied(self) -> bool:
        """Whether one matrix serves as embedding and head: only one is stored, or both are the same bytes."""
        embed, head = (self._whole.tensors.get(name) for name in (EMBED, HEAD))
        if embed is None or head is None:
            return True
        first, second = embed.stored, head.stored
        return (first.shape, first.type) == (second.shape, second.type) and _same_bytes(embed, head)

    @functools.cached_property
    def tokenizer(self) -> TokenizerFiles:
        return read_tokenizer(Foreign(self._whole.metadata, str(self.path)))

    def read(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        file, stored = self._whole.tensors[name].file, self._whole.tensors[name].stored

        def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
            try:
                return gguf.dequantize(blocks, stored.type)
            except NotImplementedError:
                version = importlib.metadata.version("gguf")
                problem = f"is stored as {stored.type.name}, which gguf {version} cannot read"
                raise ValueError(f"{file}: tensor {name!r} {problem}") from None

        return map_rows(file, stored.offset, self.tensors[name].shape, stored.nbytes, dequantize, rows)

    def raw(self, name: str) -> NDArray[np.uint8]:
        file, stored = self._whole.tensors[name].file, self._whole.tensors[name].stored
        rows = math.prod(stored.shape[:-1])
        return np.memmap(file, np.uint8, "r", stored.offset, (rows, stored.nbytes // rows))

    def provenance(self) -> dict[str, Any]:
        return {"format": self.format, "files": hashes(self._whole.files)}


def _without_units(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading sizes of one, which say nothing to ggml; converters of different age write them or do not."""
    first = next((i for i, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1)
    return shape[first:]


def _same_bytes(a: Placed, b: Placed) -> bool:
    step, nbytes = 1 << 22, a.stored.nbytes
    for start in range(0, nbytes, step):
        length = min(step, nbytes - start)
        first, second = (np.memmap(x.file, np.uint8, "r", x.stored.offset + start, (length,)) for x in (a, b))
        if not np.array_equal(first, second):
            return False
    return True
