"""Trees of parameters that other JAX programs save, as tables: what each leaf is in Hugging Face's names and layout.

Facts about MaxText are from its conversion tables (github.com/AI-Hypercomputer/maxtext, ``checkpoint_conversion``),
those about Gemma from the modules of github.com/google-deepmind/gemma (``gemma/gm/nn``).

MaxText stacks layers along axis 1: all of them, or, for Gemma 3, all first, second, … ones of blocks of layers, and
keeps what remains behind the last whole block one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diptych.jax_model.families import Foreign

__all__ = ["EMBEDDINGS", "EYES", "Piece", "Published", "pieces", "published"]

Published: TypeAlias = Literal["maxtext", "gemma"]
Factor: TypeAlias = Literal["head", "width"]

EMBEDDINGS: dict[Published, str] = {"maxtext": "token_embedder.embedding", "gemma": "embedder.input_embedding"}
EYES = (
    "vision_encoder.",
    "SigLiPFromPatches_0.",
    "embedder.mm_",
)  # what the leaves of a model's other parts begin with

_LAYER = "model.layers.{i}."


@dataclass(frozen=True)
class Piece:
    """A tensor by Hugging Face's rules: ``leaf[index]``, rearranged by the einops ``layout``, times ``factor``, plus
    ``offset``."""

    leaf: str
    index: tuple[int | slice, ...]
    layout: str
    shape: tuple[int, ...]
    factor: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class _Row:
    """A leaf, the tensor it is or, with ``at``, its part at an index of the first axis; ``factor`` is a square root."""

    leaf: str
    tensor: str
    layout: str
    at: int | None = None
    factor: Factor | None = None
    inverse: bool = False  # divide by the factor
    offset: float = 0.0


def published(leaves: Mapping[str, tuple[int, ...]]) -> Published | None:
    """Whose tree this is, by the name of its embedding."""
    return next((layout for layout, name in EMBEDDINGS.items() if name in leaves), None)


def pieces(layout: Published, leaves: Mapping[str, tuple[int, ...]], config: Foreign, family: str) -> dict[str, Piece]:
    """Every tensor by its Hugging Face name; a leaf that no table knows stays what it is, under its own name.

    Raises ValueError when there is no table for the family, or a leaf has not as many axes as its table says.
    """
    tables = _MAXTEXT if layout == "maxtext" else _GEMMA
    if family not in tables:
        raise ValueError(
            f"{config.origin}: a tree of {layout} for the family {family!r} is not supported; supported: "
            + ", ".join(sorted(tables))
        )
    found: dict[str, Piece] = {}
    for leaf, shape in leaves.items():
        placed = list(_maxtext(leaf, shape, leaves) if layout == "maxtext" else _gemma(leaf))
        rows = [(row, i, index) for part, i, index in placed for row in _rows(tables[family], part, shape, config)]
        if not rows:
            found[leaf] = Piece(leaf, (), "", shape)
        for row, i, index in rows:
            name = row.tensor.format(i=i)
            if name in found:
                raise ValueError(f"{config.origin}: both {found[name].leaf!r} and {leaf!r} are {name!r}")
            found[name] = _piece(row, leaf, shape, index, config)
    return found


def _rows(table: tuple[_Row, ...], part: str, shape: tuple[int, ...], config: Foreign) -> Iterator[_Row]:
    for row in table:
        if row.leaf == part:
            yield row
    if part == "mlp.gating_einsum":  # [2, D, F] or [2, F, D]: Gemma has stored both
        layout = "f d -> f d" if shape[-1:] == (config.size("hidden_size"),) else "d f -> f d"
        yield _Row(part, f"{_LAYER}mlp.gate_proj.weight", layout, at=0)
        yield _Row(part, f"{_LAYER}mlp.up_proj.weight", layout, at=1)


def _piece(row: _Row, leaf: str, shape: tuple[int, ...], index: tuple[int | slice, ...], config: Foreign) -> Piece:
    if row.at is not None:
        index = (row.at, *index)
    rest = tuple(size for axis, size in enumerate(shape) if index[axis : axis + 1] in ((), (slice(None),)))
    layout = row.layout
    if "(j two)" in layout and not _interleaved(config):
        layout = layout.replace("(j two)", "h").replace("two j", "h")
    sides = layout.split("->")
    axes = re.findall(r"\([^)]*\)|\w+", sides[0])
    if len(axes) != len(rest):
        raise ValueError(f"{config.origin}: leaf {leaf!r} {shape} should have axes {sides[0].strip()}, layers apart")
    sizes = {"two": 2}
    for axis, size in zip(axes, rest, strict=True):
        sizes |= {"j": size // 2} if axis.startswith("(") else {axis: size}
    ours = (group or one for group, one in re.findall(r"\(([^)]*)\)|(\w+)", sides[1]))
    factor = 1.0
    if row.factor is not None:
        N, D = config.size("num_attention_heads"), config.size("hidden_size")
        factor = math.sqrt(D if row.factor == "width" else config.size("head_dim", D // N))
        factor = 1 / factor if row.inverse else factor
    arranged = tuple(math.prod(sizes[letter] for letter in group.split()) for group in ours)
    return Piece(leaf, index, layout, arranged, factor, row.offset)


def _interleaved(config: Foreign) -> bool:
    """Whether MaxText's rope turns neighbours: it does where it follows Llama 3.1."""
    rope = config.find("rope_parameters", dict) or {}
    return rope.get("rope_type") == "llama3"


