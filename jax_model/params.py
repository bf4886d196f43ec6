"""Parameters: from a checkpoint's tensors to our tree, one at a time, each exactly once.

A tree of parameters is a nested dict whose ``"layers"`` is a list.  The path of a leaf, ``layers.0.attn.qkv``, is its
name everywhere: in JAX, in the weights file, in the ONNX graphs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from safetensors import safe_open

from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import Parameter, Source, expand, source_shape
from diptych.jax_model.readers import Checkpoint

__all__ = ["Params", "abstract", "configure", "flatten", "load", "read_safetensors", "stream", "unflatten"]

Params: TypeAlias = dict[str, Any]

_CONSTANTS = "constants."  # names in an artifact's weights file that are no parameters
_SHOWN = 4  # names that an error lists before it says how many more there are
_COMPARED = 1024  # rows of a tied matrix at a time

# What to say of stored tensors that mean something we cannot compute.
_UNSUPPORTED = {
    "rope_freqs.weight": "it holds the frequencies of llama3 rope scaling, which is not supported",
    "*.bias": "the configuration says that there are no biases",
}


def configure(checkpoint: Checkpoint) -> Config:
    """The checkpoint's architecture. Raises ValueError when its configuration is incomplete, unknown or at odds."""
    config = FAMILIES[checkpoint.family].configure(checkpoint.config)
    if config.N % config.K:
        raise ValueError(
            f"{checkpoint.path}: {config.N} query heads cannot be shared out among {config.K} key/value heads"
        )
    return config


def abstract(config: Config, dtype: str = "float32") -> Params:
    """The tree with a ``jax.ShapeDtypeStruct`` for every leaf: what tracing needs, and no weights."""
    table = FAMILIES[config.family].table
    return unflatten(
        {
            parameter.path: jax.ShapeDtypeStruct(parameter.shape(config), jnp.dtype(dtype))  # type: ignore[no-untyped-call]
            for parameter in expand(table, config)
        }
    )


def load(checkpoint: Checkpoint, config: Config | None = None) -> Params:
    """The whole tree in float32, as JAX arrays. Raises what :func:`configure` and :func:`stream` raise."""
    values = stream(checkpoint, config or configure(checkpoint))
    return unflatten({path: jnp.asarray(value) for path, value, _ in values})


def stream(checkpoint: Checkpoint, config: Config) -> Iterator[tuple[str, NDArray[np.float32], list[str]]]:
    """Every parameter as (path, float32 value, names of the tensors it came from), one in memory at a time.

    A value may be a transposed view; copy it some rows at a time to keep it single.  Before the first tensor is read,
    names and shapes are checked: raises ValueError unless every parameter can be filled and every tensor is used.
    """
    fillings = _plan(checkpoint, config)

    def values() -> Iterator[tuple[str, NDArray[np.float32], list[str]]]:
        for filling in fillings:
            yield filling.path, filling.value(checkpoint, config), [piece.name for piece in filling.pieces]

    return values()


def flatten(params: Params) -> dict[str, Any]:
    """``{"layers.0.attn.qkv": leaf, …}``, in the tree's own order."""

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict | list):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                yield from walk(child, f"{prefix}{key}.")
        else:
            yield prefix[:-1], node

    return dict(walk(params, ""))


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """Inverse of :func:`flatten`. Raises ValueError when a layer is missing or one path runs through another."""
    tree: Params = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"parameter {path!r} lies below another parameter")
        if last in node:
            raise ValueError(f"parameter {path!r} lies above another parameter")
        node[last] = leaf
    if isinstance(layers := tree.get("layers"), dict):
        tree["layers"] = _in_order(layers)
    return tree


def _in_order(layers: dict[str, Any]) -> list[Any]:
    try:
        return [layers[str(i)] for i in range(len(layers))]
    except KeyError as error:
        raise ValueError(f"layer {error.args[0]} is missing: found {', '.join(layers)}") from None


def read_safetensors(path: str | Path) -> Params:
    """The parameters in an artifact's ``weights.safetensors``, as JAX arrays; its constants are left out."""
    with safe_open(path, framework="flax") as file:
        names = [name for name in file.keys() if not name.startswith(_CONSTANTS)]  # noqa: SIM118, it is no mapping
        return unflatten({name: file.get_tensor(name) for name in names})


# ------------------------------------------------------------------------------------------------------- exactly once


@dataclass(frozen=True)
class _Piece:
    """A tensor of the checkpoint that fills a parameter, or one of the columns of a packed one."""

    name: str
    layout: str
    shape_layout: str  # says the same shape in the letters of Config; ``layout`` may have letters of its own
    offset: float

    def value(self, checkpoint: Checkpoint, config: Config) -> NDArray[np.float32]:
        stored = checkpoint.read(self.name)
        if self.offset:
            stored += np.float32(self.offset)
        return arrange(stored, self.layout, config)


