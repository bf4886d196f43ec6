"""What integers cost: how far a model's next-token probabilities move, on texts of ours, and how well it reads them.

Two models read the same texts, some tokens at a time, and each piece of their logits is compared and let go: a
vocabulary of 262144 never has more than a piece of a text in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from diptych.export import prompts
from diptych.jax_model.config import CacheDtype, Config
from diptych.runtime.chat_template import ChatTemplate
from diptych.runtime.text import token_names

__all__ = [
    "JaxReader",
    "OrtReader",
    "Reader",
    "Recorded",
    "Score",
    "compare",
    "divergence",
    "log_probabilities",
    "log_softmax",
    "score_json",
    "texts",
]

Logits = NDArray[np.float32]
PIECE = 64  # tokens read at a time: 67 MB of logits where V is 262144
_ROWS = 8  # positions whose probabilities are computed at a time


def texts(folder: Path, V: int, limit: int) -> dict[str, list[int]]:
    """Our texts in the artifact's tokens, each cut to ``limit``; without a tokenizer, one text of arbitrary tokens."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {"arbitrary": prompts.arbitrary(V, limit)}
    tokenizer = path.read_text(encoding="utf-8")
    named = {"prose": prompts.LONG, "code": prompts.CODE, "question": prompts.QUESTION}
    found = {name: prompts.encode(tokenizer, text, V) for name, text in named.items()}
    if chat := _chat(folder):
        found["chat"] = prompts.encode(tokenizer, chat, V, begins=False)
    return {name: tokens[:limit] for name, tokens in found.items()}


def _chat(folder: Path) -> str | None:
    """A question as the chat template writes it; None where there is no template, or it wants more than a question.

    It begins with control tokens, to which all others attend: a model is in other states there than in plain text.
    """
    source, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if not source.is_file():
        return None
    names = token_names(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}
    messages = [{"role": "user", "content": prompts.SHORT}]
    variables = {**names, "messages": messages, "add_generation_prompt": True}
    try:
        return ChatTemplate(source.read_text(encoding="utf-8")).render(variables)
    except ValueError:
        return None


class Reader(Protocol):
    """A model that reads a text from its start."""

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Logits behind every token, [n, V] for each piece of at most :data:`PIECE` tokens."""


class JaxReader:
    """The jitted prefill; every piece is padded to one shape, so that it compiles once."""

    def __init__(self, config: Config, params: Any, cache_dtype: CacheDtype = "float32") -> None:
        self._config, self._params, self._cache_dtype = config, params, cache_dtype

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        from diptych.jax_model.decoder import Cache, prefill  # JAX is not needed to compare two graphs

        cache = Cache.zeros(self._config, 1, capacity(tokens), self._cache_dtype)
        for piece in pieces(tokens):
            padded = np.zeros((1, PIECE), np.int32)
            padded[0, : len(piece)] = piece
            count, positions = np.array([len(piece)], np.int32), np.arange(PIECE, dtype=np.int32)[None]
            logits, cache = prefill(self._config, self._params, cache, padded, count, positions)
            yield np.asarray(logits[0, : len(piece)])


class OrtReader:
    """A prefill graph in ONNX Runtime, by itself: an artifact need not be complete yet."""

    def __init__(self, config: Config, graph: Path, cache_dtype: CacheDtype) -> None:
        self._config, self._cache_dtype = config, cache_dtype
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        shape = (1, self._config.K, capacity(tokens), self._config.H)
        parts = [f"{i}.{part}" for i in range(self._config.L) for part in ("key", "value")]
        state = {"past_length": np.zeros(1, np.int32)}
        state |= {f"past_key_values.{part}": np.zeros(shape, self._cache_dtype) for part in parts}
        for piece in pieces(tokens):
            feeds = {
                "input_ids": np.array([piece], np.int32),
                "num_tokens": np.array([len(piece)], np.int32),
                "logit_positions": np.arange(len(piece), dtype=np.int32)[None],
            }
            logits, *presents = self._session.run(
                ["logits", "present_length", *(f"present.{part}" for part in parts)], feeds | state
            )
            state = dict(zip(state, presents, strict=True))
            yield logits[0]


class Recorded:
    """What another reader said of some texts, so that it can go before the next one comes: for few positions."""

    def __init__(self, reader: Reader, texts: Mapping[str, Sequence[int]]) -> None:
        self._logits = {tuple(tokens): list(reader.read(tokens)) for tokens in texts.values()}

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        return iter(self._logits[tuple(tokens)])


def pieces(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    return (tokens[start : start + PIECE] for start in range(0, len(tokens), PIECE))


def capacity(tokens: Sequence[int]) -> int:
    """Of a cache that holds all pieces, the last one padded."""
    return -(-len(tokens) // PIECE) * PIECE


@dataclass(frozen=True)
class Score:
    """How ``found`` compares with what was ``expected`` over some positions.

    ``kl`` is the mean Kullback-Leibler divergence of the next-token probabilities, in nats; ``top1`` the share of
    positions where both have the same likeliest token; perplexities are of the text itself.
    """

    positions: int
    kl: float
    top1: float
    perplexity: float
    expected_perplexity: float


def compare(expected: Reader, found: Reader, texts: Mapping[str, Sequence[int]]) -> dict[str, Score]:
    """A score for each text, by its name."""
    return {name: _score(expected.read(tokens), found.read(tokens), tokens) for name, tokens in texts.items()}


def _score(expected: Iterator[Logits], found: Iterator[Logits], tokens: Sequence[int]) -> Score:
    kl, same, losses, at = 0.0, 0.0, np.zeros(2), 0
    for p, q in log_probabilities(expected, found):
        each = divergence(p, q)
        kl, same = kl + each[0] * len(p), same + each[1] * len(p)
        following = np.array(tokens[at + 1 : at + 1 + len(p)], np.int64)
        index = np.arange(len(following)), following
        losses -= [p[index].sum(), q[index].sum()]
        at += len(p)
    expected_loss, loss = losses / max(1, len(tokens) - 1)
    return Score(at, kl / at, same / at, math.exp(loss), math.exp(expected_loss))


def log_probabilities(*models: Iterator[Logits]) -> Iterator[list[NDArray[np.float64]]]:
    """What models that read one text say of the same positions, [n, V] each: some positions at a time."""
    for pieces in zip(*models, strict=True):
        for start in range(0, len(pieces[0]), _ROWS):
            yield [log_softmax(logits[start : start + _ROWS]) for logits in pieces]


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> tuple[float, float]:
    """Mean divergence and top-1 agreement of log-probabilities [n, V]."""
    kl = float(np.einsum("nv,nv->", np.exp(p), p - q)) / len(p)
    return max(0.0, kl), float((p.argmax(-1) == q.argmax(-1)).mean())


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """In double precision: divergences of 1e-7 are sums of terms that cancel."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def score_json(scores: Mapping[str, Score]) -> dict[str, Any]:
    """As manifests hold them, in three digits: more differ between machines and tell nothing."""
    return {
        name: {
            key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in asdict(score).items()
        }
        for name, score in scores.items()
    }
