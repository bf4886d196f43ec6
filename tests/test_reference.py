"""Loader, configuration and model against transformers, from checkpoints to logits, over stored values.

A mistake that JAX and ONNX would share shows here: a tensor in the wrong place, a wrong permutation, a norm without its
one, a scale, a window, a rope base.  ``tests/reference/generate.py`` made the values.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import tiny
from diptych.jax_model import params as parameters
from diptych.jax_model.config import Config
from diptych.jax_model.decoder import Cache, Params, decode, prefill
from diptych.jax_model.generate import greedy
from diptych.jax_model.readers import Checkpoint, open_checkpoint
from reference import samples
from reference.samples import Sample

REFERENCE = Path(samples.__file__).parent
# float32 sums in another order: 3e-5 in tiny models, 2e-4 in real ones. A scale that is 2 % off gives 2e-2.
TINY_TOLERANCE = 2e-4
REAL_TOLERANCE = 2e-3

TINY_CASES = [(name, "huggingface") for name in tiny.VARIANTS] + [(name, "gguf") for name in tiny.GGUF_VARIANTS]


@pytest.mark.parametrize(("name", "form"), TINY_CASES)
def test_tiny_checkpoint(name: str, form: str, tmp_path: Path) -> None:
    """Ragged rows, prompts in chunks of 40, then decoding: all in one batch."""
    write = {"huggingface": tiny.write_huggingface, "gguf": tiny.write_gguf}[form]
    config, params = load(open_checkpoint(write(tiny.VARIANTS[name], tmp_path / f"{name}.gguf")))
    stored = samples.load(name)
    compare(stored, run(config, params, stored, chunk=40), TINY_TOLERANCE)


def load(checkpoint: Checkpoint) -> tuple[Config, Params]:
    config = parameters.configure(checkpoint)
    return config, parameters.load(checkpoint, config)


def run(config: Config, params: Params, rows: Sequence[Sample], chunk: int) -> list[np.ndarray]:
    """The model's logits [R, V] for every sample: one batch, its prompts read ``chunk`` tokens at a time."""
    longest = max(len(row.prompt) for row in rows)
    cache = Cache.zeros(config, len(rows), longest + chunk + len(rows[0].continuation))
    seen: list[list[np.ndarray]] = [[] for _ in rows]
    for start in range(0, longest, chunk):
        cache, logits = read_chunk(config, params, cache, [row.prompt[start : start + chunk] for row in rows], chunk)
        for parts, values in zip(seen, logits, strict=True):
            parts.append(values)
    for row_parts, steps in zip(seen, zip(*decode_rows(config, params, cache, rows), strict=True), strict=True):
        row_parts.extend(steps)
    return [np.concatenate(parts) for parts in seen]


def read_chunk(
    config: Config, params: Params, cache: Cache, rows: Sequence[list[int]], chunk: int
) -> tuple[Cache, list[np.ndarray]]:
    """Append some tokens to every row (none to some); logits behind each of them."""
    tokens_BT = np.array([row + [0] * (chunk - len(row)) for row in rows], np.int32)
    counts_B = np.array([len(row) for row in rows], np.int32)
    every_BP = np.tile(np.arange(chunk, dtype=np.int32), (len(rows), 1))
    logits_BPV, cache = prefill(config, params, cache, *map(jnp.asarray, (tokens_BT, counts_B, every_BP)))
    return cache, [values[:count] for values, count in zip(np.asarray(logits_BPV), counts_B, strict=True)]


def decode_rows(config: Config, params: Params, cache: Cache, rows: Sequence[Sample]) -> Iterator[list[np.ndarray]]:
    """Per step each row's logits [1, V] behind the next token of its stored continuation; the last token is not fed."""
    for tokens in list(zip(*(row.continuation for row in rows), strict=True))[:-1]:
        logits_BV, cache = decode(config, params, cache, jnp.array(tokens, jnp.int32))
        yield list(np.asarray(logits_BV)[:, None])


def compare(stored: Sequence[Sample], computed: Sequence[np.ndarray], tolerance: float) -> None:
    for sample, logits_RV in zip(stored, computed, strict=True):
        assert len(logits_RV) == len(sample.ids) - 1
        assert sample.error(logits_RV) <= tolerance, f"prompt of {len(sample.prompt)} tokens"
        assert logits_RV[len(sample.prompt) - 1 :].argmax(-1).tolist() == sample.continuation


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[Checkpoint, Config, Params]:
    checkpoint = open_checkpoint(smollm2_gguf)
    return (checkpoint, *load(checkpoint))


@pytest.fixture(scope="module")
def gemma3_270m(gemma3_gguf: Path) -> tuple[Checkpoint, Config, Params]:
    checkpoint = open_checkpoint(gemma3_gguf)
    return (checkpoint, *load(checkpoint))


@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_real_model(name: str, request: pytest.FixtureRequest) -> None:
    """Prompts of 5, 24 and some 800 tokens, read one by one in chunks of 64, then decoded as one ragged batch."""
    _, config, params = request.getfixturevalue(name)
    stored = samples.load(name.replace("_", "-"))
    chunk, capacity = 64, 1024
    caches = []
    for sample in stored:
        cache = Cache.zeros(config, 1, capacity)
        for start in range(0, len(sample.prompt), chunk):
            part = sample.prompt[start : start + chunk]
            cache, (logits_PV,) = read_chunk(config, params, cache, [part], chunk)
            assert sample.error(logits_PV, start) <= REAL_TOLERANCE, f"prompt of {len(sample.prompt)}, from {start} on"
        caches.append(cache)
        assert logits_PV[-1].argmax() == sample.continuation[0]
    cache = jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)
    del caches
    for step, logits in enumerate(decode_rows(config, params, cache, stored)):
        for sample, logits_1V in zip(stored, logits, strict=True):
            assert sample.error(logits_1V, len(sample.prompt) + step) <= REAL_TOLERANCE, f"step {step}"
            assert logits_1V.argmax() == sample.continuation[step + 1]


@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m"])
def test_prompts_become_the_same_tokens(name: str, request: pytest.FixtureRequest) -> None:
    """English, code, spaces before digits, six scripts; Gemma adds BOS, SmolLM2 does not."""
    checkpoint, _, _ = request.getfixturevalue(name)
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer.files["tokenizer.json"])
    for prompt, sample in zip(("short", "medium", "long"), samples.load(name.replace("_", "-")), strict=True):
        text = (REFERENCE / "prompts" / f"{prompt}.txt").read_text(encoding="utf-8")
        assert tokenizer.encode(text).ids == sample.prompt, prompt


def test_text_to_text(smollm2: tuple[Checkpoint, Config, Params]) -> None:
    """From a prompt to the text that transformers gives, up to the token that ends it."""
    checkpoint, config, params = smollm2
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer.files["tokenizer.json"])
    prompt = tokenizer.encode("The capital of France is").ids
    ids = list(greedy(config, params, prompt, 40, eos_token_ids=checkpoint.tokenizer.eos_token_ids))
    assert tokenizer.decode(ids) == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch, which only the reference extra brings")
def test_stored_values_come_out_again() -> None:
    """The values of one checkpoint, made anew by transformers."""
    command = [sys.executable, str(REFERENCE / "generate.py"), "--check", "gemma3"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
