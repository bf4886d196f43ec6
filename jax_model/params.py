"""Parameters: from a checkpoint's tensors to our tree, one at a time, each exactly once.

A tree of parameters is a nested dict whose ``"layers"`` is a list.  The path of a leaf, ``layers.0.attn.qkv``, is its
name everywhere: in JAX, in the weights file, in the ONNX graphs.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from safetensors import safe_open

from diptych.jax_model import blocks
from diptych.jax_model.blocks import Blocks
from diptych.jax_model.config import CACHE_SCALES, CacheDtype, Config
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import Filling, Parameter, Part, Source, expand, shape_of
from diptych.jax_model.readers import Checkpoint
from diptych.jax_model.storage import Form, Quantizer, Storage, kept

__all__ = [
    "Params",
    "abstract",
    "cache_scales",
    "configure",
    "dense",
    "fill",
    "filling_of",
    "flatten",
    "load",
    "outputs_first",
    "read_safetensors",
    "stream",
    "unflatten",
    "with_cache_scales",
]

Params: TypeAlias = dict[str, Any]

_CONSTANTS = "constants."  # names in an artifact's weights file that are no parameters
_SHOWN = 4  # names that an error lists before it says how many more there are
_COMPARED = 1024  # rows of a tied matrix at a time

# What to say of stored tensors that nothing reads.
_UNREAD = {
    "*.bias": "the configuration says that there are no biases",
    "layers.*.mlp.gate": "written by an earlier version: export or convert the model again",
}


def configure(checkpoint: Checkpoint, max_context: int | None = None) -> Config:
    """The checkpoint's architecture, for at most ``max_context`` tokens (by default the model's limit).

    Raises ValueError when its configuration is incomplete, unknown or at odds.
    """
    config = checkpoint.config
    if not isinstance(config, Config):
        config = FAMILIES[checkpoint.family].configure(config)
    if max_context is not None and not config.learned_positions:  # those are a matrix with a row for each position
        config = replace(config, max_positions=min(max_context, config.max_positions))
    if config.N % config.K:
        raise ValueError(
            f"{checkpoint.path}: {config.N} query heads cannot be shared out among {config.K} key/value heads"
        )
    return config


def abstract(
    config: Config, dtype: str = "float32", storage: Storage | None = None, cache_dtype: CacheDtype = "float32"
) -> Params:
    """The tree with a ``jax.ShapeDtypeStruct`` for every leaf: what tracing needs, and no weights.

    A cache of ``cache_dtype`` int8 adds its scales, which no checkpoint has.
    """
    leaves: dict[str, Any] = {}
    for parameter in expand(FAMILIES[config.family].table, config):
        shape = parameter.shape(config)
        forms = (storage or {}).get(parameter.path)
        if forms is None:
            leaves[parameter.path] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
        else:
            leaves[parameter.path] = _abstract_blocks(parameter, config, shape, forms)
    for path in cache_scales(config, cache_dtype):
        leaves[path] = jax.ShapeDtypeStruct((config.K, config.H), jnp.float32)  # type: ignore[no-untyped-call]
    return unflatten(leaves)


def cache_scales(config: Config, cache_dtype: CacheDtype) -> list[str]:
    """The paths of the scales that a cache of this dtype has, layer by layer; floats have none."""
    return [f"layers.{i}.attn.{name}" for i in range(config.L) for name in CACHE_SCALES if cache_dtype == "int8"]


def _abstract_blocks(parameter: Parameter, config: Config, shape: tuple[int, ...], forms: tuple[Form, ...]) -> Any:
    outputs, inputs = shape if parameter.path == "embed" else shape[::-1]
    if len(forms) == 1:
        return forms[0].abstract(outputs, inputs)
    return [form.abstract(part, inputs) for part, form in zip(_widths(parameter, config), forms, strict=True)]


def _widths(parameter: Parameter, config: Config) -> list[int]:
    """How many outputs each of a packed parameter's sources has."""
    sizes = config.sizes(parameter.layer)
    return [source.shape(sizes)[-1] for source in parameter.huggingface.sources]


