"""Float weights into blocks of integers: which form each parameter takes, and the integers that lose least."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model import blocks
from diptych.jax_model.blocks import Blocks
from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import Parameter, expand
from diptych.jax_model.readers import Checkpoint
from diptych.jax_model.storage import Form, Quantizer, Storage, keep, matrices

__all__ = ["RECIPES", "SCHEMES", "Quantization", "Recipe", "plan", "quantize", "store"]

_F32 = NDArray[np.float32]


# ------------------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Recipe:
    """Which form each matrix takes: that of the first pattern that its path matches, and none where none does.

    Packed projections are matched apart, as ``layers.0.attn.q`` or ``layers.0.mlp.up``.  ``search`` tries several
    ranges for each block and takes the one that loses least; without it, every block takes its own range.
    ``calibrated`` counts an error by how large the inputs are that meet it on a text: the search then needs the float
    model once.
    """

    name: str
    forms: tuple[tuple[str, Form], ...]
    search: bool = True
    calibrated: bool = True

    def form(self, path: str) -> Form | None:
        return next((form for pattern, form in self.forms if fnmatch.fnmatchcase(path, pattern)), None)

    def quantizer(self, importance: Mapping[str, _F32]) -> Quantizer:
        """What makes blocks; ``importance`` has what :func:`quantize` takes, by path, of any or no matrices."""

        def make(path: str, matrix: _F32, form: Form) -> Blocks:
            return quantize(matrix, form, search=self.search, importance=importance.get(path))

        return make


_INT4, _CENTRED4, _INT8 = Form(4, 32, zero_points=True), Form(4, 32), Form(8, 32)
_WIDE8 = Form(8, 64)

# Measured on SmolLM2 and Gemma 3 (docs/facts.md): of what 4 bits lose, the embedding that is also the head, `down` and
# `v` lose most for their size; 8 bits lose nothing that shows.  Blocks of 64 are faster to multiply with
# and lose nothing at 8 bits; at 4 bits they lose half as much again (SmolLM2) or twice as much (Gemma 3).
RECIPES = {
    "int4": Recipe(
        "4 bits with zero points, errors weighted by inputs; embedding, head, down and v at 8 bits",
        (("embed", _WIDE8), ("head", _WIDE8), ("*.down", _WIDE8), ("*.v", _WIDE8), ("*", _INT4)),
    ),
    "int8": Recipe("8 bits", (("*", _INT8),), search=False, calibrated=False),
    "int4-body": Recipe(
        "4 bits with zero points, errors weighted by inputs; embedding and head at 8 bits",
        (("embed", _WIDE8), ("head", _WIDE8), ("*", _INT4)),
    ),
    "int4-nearest": Recipe(
        "4 bits, centred, rounded to the nearest", (("*", _CENTRED4),), search=False, calibrated=False
    ),
}

SCHEMES = ("keep", *RECIPES, "none")

# Packed projections of several forms all take the widest when that costs fewer bytes than a decode step reads in the
# time of the products that it saves: some 10 µs each, at 25 GB/s.
_WORTH_A_NODE = 1 << 18


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's parameters are stored. ``recipe`` is None where they are its own blocks, or floats."""

    scheme: str
    storage: Storage
    recipe: Recipe | None = None


def plan(checkpoint: Checkpoint, config: Config, scheme: str | Recipe | None) -> Quantization:
    """``None`` keeps the blocks that the checkpoint has, and is ``"none"`` where it has none.

    Raises ValueError for an unknown scheme, and for ``"keep"`` where there is nothing to keep.
    """
    if isinstance(scheme, Recipe):
        return Quantization("recipe", store(scheme, config), scheme)
    if scheme not in (None, *SCHEMES):
        raise ValueError(f"unknown quantisation {scheme!r}; known: {', '.join(SCHEMES)}")
    if scheme in RECIPES:
        return Quantization(scheme, store(RECIPES[scheme], config), RECIPES[scheme])
    own = {} if scheme == "none" or checkpoint.format != "gguf" else keep(checkpoint, config)
    if own:
        return Quantization("keep", own)
    if scheme == "keep":
        raise ValueError(
            f"{checkpoint.path}: there are no blocks of integers to keep; quantise with int4 or int8, or use none"
        )
    return Quantization("none", {})


def store(recipe: Recipe, config: Config) -> Storage:
    """The form of every parameter. What has none, or no operation on blocks, stays float."""
    storage = {}
    for parameter in expand(FAMILIES[config.family].table, config):
        forms = _forms(recipe, parameter, config)
        if forms:
            storage[parameter.path] = forms
    return storage


