"""From logits to a token: pure functions on NumPy arrays.

The order is the one that Hugging Face uses: repetition penalty, temperature, top-k, top-p, min-p.  Arithmetic is
float64, so that 262144 small probabilities still sum to one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating[Any]]
Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. The default is greedy: temperature 0 takes the largest logit, of equal ones the lowest id.

    ``top_k`` keeps the k most likely tokens (None or 0: all).  ``top_p`` keeps the fewest most likely tokens whose
    probabilities reach p (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751).  ``min_p`` drops tokens less
    likely than min_p times the likeliest (Nguyen et al. 2024, arXiv:2407.01082).  ``repetition_penalty`` divides the
    positive and multiplies the negative logits of tokens already there (Keskar et al. 2019, arXiv:1909.05858).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(_number(self.temperature) and self.temperature >= 0, "temperature", "a number of at least 0", self)
        _require(self.top_k is None or _integer(self.top_k), "top_k", "an integer of at least 0 (0: all tokens)", self)
        _require(self.top_p is None or _fraction(self.top_p), "top_p", "a number above 0 and up to 1", self)
        _require(self.min_p is None or self.min_p == 0 or _fraction(self.min_p), "min_p", "a number from 0 to 1", self)
        positive = _number(self.repetition_penalty) and self.repetition_penalty > 0
        _require(positive, "repetition_penalty", "a number above 0 (1: none)", self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def sample(logits: Logits, sampling: Sampling, rng: np.random.Generator, seen: Collection[int] = ()) -> int:
    """Choose a token from logits [V]; ``seen`` are the tokens that the repetition penalty is about.

    Draws one number from ``rng`` for each token that is not greedy.
    """
    logits = penalise(logits, sampling.repetition_penalty, seen)
    if sampling.greedy:
        return int(logits.argmax())
    tokens, probabilities = distribution(logits, sampling)
    return int(tokens[_draw(probabilities, rng.random())])


def penalise(logits: Logits, penalty: float, seen: Collection[int]) -> Logits:
    """Logits [V] with the repetition penalty; the argument stays as it is."""
    if penalty == 1 or not seen:
        return logits
    ids = np.fromiter(set(seen), np.intp)
    result = logits.copy()
    result[ids] = np.where(result[ids] > 0, result[ids] / penalty, result[ids] * penalty)
    return result


def distribution(logits: Logits, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Probabilities]:
    """The tokens that may be drawn, the likeliest first (of equal ones the lowest id first), and their probabilities.

    Needs a temperature above 0.
    """
    tokens = _top_k(logits, sampling.top_k)
    # The largest goes to 0 before the division, so that no temperature, however small, overflows.
    scaled = logits[tokens].astype(np.float64)
    with np.errstate(over="ignore"):  # a far smaller logit may reach minus infinity: its probability is 0
        scaled = (scaled - scaled.max()) / sampling.temperature
    probabilities = _normalised(np.exp(scaled))
    top_p = sampling.top_p if sampling.top_p is not None else 1.0
    # Tokens below (1 - p) / V sum to less than 1 - p: they cannot be needed to reach p, and need not be sorted.
    likely = np.flatnonzero(probabilities > (1 - top_p) / len(probabilities) * 0.5)
    order = likely[np.argsort(-logits[tokens[likely]], kind="stable")]  # rounding makes some probabilities equal
    tokens, probabilities = tokens[order], probabilities[order]
    if top_p < 1:
        enough = int(np.searchsorted(probabilities.cumsum(), top_p)) + 1
        tokens, probabilities = tokens[:enough], _normalised(probabilities[:enough])
    if sampling.min_p:
        # probabilities fall, so what stays is a beginning
        enough = int((probabilities >= sampling.min_p * probabilities[0]).sum())
        tokens, probabilities = tokens[:enough], probabilities[:enough]
    return tokens, _normalised(probabilities)


def _top_k(logits: Logits, k: int | None) -> npt.NDArray[np.intp]:
    """The ids of the k largest logits, ascending; of equal ones on the border the lowest ids stay."""
    if not k or k >= len(logits):
        return np.arange(len(logits))
    border = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > border)
    return np.sort(np.concatenate([above, np.flatnonzero(logits == border)[: k - len(above)]]))


def _draw(probabilities: Probabilities, uniform: float) -> int:
    """The index that ``uniform`` in [0, 1) falls on. Never one whose probability is 0."""
    cumulative = probabilities.cumsum()
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(probabilities)[-1]))  # the product may round up to the sum


def _normalised(probabilities: Probabilities) -> Probabilities:
    normalised: Probabilities = probabilities / probabilities.sum()
    return normalised


def _number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and isfinite(value)


def _integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _fraction(value: Any) -> bool:
    return _number(value) and 0 < value <= 1


def _require(condition: bool, name: str, expected: str, sampling: Sampling) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, not {getattr(sampling, name)!r}")