def load(checkpoint: Checkpoint, config: Config | None = None, storage: Storage | None = None) -> Params:
    """The whole tree as JAX arrays, float32 but for blocks. Raises what :func:`configure` and :func:`stream` raise."""
    config = config or configure(checkpoint)
    values = {path: jnp.asarray(value) for path, value, _ in stream(checkpoint, config, storage)}
    return fill(abstract(config, storage=storage), values)


def stream(
    checkpoint: Checkpoint, config: Config, storage: Storage | None = None, quantizer: Quantizer | None = None
) -> Iterator[tuple[str, NDArray[Any], list[str]]]:
    """Every leaf as (path, value in our layout, names of the tensors it came from), one parameter in memory at a time.

    Parameters in ``storage`` are the checkpoint's own blocks, or what ``quantizer`` makes of their values.  A value
    may be a transposed view; copy it some rows at a time to keep it single.  Before the first tensor is read, names
    and shapes are checked: raises ValueError unless every parameter can be filled and every tensor is used.
    """
    filled = _plan(checkpoint, config)

    def values() -> Iterator[tuple[str, NDArray[Any], list[str]]]:
        for one in filled:
            names = list(dict.fromkeys(source.name for source in one.sources))
            forms = (storage or {}).get(one.parameter.path)
            tree = one.value(checkpoint) if forms is None else one.blocks(checkpoint, forms, quantizer)
            for path, value in flatten({one.parameter.path: tree}).items():
                yield path, value, names

    return values()


def flatten(params: Params) -> dict[str, Any]:
    """``{"layers.0.attn.qkv": leaf, …}``, in the tree's own order; blocks have leaves of their own below their path."""

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict | list | Blocks):
            for key, child in _children(node):
                yield from walk(child, f"{prefix}{key}.")
        else:
            yield prefix[:-1], node

    return dict(walk(params, ""))


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Blocks):
        fields = {"packed": node.packed, "scale": node.scale, "shift": node.shift, "zero": node.zero}
        yield from ((name, value) for name, value in fields.items() if value is not None)
    else:
        yield from node.items() if isinstance(node, dict) else enumerate(node)


def fill(tree: Params, leaves: Mapping[str, Any]) -> Params:
    """``tree`` with the leaf of each path taken from ``leaves``. Raises KeyError when one is missing."""

    def walk(node: Any, prefix: str) -> Any:
        if not isinstance(node, dict | list | Blocks):
            return leaves[prefix[:-1]]
        filled = {key: walk(child, f"{prefix}{key}.") for key, child in _children(node)}
        if isinstance(node, Blocks):
            return replace(node, **filled)
        return filled if isinstance(node, dict) else list(filled.values())

    return cast(Params, walk(tree, ""))


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


def read_safetensors(path: str | Path, config: Config, storage: Storage | None = None) -> Params:
    """The parameters in an artifact's ``weights.safetensors``, as JAX arrays. Raises KeyError when one is missing.

    Without the scales of a cache, see :func:`with_cache_scales`.
    """
    tree = abstract(config, storage=storage)
    return fill(tree, _read_leaves(path, flatten(tree)))


def with_cache_scales(path: str | Path, config: Config, params: Params, cache_dtype: CacheDtype) -> Params:
    """``params``, arrays of floats, and the scales of a cache that an artifact's file holds beside its own."""
    scales = _read_leaves(path, cache_scales(config, cache_dtype))
    return unflatten({**flatten(params), **scales})


def _read_leaves(path: str | Path, names: Iterable[str]) -> dict[str, jax.Array]:
    with safe_open(path, framework="flax") as file:
        return {name: file.get_tensor(name) for name in names}


def dense(tree: Params) -> Params:
    """``tree`` with the arrays that its blocks mean in their place: the same model, faster where there is room."""

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Blocks):
            return outputs_first(path, _dequantize(node.packed, node.scale, node.shift, node.zero, bits=node.bits))
        if isinstance(node, dict):
            return {key: walk(child, f"{path}.{key}".removeprefix(".")) for key, child in node.items()}
        if not isinstance(node, list):
            return node
        children = [walk(child, path) for child in node]
        apart = any(isinstance(child, Blocks) for child in node)
        return jnp.concatenate(children, axis=-1) if apart else children

    return cast(Params, walk(tree, ""))


