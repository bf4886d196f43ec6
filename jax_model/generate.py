"""A plain generation loop over the compiled functions: the reference that other loops are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from diptych.jax_model.config import Config
from diptych.jax_model.decoder import Cache, Params, decode, prefill

__all__ = ["bucket", "greedy"]

SMALLEST_BUCKET = 16


def bucket(length: int, limit: int) -> int:
    """The padded length for a prompt: the next power of two, at least 16, at most ``limit``.

    ``prefill`` compiles once per padded length, so prompts of any length need few compilations.
    Raises ValueError when the prompt is empty or longer than ``limit``.
    """
    if not 0 < length <= limit:
        raise ValueError(f"a prompt of {length} tokens, expected 1 to {limit}")
    return min(max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()), limit)


def greedy(
    config: Config,
    params: Params,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos_token_ids: Iterable[int] = (),
    capacity: int | None = None,
) -> Iterator[int]:
    """Yield the most likely tokens behind ``prompt``, up to ``max_tokens`` or a token that ends the text.

    The end token is yielded too.  ``capacity`` is the cache's size in positions; by default all tokens fit.
    Generation stops when the cache is full.  Raises ValueError for an empty prompt or one that does not fit.
    """
    S = capacity or bucket(len(prompt), config.max_positions) + max_tokens
    T = bucket(len(prompt), S)
    ends = frozenset(eos_token_ids)
    tokens_BT = np.zeros((1, T), np.int32)
    tokens_BT[0, : len(prompt)] = prompt
    logits_BPV, cache = prefill(
        config,
        params,
        Cache.zeros(config, 1, S),
        jnp.asarray(tokens_BT),
        jnp.array([len(prompt)], jnp.int32),
        jnp.array([[len(prompt) - 1]], jnp.int32),
    )
    token = int(logits_BPV[0, 0].argmax())
    for held in range(len(prompt), len(prompt) + max_tokens):
        yield token
        if token in ends or held >= S or held + 1 == len(prompt) + max_tokens:
            return
        logits_BV, cache = decode(config, params, cache, jnp.array([token], jnp.int32))
        token = int(logits_BV[0].argmax())