# ------------------------------------------------------------------------------------------------------------- MaxText

_Places: TypeAlias = Iterator[tuple[str, int, tuple[int | slice, ...]]]
_STACKED = re.compile(r"decoder\.layers\.(?!layers_\d+\.)(.+)")
_BLOCK = re.compile(r"decoder\.layers\.layers_(\d+)\.(.+)")
_SINGLE = re.compile(r"decoder\.layers_(\d+)\.(.+)")
_REMAINDER = re.compile(r"decoder\.layers_remainder\.layers_(\d+)\.(.+)")


def _maxtext(leaf: str, shape: tuple[int, ...], leaves: Mapping[str, tuple[int, ...]]) -> _Places:
    """For each layer that a leaf holds: the leaf's name within a layer, the layer's index, its place in the leaf."""
    stacked = shape[1] if len(shape) > 1 else 0
    if found := _STACKED.fullmatch(leaf):
        yield from ((found[1], i, (slice(None), i)) for i in range(stacked))
    elif found := _BLOCK.fullmatch(leaf):
        block, _ = _blocks(leaves)
        yield from ((found[2], n * block + int(found[1]), (slice(None), n)) for n in range(stacked))
    elif found := _REMAINDER.fullmatch(leaf):
        block, count = _blocks(leaves)
        yield found[2], block * count + int(found[1]), ()
    elif found := _SINGLE.fullmatch(leaf):
        yield found[2], int(found[1]), ()
    else:
        yield leaf, 0, ()


