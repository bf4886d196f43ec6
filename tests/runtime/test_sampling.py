"""Choosing tokens: every filter against its definition, and numbers that break careless arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diptych.runtime.sampling import Sampling, distribution, penalise, sample

LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    # halves, so that there are many ties
    elements=st.one_of(st.integers(-20, 20).map(lambda i: i / 2), st.floats(-1e4, 1e4, width=32)),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.one_of(st.none(), st.integers(0, 50)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1)),
    min_p=st.one_of(st.none(), st.floats(0, 1)),
)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    probabilities: np.ndarray = exponentials / exponentials.sum()
    return probabilities


def by_definition(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Token by token, as the definitions read."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[: sampling.top_k or None]
    chances = dict(zip(ranked, softmax(logits[ranked].astype(np.float64) / sampling.temperature), strict=True))
    kept: dict[int, float] = {}
    for token in ranked:
        if sampling.top_p in (None, 1) or sum(kept.values()) < sampling.top_p:
            kept[token] = chances[token]
    highest = max(kept.values())
    kept = {token: chance for token, chance in kept.items() if chance >= (sampling.min_p or 0) * highest}
    return {token: chance / sum(kept.values()) for token, chance in kept.items() if chance}


@given(logits=LOGITS, sampling=SAMPLINGS)
def test_filters_do_what_they_are_defined_to_do(logits: np.ndarray, sampling: Sampling) -> None:
    tokens, probabilities = distribution(logits, sampling)
    found = dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))
    for expected in map(by_definition, [logits] * 9, within_rounding(sampling)):
        if found.keys() == expected.keys():
            assert np.allclose([found[token] for token in expected], list(expected.values()), rtol=1e-6)
            return
    raise AssertionError(f"{found} is not {by_definition(logits, sampling)}")


def within_rounding(sampling: Sampling) -> Iterator[Sampling]:
    """A token exactly on the border of top-p or min-p may fall on either side of it."""
    for p, m in product((1, 1 - 1e-9, 1 + 1e-9), repeat=2):
        top_p, min_p = sampling.top_p, sampling.min_p
        yield replace(sampling, top_p=top_p and min(1, top_p * p), min_p=min_p and min(1, min_p * m))


@given(logits=LOGITS, sampling=SAMPLINGS)
def test_distributions_are_distributions(logits: np.ndarray, sampling: Sampling) -> None:
    tokens, probabilities = distribution(logits, sampling)
    assert len(tokens) >= 1
    assert len(set(tokens.tolist())) == len(tokens)
    assert (probabilities > 0).all()
    assert (np.diff(probabilities) <= 0).all()
    assert np.isclose(probabilities.sum(), 1)
    assert logits[tokens[0]] == logits.max()
    assert not sampling.top_k or len(tokens) <= sampling.top_k


@given(logits=LOGITS, seed=st.integers(0, 1000), temperature=st.floats(0.01, 100))
def test_top_1_is_greedy(logits: np.ndarray, seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    greedy = sample(logits, Sampling(), rng)
    assert greedy == int(np.argmax(logits))
    assert sample(logits, Sampling(temperature, top_k=1), rng) == greedy
    # the smallest nucleus has one token too: the lowest id of the likeliest
    assert sample(logits, Sampling(temperature, top_p=1e-9), rng) == greedy


@given(logits=LOGITS, sampling=SAMPLINGS, seed=st.integers(0, 1000))
def test_a_seed_repeats_the_choice(logits: np.ndarray, sampling: Sampling, seed: int) -> None:
    runs = [[sample(logits, sampling, rng) for _ in range(5)] for rng in (np.random.default_rng(seed) for _ in "ab")]
    assert runs[0] == runs[1]
    assert set(runs[0]) <= set(distribution(logits, sampling)[0].tolist())


def test_tokens_come_as_often_as_they_should() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    rng = np.random.default_rng(0)
    counts = np.bincount([sample(logits, Sampling(1.0), rng) for _ in range(8000)], minlength=4)
    expected = 8000 * np.array([0.5, 0.25, 0.125, 0.125])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-squared, 3 degrees of freedom, one in a thousand


class Uniform:
    """A generator that draws what it is told."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 3), (0.54, 3), (0.56, 1), (np.nextafter(1, 0), 1)])
def test_the_ends_of_the_scale(uniform: float, token: int) -> None:
    """Tokens 0 and 2 have a chance that is zero in float64, and never come."""
    logits = np.array([-1e30, 1, -1e30, 1.2], np.float32)
    assert sample(logits, Sampling(1.0), Uniform(uniform)) == token  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5, 1.0, 1e300])
@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e38])
def test_extremes_do_not_overflow(temperature: float, scale: float) -> None:
    logits = np.array([-3, 3, 1], np.float32) * np.float32(scale)
    tokens, probabilities = distribution(logits, Sampling(temperature))
    assert np.isfinite(probabilities).all()
    assert tokens[0] == 1


def test_a_large_vocabulary_sums_to_one() -> None:
    logits = np.random.default_rng(0).standard_normal(262_144).astype(np.float32)
    tokens, probabilities = distribution(logits, Sampling(1.0))
    assert abs(probabilities.sum() - 1) < 1e-12
    chances = np.sort(softmax(logits.astype(np.float64)))[::-1]
    nucleus, inside = distribution(logits, Sampling(1.0, top_p=0.9))
    assert len(nucleus) == int((chances.cumsum() < 0.9).sum()) + 1
    assert np.array_equal(nucleus, tokens[: len(nucleus)])
    assert abs(inside.sum() - 1) < 1e-12


def test_equal_logits_keep_their_order() -> None:
    tokens, probabilities = distribution(np.zeros(10, np.float32), Sampling(1.0, top_k=4))
    assert tokens.tolist() == [0, 1, 2, 3]
    assert np.allclose(probabilities, 0.25)


@given(logits=LOGITS, penalty=st.floats(0.1, 10), seen=st.lists(st.integers(0, 39)))
def test_repetition_penalty(logits: np.ndarray, penalty: float, seen: list[int]) -> None:
    seen = [token for token in seen if token < len(logits)]
    before = logits.copy()
    found = penalise(logits, penalty, seen)
    assert np.array_equal(logits, before)
    for token, (old, new) in enumerate(zip(before.tolist(), found.tolist(), strict=True)):
        expected = old if token not in seen else old / penalty if old > 0 else old * penalty
        assert np.isclose(new, expected, rtol=1e-6)


def test_the_penalty_also_holds_for_greedy() -> None:
    logits = np.array([2.0, 1.9], np.float32)
    rng = np.random.default_rng(0)
    assert sample(logits, Sampling(repetition_penalty=1.2), rng, {0}) == 1
    assert sample(logits, Sampling(repetition_penalty=1.2), rng, {0, 1}) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": "1"},
        {"temperature": True}, {"temperature": None}, {"top_k": -1}, {"top_k": 1.5}, {"top_k": True}, {"top_p": 0},
        {"top_p": 1.1}, {"top_p": -1}, {"min_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be"):
        Sampling(**wrong)
