"""The loop: sample, stop, release text, step; and what comes out of it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from diptych.runtime.options import Options
from diptych.runtime.sampling import Logits, sample
from diptych.runtime.session import NonFiniteLogits, Session
from diptych.runtime.stopping import StopStrings
from diptych.runtime.text import Text

FinishReason = Literal["eos", "stop", "length", "capacity", "cancelled", "error"]


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, the seconds that it took to make them, and whether an answer goes on with its text."""

    token_ids: list[int]
    seconds: float
    text_goes_on: bool


@dataclass(frozen=True)
class Usage:
    """Tokens. Of the prompt's, ``cached_tokens`` were in the session already and not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timing:
    """Seconds of a monotonic clock, without what the caller does between two pieces; None where nothing was measured.

    ``ttft_s``, the time to the first token, is tokenisation, prefill and the first choice. ``prefill_tokens_per_s``
    counts the prompt tokens that were computed, ``decode_tokens_per_s`` the steps behind the first token.
    """

    ttft_s: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True)
class Result:
    """What a generation gave.

    ``token_ids`` are all tokens chosen, with the one that ended it; ``text`` leaves special tokens and the stop string
    out.  ``finish_reason`` and ``finish_detail``:

    ========== =======================================================================================
    eos        the model ended the text; the id of the token
    stop       a stop string came; the string
    length     ``max_tokens`` were generated; None
    capacity   the cache is full: no token can follow; None
    cancelled  the caller closed the iterator, a callback raised, or Ctrl-C came; None
    error      of one prompt in a batch: its logits were not finite; what happened
    ========== =======================================================================================

    ``seed`` repeats the choice (None: greedy, nothing is random).  ``runtime`` tells what really ran.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    finish_detail: int | str | None
    usage: Usage
    timing: Timing
    seed: int | None
    runtime: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Meter:
    """Seconds and tokens of each phase, as they add up."""

    tokenize_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    prefill_s: float = 0.0
    ttft_s: float | None = None
    decode_s: float = 0.0
    steps: int = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.decode_s += time.perf_counter() - start
        self.steps += 1

    def timing(self) -> Timing:
        computed = self.prompt_tokens - self.cached_tokens
        return Timing(
            self.ttft_s,
            computed / self.prefill_s if self.prefill_s else None,
            self.steps / self.decode_s if self.decode_s else None,
        )


class Completion:
    """One text as it grows: which token comes, whether it ends, what of it may be shown, and how long it took."""

    def __init__(self, text: Text, options: Options, eos: frozenset[int], prompt: Prompt) -> None:
        self.prompt = prompt.token_ids
        self.token_ids: list[int] = []
        self.reason: FinishReason | None = None
        self.detail: int | str | None = None
        self.meter = Meter(prompt.seconds, len(prompt.token_ids))
        self._seed = _seed(options)
        self._rng = np.random.default_rng(self._seed)
        self._sampling, self._most = options.sampling, options.max_tokens
        self._seen = set(prompt.token_ids) if options.repetition_penalty != 1 else set()
        self._eos = eos
        self._stops = StopStrings(options.stop)
        self._stop_tokens = {text.special_token(stop): stop for stop in self._stops.strings}
        self._detokenizer = text.detokenizer(
            skip_special_tokens=options.skip_special_tokens, continues=prompt.text_goes_on
        )
        self._pieces: list[str] = []
        if self._most == 0:
            self.end("length")

    def take(self, logits: Logits) -> str:
        """Choose the next token from logits [V]; returns the text that may be shown now."""
        token = sample(logits, self._sampling, self._rng, self._seen)
        self.token_ids.append(token)
        self._seen.add(token)
        if token in self._eos:
            return self.end("eos", token)
        if token in self._stop_tokens:
            return self.end("stop", self._stop_tokens[token])
        shown, stop = self._stops.push(self._detokenizer.push(token))
        self._pieces.append(shown)
        if stop is not None:
            self.reason, self.detail = "stop", stop
        elif len(self.token_ids) == self._most:
            shown += self.end("length")
        return shown

    def end(self, reason: FinishReason, detail: int | str | None = None) -> str:
        """End the text; returns what was held back and belongs to it."""
        self.reason, self.detail = reason, detail
        rest = self._stops.flush() + self._detokenizer.finish(complete=reason in ("eos", "stop"))
        self._pieces.append(rest)
        return rest

    def break_off(self) -> None:
        """End it where it stands, unless it has ended: what was held back is dropped."""
        if self.reason is None:
            self.reason = "cancelled"

    def result(self, runtime: dict[str, Any]) -> Result:
        if self.reason is None:
            raise RuntimeError("the generation has not ended: take all its pieces, or close() it, and then the result")
        return Result(
            text="".join(self._pieces),
            token_ids=list(self.token_ids),
            finish_reason=self.reason,
            finish_detail=self.detail,
            usage=Usage(len(self.prompt), self.meter.cached_tokens, len(self.token_ids)),
            timing=self.meter.timing(),
            seed=self._seed,
            runtime=runtime,
        )


