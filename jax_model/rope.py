"""Rotary position embedding: its kinds as data, and their frequencies in the arithmetic of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Linear", "Llama3", "LongRope", "Rope", "Scaling", "Yarn", "frequencies"]

_F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """Positions divided by ``factor`` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by ``factor``, high ones kept, those between interpolated (Llama 3.1's model card).

    A frequency is low when its wavelength exceeds ``original / low_freq_factor``, high when it is below ``original /
    high_freq_factor``; ``original`` is the length that the model was first trained for.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True)
class Yarn:
    """Interpolation that depends on how often a pair turns within ``original`` (Peng et al. 2023, arXiv:2309.00071).

    ``magnitude`` multiplies cosine and sine; the paper's value is ``0.1 ln(factor) + 1``.
    """

    factor: float
    original: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """A divisor for each pair, one list up to ``original`` positions and one beyond (Ding et al. 2024,
    arXiv:2402.13753).

    A sequence cannot change its list on the way, since the keys in its cache are turned already: the configuration's
    ``max_positions`` decides which is used, for all lengths.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    magnitude: float


Scaling: TypeAlias = Linear | Llama3 | Yarn | LongRope
_SCALINGS: dict[str, Any] = {kind.__name__: kind for kind in (Linear, Llama3, Yarn, LongRope)}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of the first ``width`` elements of each head.

    Position p turns pair i by the angle ``p * base ** (-2 i / width)``, before scaling.  Pair i is (i, i + width/2), or
    (2 i, 2 i + 1) where ``interleaved``.
    """

    base: float
    width: int
    scaling: Scaling | None = None
    interleaved: bool = False

    def to_json(self) -> dict[str, Any]:
        scaling = None if self.scaling is None else {"kind": type(self.scaling).__name__, **vars(self.scaling)}
        return {"base": self.base, "width": self.width, "scaling": scaling, "interleaved": self.interleaved}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rope:
        """Inverse of :meth:`to_json`. Raises KeyError on an unknown kind of scaling, TypeError on unknown fields."""
        scaling = data["scaling"]
        if scaling is not None:
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in scaling.items()}
            scaling = _SCALINGS[str(fields.pop("kind"))](**fields)
        return cls(data["base"], data["width"], scaling, data["interleaved"])


def frequencies(rope: Rope, max_positions: int) -> tuple[_F32, float]:
    """Angle per position of each pair, float32 [width/2], and the magnitude that multiplies cosine and sine."""
    exponent = np.arange(0, rope.width, 2).astype(np.float32) / np.float32(rope.width)
    period = np.float32(rope.base) ** exponent
    plain = (np.float32(1.0) / period).astype(np.float32)
    match rope.scaling:
        case None:
            return plain, 1.0
        case Linear(factor):
            return plain / np.float32(factor), 1.0
        case Llama3():
            return _llama3(plain, rope.scaling), 1.0
        case Yarn():
            return _yarn(period, rope, rope.scaling), rope.scaling.magnitude
        case LongRope(short, long, original, magnitude):
            divisors = np.array(long if max_positions > original else short, np.float32)
            return (np.float32(1.0) / (divisors * period)).astype(np.float32), magnitude


def _llama3(plain: _F32, scaling: Llama3) -> _F32:
    wavelength = 2 * math.pi / plain
    low, high = scaling.original / scaling.low_freq_factor, scaling.original / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original / wavelength - scaling.low_freq_factor) / span
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = np.where(wavelength > low, plain / scaling.factor, np.where(wavelength < high, plain, between))
    return scaled.astype(np.float32)


def _yarn(period: _F32, rope: Rope, scaling: Yarn) -> _F32:
    def pair(turns: float) -> float:
        """The pair that turns so often within the original length; pairs are counted as if all real."""
        return rope.width * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    ramp = np.clip((np.arange(rope.width // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    kept = (1 - ramp).astype(np.float32)
    inv_freq: _F32 = (1 / (scaling.factor * period) * (1 - kept) + 1 / period * kept).astype(np.float32)
    return inv_freq