_dequantize = jax.jit(blocks.dequantize, static_argnames="bits")


# ------------------------------------------------------------------------------------------------------- exactly once


@dataclass(frozen=True)
class _Filled:
    """A parameter and the tensors of this checkpoint that fill it."""

    parameter: Parameter
    sources: tuple[Source, ...]
    join: str | None
    sizes: Mapping[str, int]
    shape: tuple[int, ...]  # the parameter's own

    def value(self, checkpoint: Checkpoint) -> NDArray[np.float32]:
        values = [self._piece(checkpoint, source) for source in self.sources]
        if self.join is not None:
            return arrange(np.stack(values), self.join, self.sizes)
        return values[0] if len(values) == 1 else np.concatenate(values, axis=-1)

    def blocks(
        self, checkpoint: Checkpoint, forms: tuple[Form, ...], quantizer: Quantizer | None
    ) -> Blocks | list[Blocks]:
        path = self.parameter.path
        if quantizer is None:
            parts = list(kept(checkpoint, self.sources, forms, self.sizes))
        elif len(forms) == 1:
            value = self.value(checkpoint)
            parts = [quantizer(path, outputs_first(path, value), forms[0])]
        else:
            pieces = (self._piece(checkpoint, source) for source in self.sources)
            parts = [quantizer(path, piece.T, form) for piece, form in zip(pieces, forms, strict=True)]
        return parts[0] if len(forms) == 1 else parts

    def _piece(self, checkpoint: Checkpoint, source: Source) -> NDArray[np.float32]:
        stored = checkpoint.read(source.name)
        if source.offset:
            stored += np.float32(source.offset)
        if source.part is not None:
            return _arrange_part(stored, source.layout, source.part, self.sizes)
        return arrange(stored, source.layout, self.sizes) if source.layout else stored

    def stored_shape(self, source: Source) -> tuple[int, ...]:
        """The shape that a source must have. A joined one is what remains of the join behind the axis that counts."""
        if self.join is None and not source.layout:
            return self.shape
        if self.join is None:
            return shape_of(source.layout.split("->")[0], self.sizes)
        return shape_of(self.join.split("->")[0], self.sizes)[1:]


def outputs_first(path: str, value: Any) -> Any:
    """A matrix as blocks hold it, [out, in]: the embedding's rows are the head's outputs already."""
    return value if path == "embed" else value.T


def arrange(stored: NDArray[np.float32], layout: str, sizes: Mapping[str, int]) -> NDArray[np.float32]:
    """Apply an einops layout whose letters are ``sizes``."""
    used = set(re.findall(r"\w+", layout.split("->")[0]))
    arranged: NDArray[np.float32] = rearrange(stored, layout, **{name: sizes[name] for name in used})
    return arranged


def _arrange_part(
    stored: NDArray[np.float32], layout: str, part: Part, sizes: Mapping[str, int]
) -> NDArray[np.float32]:
    """Cut a part out along its letter, and arrange it as the layout does with the whole."""
    left, right = layout.split("->")
    letters = re.findall(r"\w+", left)
    apart = arrange(stored, f"{left} -> {' '.join(letters)}", sizes)
    own = np.moveaxis(
        np.moveaxis(apart, letters.index(part.letter), 0)[part.range(sizes)], 0, letters.index(part.letter)
    )
    return arrange(own, f"{' '.join(letters)} -> {right}", {**sizes, part.letter: sizes[part.extent]})


def _plan(checkpoint: Checkpoint, config: Config) -> list[_Filled]:
    """Which tensors fill what. Raises ValueError that names what is missing, misshapen or left over."""
    embed, head = _embed_and_head(checkpoint, config)
    stand_in = {embed: head} if config.tied else {}  # a tied model may store either
    filled = [
        _fill(parameter, checkpoint, config, stand_in) for parameter in expand(FAMILIES[config.family].table, config)
    ]
    used = _uses(filled)
    if config.tied and {embed, head} <= checkpoint.tensors.keys():
        used[head] = used.get(head, 0) + np.ones(1, np.int64)
    _check_fit(checkpoint, config, filled, used, stand_in)
    if config.tied and {embed, head} <= checkpoint.tensors.keys():
        _check_same(checkpoint, embed, head)
    return filled