class Generation(Iterator[str]):
    """Text pieces as they come; ``result`` afterwards, whose ``text`` is all the pieces together.

    ``close()``, also from another thread, or leaving a ``with`` block stops it within a step. So does an exception or
    Ctrl-C. The session can be used again.
    """

    def __init__(self, session: Session, completion: Completion, runtime: dict[str, Any]) -> None:
        self._session, self._completion, self._runtime = session, completion, runtime
        self._cancelled = False
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop. Does nothing to a generation that has ended."""
        self._cancelled = True
        with contextlib.suppress(ValueError):  # another thread is in the middle of it, and will see the flag
            self._pieces.close()
            self._completion.break_off()  # one that never started

    @property
    def result(self) -> Result:
        """Raises RuntimeError while the generation runs."""
        return self._completion.result(self._runtime)

    def _run(self) -> Generator[str, None, None]:
        try:
            yield from filter(None, self._steps())
        except _Cancelled:
            pass
        except NonFiniteLogits:
            self._session.rewind(0)  # nothing that the row holds can be trusted
            raise
        finally:
            self._completion.break_off()

    def _steps(self) -> Iterator[str]:
        completion = self._completion
        if completion.reason is None:
            yield self._first()
        while completion.reason is None:
            self._stop_if_cancelled()
            yield self._next() if self._session.room(0) else completion.end("capacity")

    def _first(self) -> str:
        completion, meter, session = self._completion, self._completion.meter, self._session
        start = time.perf_counter()
        meter.cached_tokens = _reuse(session, completion.prompt)
        rest = completion.prompt[meter.cached_tokens :]
        logits = session.prefill(0, rest, on_chunk=self._stop_if_cancelled)
        meter.prefill_s = time.perf_counter() - start
        piece = completion.take(logits[0])
        meter.ttft_s = meter.tokenize_s + time.perf_counter() - start
        return piece

    def _next(self) -> str:
        with self._completion.meter.step():
            logits = self._session.decode(self._completion.token_ids[-1:])
            return self._completion.take(logits[0])

    def _stop_if_cancelled(self, _done: int = 0) -> None:
        if self._cancelled:
            raise _Cancelled


class _Cancelled(Exception):
    pass


def run_batch(session: Session, completions: Sequence[Completion]) -> None:
    """Prefill row after row, then step all rows together until each has ended.

    A row whose logits are not finite ends with the reason ``error``; the others go on.
    """
    start = time.perf_counter()
    for row, completion in enumerate(completions):
        if completion.reason is None:
            _start_row(session, row, completion, start)
    while running := _running(session, completions):
        _step_rows(session, completions, running)


def _start_row(session: Session, row: int, completion: Completion, start: float) -> None:
    began = time.perf_counter()
    try:
        logits = session.prefill(row, completion.prompt)
    except NonFiniteLogits as error:
        completion.end("error", str(error))
        return
    completion.meter.prefill_s = time.perf_counter() - began
    completion.take(logits[0])
    completion.meter.ttft_s = completion.meter.tokenize_s + time.perf_counter() - start


def _running(session: Session, completions: Sequence[Completion]) -> list[int]:
    """The rows that take another step. Those that are full end here, and those that have ended are emptied."""
    for row, completion in enumerate(completions):
        if completion.reason is None and not session.room(row):
            completion.end("capacity")
        if completion.reason is not None:
            session.rewind(row)
    return [row for row, completion in enumerate(completions) if completion.reason is None]


def _step_rows(session: Session, completions: Sequence[Completion], running: Sequence[int]) -> None:
    with contextlib.ExitStack() as clocks:
        for row in running:
            clocks.enter_context(completions[row].meter.step())
        try:
            logits = session.decode([completions[row].token_ids[-1] for row in running], running)
        except NonFiniteLogits as error:
            logits = error.logits
            for row in error.rows:
                completions[row].end("error", str(error))
        for row, row_logits in zip(running, logits, strict=True):
            if completions[row].reason is None:
                completions[row].take(row_logits)


def _reuse(session: Session, prompt: Sequence[int]) -> int:
    """Keep what a session holds of a prompt, its longest common beginning; at least one token is left to compute."""
    held = session.tokens(0)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(held, prompt, strict=False))
    kept = min(sum(1 for _ in same), len(prompt) - 1)
    session.rewind(0, kept)
    return kept


def _seed(options: Options) -> int | None:
    if options.sampling.greedy:
        return None
    return options.seed if options.seed is not None else secrets.randbits(32)