def _forms(recipe: Recipe, parameter: Parameter, config: Config) -> tuple[Form, ...]:
    names, shape, filling = matrices(parameter.path), parameter.shape(config), parameter.huggingface
    inputs = shape[-1] if parameter.path == "embed" else shape[0]
    if len(filling.sources) != len(names) or filling.join is not None:
        names = names[-1:]  # one tensor: as the last of its parts, of which none is more sensitive
    forms = [fit(recipe.form(name), inputs) for name in names]
    found = [form for form in forms if form is not None]
    if len(found) < len(forms):
        return ()
    if len(set(found)) < 2:
        return tuple(found[:1])
    sizes = config.sizes(parameter.layer)
    widths = [source.shape(sizes)[-1] for source in filling.sources]
    widest = max(found, key=lambda form: form.bits)
    more = sum(inputs * width * (widest.bits - form.bits) // 8 for width, form in zip(widths, found, strict=True))
    return (widest,) if more <= _WORTH_A_NODE * (len(found) - 1) else tuple(found)


def fit(form: Form | None, inputs: int) -> Form | None:
    """The form with the largest block, from 16 up, that divides a row; None where none does."""
    if form is None:
        return None
    block = math.gcd(form.block, inputs)
    return None if block < 16 else Form(form.bits, block, form.shifted, form.zero_points)


# --------------------------------------------------------------------------------------------------------- arithmetic

# How much of a block's range the integers span: cutting off its ends makes all other values finer.
_SHRINKS = (1.0, 1.05, 0.95, 0.9, 0.85, 0.8)
_AT_A_TIME = 1 << 16  # values: what a core's cache holds, with what is computed from them


def quantize(matrix: _F32, form: Form, *, search: bool, importance: _F32 | None = None) -> Blocks:
    """Blocks that come close to a matrix [out, in], as NumPy arrays; in memory once more only some rows at a time.

    ``importance`` [in] says how much an error counts at each input: the mean square of what comes in there makes the
    error of the product smallest, as far as inputs are independent.  Without it all count the same.  Raises ValueError
    when a value is not finite.
    """
    outputs, inputs = matrix.shape
    per_row = inputs // form.block
    packed = np.empty((outputs, per_row, form.block * form.bits // 8), np.uint8)
    scale = np.empty((outputs, per_row), np.float32)
    zero = np.empty((outputs, -(-per_row * form.bits // 8)), np.uint8) if form.zero_points else None
    weights = np.ones(inputs, np.float32) if importance is None else importance

    def fit_rows(rows: slice) -> None:
        values = _columns(matrix[rows], form.block)
        if not np.isfinite(values).all():
            raise ValueError("a weight is not finite, and no block of integers can hold it")
        each = np.tile(_columns(weights, form.block), values.shape[1] // per_row)
        fitted = _search(values, form, each) if search else _range(values, form, 1.0)
        scale[rows] = fitted.scale.reshape(-1, per_row)
        packed[rows] = blocks.pack(fitted.q.astype(np.uint8).T.reshape(-1, inputs), form.bits, form.block)
        if zero is not None:
            zero[rows] = _pack_points(fitted.zero.reshape(-1, per_row), form.bits)

    with ThreadPoolExecutor() as pool:  # NumPy lets other threads run while it computes
        for _ in pool.map(fit_rows, _pieces(outputs, inputs)):
            pass
    return Blocks(packed, scale, None, form.bits, form.block, zero)


def _pieces(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, _AT_A_TIME // inputs)
    return (slice(start, start + step) for start in range(0, outputs, step))


def _columns(rows: _F32, block: int) -> _F32:
    """A block in each column, [block, n]: sums over blocks are then sums of long rows, several times faster."""
    return np.ascontiguousarray(rows.reshape(-1, block).T)


def _pack_points(points: _F32, bits: int) -> NDArray[np.uint8]:
    """Zero points [out, blocks] into bytes; a row that ends inside a byte is filled up."""
    width = -points.shape[1] % (8 // bits)
    padded = np.pad(points.astype(np.uint8), ((0, 0), (0, width)))
    return blocks.pack(padded, bits, padded.shape[1])[:, 0]


@dataclass(frozen=True)
class _Fitted:
    """Integers [block, n], scales and zero points [n]; all hold floats."""

    q: _F32
    scale: _F32
    zero: _F32

    def error(self, values: _F32, weights: _F32) -> _F32:
        """Squared, of each block, [n]."""
        difference = self.scale * (self.q - self.zero) - values
        squares: _F32 = (difference * difference * weights).sum(0)
        return squares


def _range(values: _F32, form: Form, shrink: float) -> _Fitted:
    """Round to the nearest, where the integers span the block's range times ``shrink``."""
    levels = np.float32((1 << form.bits) - 1)
    low, high = values.min(0), values.max(0)
    if form.zero_points:
        low, high = np.minimum(low, 0) * np.float32(shrink), np.maximum(high, 0) * np.float32(shrink)
        scale = _not_zero((high - low) / levels)
        zero = np.clip(np.rint(-low / scale), 0, levels)
    else:  # there is one integer more below the middle than above: it goes to the side of the largest value
        largest = np.where(-low > high, low, high)
        scale = _not_zero(largest * np.float32(-shrink / (1 << (form.bits - 1))))
        zero = np.full_like(scale, 1 << (form.bits - 1))
    return _Fitted(np.clip(np.rint(values / scale) + zero, 0, levels), scale, zero)


def _not_zero(scale: _F32) -> _F32:
    """A block of zeros, or of numbers that round to it, has any scale."""
    safe: _F32 = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)
    return safe


def _search(values: _F32, form: Form, weights: _F32) -> _Fitted:
    """The best of several ranges, each with the scale that suits its integers best (least squares)."""
    candidates = (_rescale(values, _range(values, form, shrink), weights) for shrink in _SHRINKS)
    best = next(candidates)
    least = best.error(values, weights)
    for tried in candidates:
        error = tried.error(values, weights)
        better = error < least
        least = np.where(better, error, least)
        best = _Fitted(*(np.where(better, new, old) for new, old in zip(_arrays(tried), _arrays(best), strict=True)))
    return best


def _arrays(fitted: _Fitted) -> tuple[_F32, _F32, _F32]:
    return fitted.q, fitted.scale, fitted.zero


def _rescale(values: _F32, fitted: _Fitted, weights: _F32) -> _Fitted:
    centred = fitted.q - fitted.zero
    weighted = centred * weights
    own, along = (weighted * centred).sum(0), (weighted * values).sum(0)
    scale = np.where(own > 0, along / np.where(own > 0, own, 1), fitted.scale)
    return _Fitted(fitted.q, _not_zero(scale.astype(np.float32)), fitted.zero)