@dataclass(frozen=True)
class _Filling:
    path: str
    pieces: tuple[_Piece, ...]

    def value(self, checkpoint: Checkpoint, config: Config) -> NDArray[np.float32]:
        values = [piece.value(checkpoint, config) for piece in self.pieces]
        return values[0] if len(values) == 1 else np.concatenate(values, axis=-1)


def arrange(stored: NDArray[np.float32], layout: str, config: Config) -> NDArray[np.float32]:
    """Apply an einops layout with the sizes of ``config``; ``two`` is 2, and einops works out a letter of its own."""
    sizes = {**config.sizes(), "two": 2}
    used = set(layout.split("->")[0].replace("(", " ").replace(")", " ").split())
    arranged: NDArray[np.float32] = rearrange(stored, layout, **{name: sizes[name] for name in used & sizes.keys()})
    return arranged


def _plan(checkpoint: Checkpoint, config: Config) -> list[_Filling]:
    """Which tensors fill what. Raises ValueError that names what is missing, misshapen or left over."""
    family = FAMILIES[config.family]
    embed, head = _embed_and_head(family.table, checkpoint.format)
    stand_in = {embed: head} if config.tied else {}  # a tied model may store either
    fillings = [
        _Filling(parameter.path, tuple(_piece(source, checkpoint, stand_in) for source in parameter.sources))
        for parameter in expand(family.table, config)
    ]
    used = {piece.name for filling in fillings for piece in filling.pieces}
    if config.tied and {embed, head} <= checkpoint.tensors.keys():
        used.add(head)
    _check_fit(checkpoint, config, fillings, used, stand_in)
    if config.tied and {embed, head} <= checkpoint.tensors.keys():
        _check_same(checkpoint, embed, head)
    return fillings


def _embed_and_head(table: tuple[Parameter, ...], format: str) -> tuple[str, str]:
    names = {parameter.path: _stored_as(parameter.sources[0], format)[0] for parameter in table}
    return names["embed"], names["head"]


def _stored_as(source: Source, format: str) -> tuple[str, str]:
    return (source.gguf, source.gguf_layout) if format == "gguf" else (source.hf, source.layout)


def _piece(source: Source, checkpoint: Checkpoint, stand_in: Mapping[str, str]) -> _Piece:
    name, layout = _stored_as(source, checkpoint.format)
    if name not in checkpoint.tensors and stand_in.get(name) in checkpoint.tensors:
        name = stand_in[name]
    return _Piece(name, layout, source.layout, source.hf_offset if checkpoint.format == "huggingface" else 0.0)


def _check_fit(
    checkpoint: Checkpoint, config: Config, fillings: list[_Filling], used: set[str], stand_in: Mapping[str, str]
) -> None:
    """Raise ValueError unless every parameter finds its tensors, in the right shape, and every tensor is used."""
    ignored = FAMILIES[config.family].ignored
    missing, misshapen = [], []
    for filling in fillings:
        for piece in filling.pieces:
            expected = source_shape(piece.shape_layout, config.sizes())
            if piece.name not in checkpoint.tensors:
                either = f" or {stand_in[piece.name]!r}" if piece.name in stand_in else ""
                missing.append(f"{piece.name!r}{either} (for {filling.path})")
            elif (found := checkpoint.tensors[piece.name].shape) != expected:
                misshapen.append(f"{piece.name!r} {found}, expected {expected}")
    left = [
        name
        for name in checkpoint.tensors
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    ]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("tensors of the wrong shape", misshapen),
            ("tensors that no parameter uses", [repr(name) + _reason(name) for name in left]),
        )
        if names
    ]
    if problems:
        raise ValueError(f"{checkpoint.path} does not fit the family {config.family!r}. " + "; ".join(problems))


def _listed(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _reason(name: str) -> str:
    reasons = (reason for pattern, reason in _UNSUPPORTED.items() if fnmatch.fnmatchcase(name, pattern))
    return next((f" ({reason})" for reason in reasons), "")


def _check_same(checkpoint: Checkpoint, embed: str, head: str) -> None:
    """Raise ValueError unless the two matrices of a tied model hold the same values, bit for bit."""
    for name in (embed, head):
        if checkpoint.tensors[name].shape != checkpoint.tensors[embed].shape:
            raise ValueError(f"{checkpoint.path}: {embed!r} and {head!r} should be one matrix, but differ in shape")
    for start in range(0, checkpoint.tensors[embed].shape[0], _COMPARED):
        rows = slice(start, start + _COMPARED)
        first, second = (checkpoint.read(name, rows).view(np.uint32) for name in (embed, head))
        if not np.array_equal(first, second):
            raise ValueError(
                f"{checkpoint.path}: the configuration ties {embed!r} and {head!r}, but their values differ from row "
                f"{start} on; if the model is meant to have a head of its own, its configuration should say "
                "tie_word_embeddings: false"
            )