def _uses(filled: list[_Filled]) -> dict[str, NDArray[np.int64]]:
    """How often each tensor is used; where it is taken in parts, at each place along their letter."""
    uses: dict[str, NDArray[np.int64]] = {}
    for one in filled:
        for source in one.sources:
            taken = np.ones(1, np.int64)
            if source.part is not None:
                taken = np.zeros(one.sizes[source.part.letter], np.int64)
                taken[source.part.range(one.sizes)] = 1
            uses[source.name] = uses.get(source.name, 0) + taken
    return uses


def _fill(parameter: Parameter, checkpoint: Checkpoint, config: Config, stand_in: Mapping[str, str]) -> _Filled:
    filling = filling_of(parameter, checkpoint, config)
    if filling is None:
        raise ValueError(f"{checkpoint.path}: {parameter.path} of family {config.family!r} has no name in GGUF files")

    def found(source: Source) -> Source:
        absent = source.name not in checkpoint.tensors and stand_in.get(source.name) in checkpoint.tensors
        return replace(source, name=stand_in[source.name]) if absent else source

    sources = tuple(map(found, filling.sources))
    return _Filled(parameter, sources, filling.join, config.sizes(parameter.layer), parameter.shape(config))


def filling_of(parameter: Parameter, checkpoint: Checkpoint, config: Config) -> Filling | None:
    """Where the parameter comes from, under the names that this checkpoint uses."""
    if isinstance(checkpoint.config, Config):
        return Filling((Source(parameter.path, ""),))
    filling, prefix = parameter.filling(checkpoint.format), FAMILIES[config.family].prefix
    if filling is None or any(name.startswith(prefix) for name in checkpoint.tensors):
        return filling
    bare = (replace(source, name=source.name.removeprefix(prefix)) for source in filling.sources)
    return replace(filling, sources=tuple(bare))


def _embed_and_head(checkpoint: Checkpoint, config: Config) -> tuple[str, str]:
    """The stored names of the two matrices that a tied model has one of."""
    fillings = {one.path: filling_of(one, checkpoint, config) for one in FAMILIES[config.family].table}
    embed, head = (fillings.get(path) for path in ("embed", "head"))
    return embed.sources[0].name if embed else "", head.sources[0].name if head else ""


def _check_fit(
    checkpoint: Checkpoint,
    config: Config,
    filled: list[_Filled],
    used: Mapping[str, NDArray[np.int64]],
    stand_in: Mapping[str, str],
) -> None:
    """Raise ValueError unless every parameter finds its tensors, in the right shape, and every tensor is used once."""
    ignored = FAMILIES[config.family].ignored
    missing, misshapen = [], []
    for one in filled:
        for source in one.sources:
            if source.name not in checkpoint.tensors:
                either = f" or {stand_in[source.name]!r}" if source.name in stand_in else ""
                missing.append(f"{source.name!r}{either} (for {one.parameter.path})")
            elif (found := checkpoint.tensors[source.name].shape) != (expected := one.stored_shape(source)):
                misshapen.append(f"{source.name!r} {found}, expected {expected}")
    left = [
        name
        for name in checkpoint.tensors
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    ]
    twice = [repr(name) for name, times in used.items() if times.max() > 1]
    partly = [repr(name) for name, times in used.items() if times.min() < 1]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("tensors of the wrong shape", misshapen),
            ("tensors that no parameter uses", [repr(name) + _reason(name) for name in left]),
            ("tensors used more than once", twice),
            ("tensors of which a part is not used", partly),
        )
        if names
    ]
    if problems:
        raise ValueError(f"{checkpoint.path} does not fit the family {config.family!r}. " + "; ".join(problems))


def _listed(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _reason(name: str) -> str:
    reasons = (reason for pattern, reason in _UNREAD.items() if fnmatch.fnmatchcase(name, pattern))
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
