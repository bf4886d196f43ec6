"""The JAX model's contract: any way of feeding tokens gives the same logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.jax_model.config import Config
from diptych.jax_model.decoder import Cache, decode, prefill
from diptych.jax_model.generate import bucket, greedy
from random_models import CONFIGS, GEMMA, LLAMA, random_params

S = 48
TOLERANCE = 2e-5  # float32: sums of a few hundred products in another order


def tokens(rows: int, length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (rows, length)).astype(np.int32)


def every_position(config: Config, params: Any, tokens_BT: np.ndarray) -> np.ndarray:
    """Logits behind every token, from one prefill of whole rows [B, T, V]."""
    B, T = tokens_BT.shape
    positions = jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1))
    cache = Cache.zeros(config, B, T)
    return np.asarray(prefill(config, params, cache, jnp.asarray(tokens_BT), jnp.full((B,), T), positions)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_ragged_decode_give_what_one_prefill_gives(name: str) -> None:
    config = CONFIGS[name]
    params = random_params(config)
    text = tokens(2, 40)
    want = every_position(config, params, text)

    cache = Cache.zeros(config, 2, S)
    held = np.zeros(2, np.int32)
    for chunk in ((9, 4), (3, 9)):  # padded to 9, past the windows of 8 and 5
        padded = np.zeros((2, 9), np.int32)
        for row, n in enumerate(chunk):
            padded[row, :n] = text[row, held[row] : held[row] + n]
        last = jnp.array([[n - 1] for n in chunk], jnp.int32)
        logits, cache = prefill(config, params, cache, jnp.asarray(padded), jnp.array(chunk, jnp.int32), last)
        held += chunk
        for row in range(2):
            np.testing.assert_allclose(logits[row, 0], want[row, held[row] - 1], atol=TOLERANCE)
    for _ in range(20):
        logits, cache = decode(config, params, cache, jnp.array([text[row, held[row]] for row in range(2)]))
        held += 1
        np.testing.assert_array_equal(cache.length, held)
        for row in range(2):
            np.testing.assert_allclose(logits[row], want[row, held[row] - 1], atol=TOLERANCE)


def test_what_lies_behind_a_row_does_not_matter() -> None:
    params = random_params(LLAMA)
    text = tokens(1, 12)
    want = every_position(LLAMA, params, text)[:, -1]
    cache = Cache.zeros(LLAMA, 1, S)
    cache = jax.tree.map(lambda x: jnp.full_like(x, 9) if x.ndim == 4 else x, cache)
    got, _ = prefill(LLAMA, params, cache, jnp.asarray(text), jnp.array([12]), jnp.array([[11]]))
    np.testing.assert_allclose(got[:, 0], want, atol=TOLERANCE)


def test_a_window_hides_what_is_older() -> None:
    """With every layer windowed, a token ``layers * (window - 1)`` back is the last that can matter."""
    layers = tuple(dataclasses.replace(layer, window=4) for layer in GEMMA.layers)
    config = dataclasses.replace(GEMMA, layers=layers)
    params = random_params(config)
    text = tokens(1, 30)
    reach = len(layers) * 3
    logits = every_position(config, params, text)[0, -1]
    for back, matters in ((reach, True), (reach + 1, False)):
        changed = text.copy()
        changed[0, -1 - back] = (changed[0, -1 - back] + 1) % 97
        same = np.array_equal(every_position(config, params, changed)[0, -1], logits)
        assert same is not matters, f"{back} back"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *(("gemma3", field, value) for field, value in [
            ("embed_scale", 1.0), ("attn_scale", 0.5), ("qk_norm", None), ("activation", "silu"), ("norm_eps", 1e-1),
        ]),
        *(("olmo", field, value) for field, value in [
            ("attn_softcap", None), ("logit_softcap", None), ("qkv_clip", None), ("residual_scale", 1.0),
            ("logit_scale", 1.0), ("norm", "rms"),
        ]),
    ],
)  # fmt: skip
def test_every_switch_changes_the_result(name: str, field: str, value: Any) -> None:
    base = CONFIGS[name]
    params = random_params(base)
    config = dataclasses.replace(base, **{field: value})
    assert not np.allclose(
        every_position(base, params, tokens(1, 9)), every_position(config, params, tokens(1, 9)), atol=1e-3
    )


@given(length=st.integers(1, 300), limit=st.integers(1, 300))
@settings(deadline=None)
def test_buckets_hold_their_prompt(length: int, limit: int) -> None:
    if length > limit:
        with pytest.raises(ValueError, match="tokens, expected 1 to"):
            bucket(length, limit)
    else:
        assert length <= bucket(length, limit) <= min(limit, max(16, 2 * length))


def test_greedy_follows_the_largest_logit() -> None:
    params = random_params(LLAMA)
    prompt = tokens(1, 7)[0].tolist()
    got = list(greedy(LLAMA, params, prompt, 6))
    text = np.array([prompt + got], np.int32)
    assert got == every_position(LLAMA, params, text)[0, 6:-1].argmax(-1).tolist()
    assert list(greedy(LLAMA, params, prompt, 6, eos_token_ids=[got[2]])) == got[: got.index(got[2]) + 1]
    assert list(greedy(LLAMA, params, prompt, 6, capacity=9)) == got[:3]  # two fit, the third is the last one's answer


def test_configurations_survive_json() -> None:
    for config in CONFIGS.values():
        assert Config.from_json(config.to_json()) == config
