"""Loader, configuration and model against transformers, from checkpoints to logits, over stored values.

A mistake that JAX and ONNX would share shows here: a tensor in the wrong place, a wrong permutation, a norm without its
one, a scale, a window, a rope base.  ``tests/reference/generate.py`` made the values.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import tiny
from diptych.export.lowering import TARGETS, lower
from diptych.jax_model import params as parameters
from diptych.jax_model.config import Config
from diptych.jax_model.decoder import Cache, Params, decode, prefill
from diptych.jax_model.readers import Checkpoint, open_checkpoint
from diptych.jax_model.rope import LongRope
from reference import families, samples
from reference.samples import Sample
from test_lowering import feed, session

REFERENCE = Path(samples.__file__).parent
# float32 sums in another order: 3e-5 in tiny models, 2e-4 in real ones. A scale that is 2 % off gives 2e-2.
TINY_TOLERANCE = 1e-4
REAL_TOLERANCE = 2e-3
CAPACITY = 640  # positions that the graphs of tiny models know: beyond the longest prompt with a chunk of padding

TINY_CASES = [(name, "huggingface") for name in tiny.VARIANTS] + [(name, "gguf") for name in tiny.GGUF_VARIANTS]


@pytest.mark.parametrize(("name", "form"), TINY_CASES)
def test_tiny_checkpoint(name: str, form: str, tmp_path: Path) -> None:
    """Ragged rows, prompts in chunks of 40, then decoding: all in one batch."""
    write = tiny.write_huggingface if form == "huggingface" else tiny.write_gguf
    config, params = load(open_checkpoint(write(tiny.VARIANTS[name], tmp_path / f"{name}.gguf")))
    stored = samples.load(name)
    compare(stored, run(in_jax(config, params), stored, chunk=40), TINY_TOLERANCE)


@pytest.mark.parametrize("name", families.CASES)
def test_family(name: str, tmp_path: Path) -> None:
    """Checkpoints of many families, spelt as on the Hub: JAX, and the graphs of every target, against transformers.

    Ragged rows, prompts in chunks of 40, then decoding: all in one batch.
    """
    config, params = load(open_checkpoint(tiny.write_huggingface(families.load(name), tmp_path)))
    for served, stored in served_together(config, samples.load(name)):
        for programs in (in_jax(served, params), *(in_onnx(served, params, target) for target in TARGETS)):
            compare(stored, run(programs, stored, chunk=40), TINY_TOLERANCE, programs.name)


def served_together(config: Config, rows: Sequence[Sample]) -> Iterator[tuple[Config, list[Sample]]]:
    """All rows; where the longest sequence chooses LongRoPE's list, those that transformers reads by one apart."""
    scalings = {layer.rope.scaling for layer in config.layers if layer.rope is not None}
    for scaling in scalings:
        if isinstance(scaling, LongRope):
            short = [row for row in rows if len(row.ids) <= scaling.original]
            yield replace(config, max_positions=scaling.original), short
            rows = [row for row in rows if len(row.ids) > scaling.original]
    yield config, list(rows)


def load(checkpoint: Checkpoint) -> tuple[Config, Params]:
    config = parameters.configure(checkpoint)
    return config, parameters.load(checkpoint, config)


@dataclass(frozen=True)
class Programs:
    """The two programs of a model with its weights, called as the JAX functions are."""

    name: str
    config: Config
    prefill: Callable[..., tuple[Any, Cache]]  # (cache, tokens_BT, num_tokens_B, logit_positions_BP)
    decode: Callable[..., tuple[Any, Cache]]  # (cache, tokens_B)


def in_jax(config: Config, params: Params) -> Programs:
    return Programs("jax", config, *(functools.partial(program, config, params) for program in (prefill, decode)))


def in_onnx(config: Config, params: Params, target: str) -> Programs:
    """GroupQueryAttention reads a chunk for one row at a time, as the runtime calls it; other graphs all rows."""
    first, second = (
        session(lower(program, config, target, CAPACITY), params, intra_op_num_threads=1, log_severity_level=3)
        for program in ("prefill", "decode")
    )

    def read(cache: Cache, tokens_BT: Any, num_tokens_B: Any, positions_BP: Any) -> tuple[Any, Cache]:
        inputs = {"input_ids": tokens_BT, "num_tokens": num_tokens_B, "logit_positions": positions_BP}
        return unpacked(first.run(None, feed(config, cache, **{name: np.asarray(x) for name, x in inputs.items()})))

    def read_rows(cache: Cache, *inputs_B: Any) -> tuple[Any, Cache]:
        alone = [
            jax.tree.map(lambda x, row=row: x[row : row + 1], (cache, *inputs_B)) for row in range(len(inputs_B[0]))
        ]
        done = [read_alone(*one) for one in alone]
        together: tuple[Any, Cache] = jax.tree.map(lambda *rows: np.concatenate(rows), *done)
        return together

    def read_alone(cache: Cache, tokens_1T: Any, num_tokens_1: Any, positions_1P: Any) -> tuple[Any, Cache]:
        count, padded = int(num_tokens_1[0]), np.zeros((1, positions_1P.shape[1], config.V), np.float32)
        if count:
            logits_1PV, cache = read(cache, tokens_1T[:, :count], num_tokens_1, positions_1P[:, :count])
            padded[:, :count] = logits_1PV
        return padded, cache

    def step(cache: Cache, tokens_B: Any) -> tuple[Any, Cache]:
        return unpacked(second.run(None, feed(config, cache, input_ids=np.asarray(tokens_B)[:, None])))

    return Programs(target, config, read_rows if target == "ort" else read, step)


