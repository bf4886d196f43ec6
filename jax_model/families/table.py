"""The rows of a family's table: for each parameter its path in our tree and the checkpoint tensors that fill it.

Layouts are einops patterns from the stored tensor to ours.  Their letters are sizes of the configuration: ``n`` query
heads, ``k`` key/value heads, ``g`` = ``n / k`` query heads that share one, ``h`` head size, ``d`` width, ``f``
feed-forward width, ``v`` vocabulary, ``p`` positions, ``o`` = ``(n + 2 k) h`` the packed projections, ``group`` =
``g + 2`` a key/value head's part of them, ``e`` experts, ``m`` an expert's width, ``s`` the shared experts' width,
``j`` = ``h / 2`` pairs of a head, ``one``, ``two`` and ``three``.  So a pattern also states the shape, and reads
backwards for a round trip.  Projections are stored input-first, ``[D, out]``: a layer applies them as ``x @ w``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from diptych.jax_model.config import Config, Layer

__all__ = [
    "Filling",
    "Format",
    "Parameter",
    "Part",
    "Source",
    "When",
    "always",
    "bias",
    "expand",
    "join",
    "pack",
    "row",
    "shape_of",
]

Format: TypeAlias = Literal["huggingface", "gguf", "orbax", "artifact"]
When: TypeAlias = Callable[[Config, Layer | None], bool]


@dataclass(frozen=True)
class Part:
    """A range along one letter of a stored tensor: as long as the letter ``extent`` says, behind all of ``before``."""

    letter: str
    extent: str
    before: tuple[str, ...] = ()

    def range(self, sizes: Mapping[str, int]) -> slice:
        """Where the part lies along its letter."""
        start = sum(sizes[letter] for letter in self.before)
        return slice(start, start + sizes[self.extent])


@dataclass(frozen=True)
class Source:
    """One stored tensor, or a part of one: its name, its layout, what is added to its values.

    The layout is the whole tensor's on its left side; on the right, the part's letter has the part's extent.
    """

    name: str
    layout: str
    offset: float = 0.0
    part: Part | None = None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in our layout."""
        own = {} if self.part is None else {self.part.letter: sizes[self.part.extent]}
        return shape_of(self.layout.split("->")[1], {**sizes, **own})


@dataclass(frozen=True)
class Filling:
    """The tensors that fill a parameter: joined along the last axis, or stacked and arranged by the layout ``join``."""

    sources: tuple[Source, ...]
    join: str | None = None


@dataclass(frozen=True)
class Parameter:
    """One leaf of our tree. ``layer`` is known once the table is expanded; ``gguf`` is None where GGUF has no name."""

    path: str
    huggingface: Filling
    gguf: Filling | None
    when: When
    layer: Layer | None = None

    def filling(self, format: Format) -> Filling | None:
        """Where the parameter comes from in a checkpoint of a format."""
        return self.gguf if format == "gguf" else self.huggingface

    def shape(self, config: Config) -> tuple[int, ...]:
        """The leaf's shape: the right-hand sides of the layouts, in the sizes of ``config``."""
        sizes = config.sizes(self.layer)
        if self.huggingface.join is not None:
            return shape_of(self.huggingface.join.split("->")[1], sizes)
        shapes = [source.shape(sizes) for source in self.huggingface.sources]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def always(config: Config, layer: Layer | None) -> bool:
    return True


def row(
    path: str,
    hf: str,
    gguf: str | None,
    layout: str,
    *,
    gguf_layout: str | None = None,
    hf_offset: float = 0.0,
    when: When = always,
) -> Parameter:
    """A parameter that one tensor fills. ``{i}`` in the three names stands for the layer's index.

    ``gguf_layout`` differs where GGUF permutes rows; ``hf_offset`` is added to Hugging Face's values, where GGUF files
    carry the sum.
    """
    stored = None if gguf is None else Filling((Source(gguf, gguf_layout or layout),))
    return Parameter(path, Filling((Source(hf, layout, hf_offset),)), stored, when)