def _blocks(leaves: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """How many layers a block has, and how many blocks there are."""
    found = {int(match[1]): leaves[leaf] for leaf in leaves if (match := _BLOCK.fullmatch(leaf))}
    shape = next(iter(found.values()), ())
    return len(found), shape[1] if len(shape) > 1 else 0


def _maxtext_layer(*, turned: bool, offset: float, norms: Mapping[str, str]) -> tuple[_Row, ...]:
    """A layer's rows. Llama's queries are stored divided by the root of the head size; rope may turn neighbours."""
    attn, mlp = f"{_LAYER}self_attn", f"{_LAYER}mlp"
    head = "(j two)" if turned else "h"
    heads = "two j" if turned else "h"
    return (
        _Row("self_attention.query.kernel", f"{attn}.q_proj.weight", f"d n {head} -> (n {heads}) d",
             factor="head" if turned else None),
        _Row("self_attention.key.kernel", f"{attn}.k_proj.weight", f"d n {head} -> (n {heads}) d"),
        _Row("self_attention.value.kernel", f"{attn}.v_proj.weight", "d n h -> (n h) d"),
        _Row("self_attention.out.kernel", f"{attn}.o_proj.weight", "n h d -> d (n h)"),
        _Row("mlp.wi_0.kernel", f"{mlp}.gate_proj.weight", "d f -> f d"),
        _Row("mlp.wi_1.kernel", f"{mlp}.up_proj.weight", "d f -> f d"),
        _Row("mlp.wo.kernel", f"{mlp}.down_proj.weight", "f d -> d f"),
        *(_Row(f"{leaf}.scale", f"{_LAYER}{name}.weight", "d -> d", offset=offset) for leaf, name in norms.items()),
    )  # fmt: skip


_MAXTEXT: dict[str, tuple[_Row, ...]] = {
    "llama": (
        _Row("token_embedder.embedding", "model.embed_tokens.weight", "v d -> v d"),
        _Row("decoder.decoder_norm.scale", "model.norm.weight", "d -> d"),
        _Row("decoder.logits_dense.kernel", "lm_head.weight", "d v -> v d"),
        *_maxtext_layer(
            turned=True,
            offset=0.0,
            norms={
                "pre_self_attention_layer_norm": "input_layernorm",
                "post_self_attention_layer_norm": "post_attention_layernorm",
            },
        ),
    ),
    "gemma3_text": (
        _Row("token_embedder.embedding", "model.embed_tokens.weight", "v d -> v d", factor="width", inverse=True),
        _Row("decoder.decoder_norm.scale", "model.norm.weight", "d -> d", offset=-1.0),
        *_maxtext_layer(
            turned=False,
            offset=-1.0,
            norms={
                "pre_self_attention_norm": "input_layernorm",
                "post_self_attention_norm": "post_attention_layernorm",
                "pre_ffw_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
                "self_attention.query_norm": "self_attn.q_norm",
                "self_attention.key_norm": "self_attn.k_norm",
            },
        ),
    ),
}

# --------------------------------------------------------------------------------------------------------------- Gemma

_NUMBERED = re.compile(r"layer_(\d+)\.(.+)")


def _gemma(leaf: str) -> _Places:
    found = _NUMBERED.fullmatch(leaf)
    name, i = (found[2], int(found[1])) if found else (leaf, 0)
    yield (name.removesuffix(".w") if name.startswith("mlp.") else name), i, ()


def _gemma_table(norms: Mapping[str, str]) -> tuple[_Row, ...]:
    attn = f"{_LAYER}self_attn"
    heads = "n d h -> (n h) d"
    return (
        _Row("embedder.input_embedding", "model.embed_tokens.weight", "v d -> v d"),
        _Row("final_norm.scale", "model.norm.weight", "d -> d"),
        _Row("attn.q_einsum.w", f"{attn}.q_proj.weight", heads),
        _Row("attn.kv_einsum.w", f"{attn}.k_proj.weight", heads, at=0),
        _Row("attn.kv_einsum.w", f"{attn}.v_proj.weight", heads, at=1),
        *(_Row("attn.qkv_einsum.w", f"{attn}.{name}_proj.weight", heads, at=at) for at, name in enumerate("qkv")),
        _Row("attn.attn_vec_einsum.w", f"{attn}.o_proj.weight", "n h d -> d (n h)"),
        _Row("mlp.linear", f"{_LAYER}mlp.down_proj.weight", "f d -> d f"),
        *(_Row(f"{leaf}.scale", f"{_LAYER}{name}.weight", "d -> d") for leaf, name in norms.items()),
    )


_BEFORE = {"pre_attention_norm": "input_layernorm"}
_AROUND = _BEFORE | {
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEADS = {"attn._query_norm": "self_attn.q_norm", "attn._key_norm": "self_attn.k_norm"}
_GEMMA = {
    "gemma": _gemma_table(_BEFORE | {"pre_ffw_norm": "post_attention_layernorm"}),
    "gemma2": _gemma_table(_AROUND),
    "gemma3_text": _gemma_table(_AROUND | _HEADS),
}