def unpacked(outputs: list[Any]) -> tuple[Any, Cache]:
    logits, length, *presents = outputs
    return logits, Cache(tuple(presents[0::2]), tuple(presents[1::2]), length)


def run(programs: Programs, rows: Sequence[Sample], chunk: int) -> list[np.ndarray]:
    """The model's logits [R, V] for every sample: one batch, its prompts read ``chunk`` tokens at a time."""
    longest = max(len(row.prompt) for row in rows)
    cache = Cache.zeros(programs.config, len(rows), longest + chunk + len(rows[0].continuation))
    seen: list[list[np.ndarray]] = [[] for _ in rows]
    for start in range(0, longest, chunk):
        cache, logits = read_chunk(programs, cache, [row.prompt[start : start + chunk] for row in rows], chunk)
        for parts, values in zip(seen, logits, strict=True):
            parts.append(values)
    for row_parts, steps in zip(seen, zip(*decode_rows(programs, cache, rows), strict=True), strict=True):
        row_parts.extend(steps)
    return [np.concatenate(parts) for parts in seen]


def read_chunk(
    programs: Programs, cache: Cache, rows: Sequence[list[int]], chunk: int
) -> tuple[Cache, list[np.ndarray]]:
    """Append some tokens to every row (none to some); logits behind each of them."""
    tokens_BT = np.array([row + [0] * (chunk - len(row)) for row in rows], np.int32)
    counts_B = np.array([len(row) for row in rows], np.int32)
    every_BP = np.tile(np.arange(chunk, dtype=np.int32), (len(rows), 1))
    logits_BPV, cache = programs.prefill(cache, *map(jnp.asarray, (tokens_BT, counts_B, every_BP)))
    return cache, [values[:count] for values, count in zip(np.asarray(logits_BPV), counts_B, strict=True)]


def decode_rows(programs: Programs, cache: Cache, rows: Sequence[Sample]) -> Iterator[list[np.ndarray]]:
    """Per step each row's logits [1, V] behind the next token of its stored continuation; the last token is not fed."""
    for tokens in list(zip(*(row.continuation for row in rows), strict=True))[:-1]:
        logits_BV, cache = programs.decode(cache, jnp.array(tokens, jnp.int32))
        yield list(np.asarray(logits_BV)[:, None])


def compare(stored: Sequence[Sample], computed: Sequence[np.ndarray], tolerance: float, where: str = "jax") -> None:
    for sample, logits_RV in zip(stored, computed, strict=True):
        assert len(logits_RV) == len(sample.ids) - 1
        assert sample.error(logits_RV) <= tolerance, f"{where}, prompt of {len(sample.prompt)} tokens"
        assert logits_RV[len(sample.prompt) - 1 :].argmax(-1).tolist() == sample.continuation, where


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
    programs = in_jax(config, params)
    stored = samples.load(name.replace("_", "-"))
    chunk, capacity = 64, 1024
    caches = []
    for sample in stored:
        cache = Cache.zeros(config, 1, capacity)
        for start in range(0, len(sample.prompt), chunk):
            part = sample.prompt[start : start + chunk]
            cache, (logits_PV,) = read_chunk(programs, cache, [part], chunk)
            assert sample.error(logits_PV, start) <= REAL_TOLERANCE, f"prompt of {len(sample.prompt)}, from {start} on"
        caches.append(cache)
        assert logits_PV[-1].argmax() == sample.continuation[0]
    cache = jax.tree.map(lambda *rows: jnp.concatenate(rows), *caches)
    del caches
    for step, logits in enumerate(decode_rows(programs, cache, stored)):
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
    """From a prompt to the text that transformers gives, up to a token that ends it; the tokens are checked above."""
    checkpoint, _, _ = smollm2
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer.files["tokenizer.json"])
    sample = samples.load("smollm2")[0]
    assert tokenizer.encode("The capital of France is").ids == sample.prompt
    ends = set(checkpoint.tokenizer.eos_token_ids)
    ids = list(itertools.takewhile(lambda token: token not in ends, sample.continuation))
    assert tokenizer.decode(ids) == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch, which only the reference extra brings")
def test_stored_values_come_out_again() -> None:
    """The values of one checkpoint, made anew by transformers."""
    command = [sys.executable, str(REFERENCE / "generate.py"), "--check", "gemma3"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
