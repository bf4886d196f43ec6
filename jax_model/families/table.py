"""The rows of a family's table: for each parameter its path in our tree and the checkpoint tensors that fill it.

Layouts are einops patterns from the stored tensor to ours.  Their lower-case letters are the sizes of :class:`Config`
(``n`` query heads, ``k`` key/value heads, ``h`` head size, ``d`` width, ``f`` feed-forward width, ``v`` vocabulary),
so a pattern also states the shape, and reads backwards for a round trip.  Projections are stored input-first, ``[D,
out]``: a layer applies them as ``x @ w``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diptych.jax_model.config import Config

__all__ = ["Parameter", "Source", "expand", "pack", "row", "source_shape", "target_shape"]


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint, under its Hugging Face and its GGUF name."""

    hf: str
    gguf: str
    layout: str
    gguf_layout: str  # differs where GGUF permutes rows
    hf_offset: float  # added to the stored values; GGUF files carry final values


@dataclass(frozen=True)
class Parameter:
    """One leaf of our tree; several sources are joined along the last axis."""

    path: str
    sources: tuple[Source, ...]
    when: Callable[[Config], bool]

    def shape(self, config: Config) -> tuple[int, ...]:
        """The leaf's shape: the right-hand sides of the layouts, in the sizes of ``config``."""
        shapes = [target_shape(source.layout, config.sizes()) for source in self.sources]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))


def _always(config: Config) -> bool:
    return True


def row(
    path: str,
    hf: str,
    gguf: str,
    layout: str,
    *,
    gguf_layout: str | None = None,
    hf_offset: float = 0.0,
    when: Callable[[Config], bool] = _always,
) -> Parameter:
    """A parameter that one tensor fills. ``{i}`` in the three names stands for the layer's index."""
    return Parameter(path, (Source(hf, gguf, layout, gguf_layout or layout, hf_offset),), when)


def pack(path: str, *rows: Parameter) -> Parameter:
    """One parameter out of several, joined along the last axis; each row names its tensor and layout."""
    return Parameter(path, tuple(source for part in rows for source in part.sources), rows[0].when)


def expand(table: tuple[Parameter, ...], config: Config) -> Iterator[Parameter]:
    """Every parameter of the model, in a fixed order: the table's, with the rows of a layer repeated layer by layer."""
    present = [parameter for parameter in table if parameter.when(config)]
    for per_layer, group in itertools.groupby(present, key=lambda parameter: "{i}" in parameter.path):
        rows = list(group)
        if per_layer:
            yield from (_at_layer(row, i) for i in range(config.L) for row in rows)
        else:
            yield from rows


def _at_layer(parameter: Parameter, i: int) -> Parameter:
    def at(name: str) -> str:
        return name.replace("{i}", str(i))

    sources = tuple(
        Source(at(source.hf), at(source.gguf), source.layout, source.gguf_layout, source.hf_offset)
        for source in parameter.sources
    )
    return Parameter(at(parameter.path), sources, parameter.when)


def source_shape(layout: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape that an einops layout's left-hand side describes: ``"(n h) d -> d (n h)"`` gives ``(N * H, D)``."""
    return _shape(layout.split("->")[0], sizes)


def target_shape(layout: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape that an einops layout's right-hand side describes: ``"(n h) d -> d (n h)"`` gives ``(D, N * H)``."""
    return _shape(layout.split("->")[1], sizes)


def _shape(side: str, sizes: dict[str, int]) -> tuple[int, ...]:
    axes = re.findall(r"\(([^)]*)\)|(\w+)", side)
    return tuple(math.prod(sizes[letter] for letter in (group or single).split()) for group, single in axes)