def pack(path: str, *rows: Parameter) -> Parameter:
    """One parameter out of several, joined along the last axis; each row names its tensor and layout."""
    gguf = [part.gguf.sources for part in rows if part.gguf is not None]
    return Parameter(
        path,
        Filling(tuple(source for part in rows for source in part.huggingface.sources)),
        Filling(tuple(itertools.chain(*gguf))) if len(gguf) == len(rows) else None,
        rows[0].when,
    )


def bias(weight: Parameter, *, when: When = always) -> Parameter:
    """The bias that belongs to a row of a projection or a norm: named as its weight, in the order of its outputs."""

    def beside(filling: Filling) -> Filling:
        return Filling(
            tuple(Source(_bias_name(one.name), _outputs(one.layout), part=one.part) for one in filling.sources)
        )

    stored = None if weight.gguf is None else beside(weight.gguf)
    return Parameter(f"{weight.path}_bias", beside(weight.huggingface), stored, when)


def _bias_name(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.bias"


def _outputs(layout: str) -> str:
    """``"(n j two) d -> d (n two j)"`` gives ``"(n j two) -> (n two j)"``."""
    stored, ours = (re.findall(r"\([^)]*\)|\w+", side) for side in layout.split("->"))
    letters = sorted(re.findall(r"\w+", ours[-1]))
    outputs = next(axis for axis in stored if sorted(re.findall(r"\w+", axis)) == letters)
    return f"{outputs} -> {ours[-1]}"


def join(
    path: str, hf: tuple[str, ...], hf_join: str, gguf: tuple[str, ...] | None, gguf_join: str, *, when: When
) -> Parameter:
    """One parameter out of a stack of equally shaped tensors.

    ``{e}`` in a name stands for every expert's index, ``{n}`` for every query head's, ``{k}`` for every key head's: all
    names for the first one come first, then all for the second.  The joins are layouts of the stack, whose first axis
    counts the tensors.
    """
    stored = None if gguf is None else Filling(tuple(Source(name, "") for name in gguf), gguf_join)
    return Parameter(path, Filling(tuple(Source(name, "") for name in hf), hf_join), stored, when)


def expand(table: tuple[Parameter, ...], config: Config) -> Iterator[Parameter]:
    """Every parameter of the model, in a fixed order: the table's, with the rows of a layer repeated layer by layer."""
    for per_layer, group in itertools.groupby(table, key=lambda parameter: "{i}" in parameter.path):
        rows = list(group)
        if per_layer:
            for i, layer in enumerate(config.layers):
                yield from (_at(row, config, i) for row in rows if row.when(config, layer))
        else:
            yield from (row for row in rows if row.when(config, None))


def _at(parameter: Parameter, config: Config, i: int) -> Parameter:
    """The row of one layer, with its sources named."""
    sizes = config.sizes(config.layers[i])

    def named(filling: Filling) -> Filling:
        return Filling(tuple(_numbered(filling.sources, i, sizes)), filling.join)

    return replace(
        parameter,
        path=parameter.path.replace("{i}", str(i)),
        huggingface=named(parameter.huggingface),
        gguf=None if parameter.gguf is None else named(parameter.gguf),
        layer=config.layers[i],
    )


def _numbered(sources: tuple[Source, ...], i: int, sizes: Mapping[str, int]) -> Iterator[Source]:
    counted = [letter for letter in "enk" if any(f"{{{letter}}}" in source.name for source in sources)]
    ranges = [range(sizes[letter]) for letter in counted]
    for numbers in itertools.product(*ranges):
        names = dict(zip(counted, map(str, numbers), strict=True))
        for source in sources:
            yield replace(source, name=source.name.format(i=i, **names))


def shape_of(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that one side of an einops layout describes: ``"d (n h)"`` gives ``(D, N * H)``."""
    axes = re.findall(r"\(([^)]*)\)|(\w+)", side)
    return tuple(math.prod(sizes[letter] for letter in (group or single).split()) for group, single in axes)
