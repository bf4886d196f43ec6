"""Rows of tokens over a key/value cache that ONNX Runtime updates in place. Knows nothing about text.

The cache is plain NumPy memory, [B, K, S, H] for the keys and the values of each layer, and every run binds the same
memory as past and as present: nothing of it is allocated or copied by a step.  A row of [B, K, S, H] is contiguous, so
one row is prefilled through a [1, K, S, H] view while the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from diptych.runtime.programs import Programs

FIRST_CAPACITY = 256
# Prompts are computed in pieces of this many tokens: that bounds the memory of activations and scores, and the time
# until a cancellation is noticed, and costs nothing measurable, since the products are large enough already.
CHUNK = 512

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Logits = npt.NDArray[np.float32]


class NonFiniteLogits(ValueError):
    """The model computed NaN or infinity: activations overflowed, or weights are broken.

    ``rows`` are the rows concerned, ``lengths`` how many tokens each held before the step; those rows are as they were
    before it.  After a decode step the other rows have moved on, and ``logits`` [len(rows asked for), V] is what the
    step gave, so that a caller can continue with them.
    """

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], step: str, logits: Logits) -> None:
        self.rows, self.lengths, self.logits = tuple(rows), tuple(lengths), logits
        where = ", ".join(f"row {row} after {length} tokens" for row, length in zip(rows, lengths, strict=True))
        super().__init__(
            f"{step} gave logits that are not finite ({where}): activations overflowed or weights are damaged. "
            "An artifact with dtype fp32 has the widest range"
        )


@dataclass(frozen=True)
class _Run:
    """A binding, and the arrays that it points into."""

    binding: ort.IOBinding
    inputs: Mapping[str, npt.NDArray[np.int32]]
    logits: Logits
    present_length: npt.NDArray[np.int32]


class Session:
    """``rows`` sequences, each with its own length. Use one session per thread; the programs may be shared.

    ``capacity`` is how many tokens a row can hold.  Left out, it starts small and doubles when needed up to the
    artifact's ``max_context``; given, it is fixed.
    """

    def __init__(self, programs: Programs, rows: int = 1, capacity: int | None = None) -> None:
        if type(rows) is not int or rows < 1:
            raise ValueError(f"rows must be an integer of at least 1, not {rows!r}")
        most = programs.manifest.max_context
        if capacity is not None and (type(capacity) is not int or not 1 <= capacity <= most):
            raise ValueError(
                f"capacity must be an integer from 1 to the artifact's {most} (max_context), not {capacity!r}"
            )
        self.rows = rows
        self.limit = capacity or most  # what a row can hold in the end
        self._programs = programs
        self._vocabulary = programs.manifest.vocabulary.size
        self._lengths = np.zeros(rows, np.int32)
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._tainted = [False] * rows  # slots may hold what is not finite
        self._allocate(capacity or min(FIRST_CAPACITY, most))

    # ------------------------------------------------------------------------------------------------------ looking

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold before the cache has to grow."""
        return self._cache["0.key"].shape[2]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[B] tokens that each row holds: a view that cannot be written to."""
        return _read_only(self._lengths)

    @property
    def cache(self) -> Mapping[str, npt.NDArray[Any]]:
        """Keys and values [B, K, S, H] by ``"{layer}.key"`` and ``"{layer}.value"``, views that cannot be written to.

        Slots behind a row's length mean nothing.  The views are of this moment: after the cache has grown they are of
        the old memory.
        """
        return {name: _read_only(array) for name, array in self._cache.items()}

    def tokens(self, row: int) -> list[int]:
        """The tokens that a row holds."""
        row = self._row(row)
        return self._tokens[row][: self._lengths[row]]

    def room(self, row: int) -> int:
        """How many more tokens a row can hold."""
        return self.limit - int(self._lengths[self._row(row)])

    # -------------------------------------------------------------------------------------------------- the programs

    def prefill(
        self,
        row: int,
        tokens: Tokens,
        *,
        logits: Literal["last", "all"] | Sequence[int] = "last",
        on_chunk: Callable[[int], None] | None = None,
    ) -> Logits:
        """Append tokens [T] to a row; returns logits [P, V] at the last of them, at all, or at the positions named.

        A position p counts from the first of ``tokens``; its logits foretell token p + 1.  ``on_chunk`` is called with
        the number of tokens done after every chunk of a long prompt and may raise to stop there; the row then holds
        what was done.

        Raises ValueError for tokens or positions that do not exist, or more tokens than the row has room for, with
        nothing changed; NonFiniteLogits with the row as it was.
        """
        row, ids = self._row(row), token_ids(tokens, self._vocabulary)
        positions = _positions(logits, len(ids))
        start = int(self._lengths[row])
        self._make_room(row, start, len(ids))
        result = np.empty((len(positions), self._vocabulary), np.float32)
        for first in range(0, len(ids), CHUNK):
            chunk = ids[first : first + CHUNK]
            here = (positions >= first) & (positions < first + CHUNK)
            # A chunk without a wanted position tells its last, so that what is not finite never stays in the cache.
            wanted = positions[here] - first if here.any() else np.array([len(chunk) - 1], np.int32)
            found = self._prefill_chunk(row, chunk, wanted)
            if not np.isfinite(found).all():
                self._undo(row, start)
                raise NonFiniteLogits([row], [start], f"prefill of {len(ids)} tokens", found)
            result[here] = found[: here.sum()]
            if on_chunk:
                on_chunk(first + len(chunk))
        return result

    def decode(self, tokens: Tokens, rows: Sequence[int] | None = None) -> Logits:
        """Append one token to each row, or to each of ``rows``; returns logits [len(rows), V] in that order.

        The other rows keep what they hold, but one that is full cannot wait: rewind it first.

        Raises ValueError for tokens or rows that do not exist and for a full row, with nothing changed;
        NonFiniteLogits, with the rows concerned as they were and the others one token on.
        """
        stepping = self._stepping(rows)
        ids = token_ids(tokens, self._vocabulary)
        if len(ids) != len(stepping):
            raise ValueError(f"decode takes one token for each of {len(stepping)} rows, not {len(ids)} tokens")
        for row in range(self.rows):
            self._make_room(row, int(self._lengths[row]), 1)
        run = self._decode_run
        run.inputs["input_ids"][:] = 0
        run.inputs["input_ids"][stepping, 0] = ids
        run.inputs["past_length"][:] = self._lengths
        (self._programs.decode or self._programs.prefill).run_with_iobinding(run.binding)
        for row, token in zip(stepping, ids.tolist(), strict=True):
            self._note(row, [token])
        self._lengths[stepping] += 1
        logits: Logits = run.logits.reshape(self.rows, -1)[stepping]  # a copy
        self._refuse_non_finite(stepping, logits)
        return logits

    def rewind(self, row: int, length: int = 0) -> None:
        """Forget the tokens of a row from ``length`` on. Raises ValueError when it does not hold that many."""
        row = self._row(row)
        held = int(self._lengths[row])
        if type(length) is not int or not 0 <= length <= held:
            raise ValueError(f"row {row} holds {held} tokens: it can be rewound to 0..{held}, not to {length!r}")
        self._lengths[row] = length
        del self._tokens[row][length:]
        if self._tainted[row] and length == 0:
            self._wipe(row, 0)
            self._tainted[row] = False

    def fork(self, source: int, target: int) -> None:
        """Make row ``target`` a copy of row ``source``."""
        source, target = self._row(source), self._row(target)
        if source == target:
            return
        self.rewind(target)
        length = int(self._lengths[source])
        for array in self._cache.values():
            array[target, :, :length] = array[source, :, :length]
        self._lengths[target] = length
        self._tokens[target] = list(self._tokens[source])
        self._tainted[target] = self._tainted[source]

    # -------------------------------------------------------------------------------------------------------- running

    def _prefill_chunk(self, row: int, ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> Logits:
        inputs = {
            "input_ids": ids[None],
            "num_tokens": np.array([len(ids)], np.int32),
            "logit_positions": np.ascontiguousarray(positions[None]),
            "past_length": self._lengths[row : row + 1].copy(),
        }
        run = self._bind(self._programs.prefill, slice(row, row + 1), inputs, (1, len(positions), self._vocabulary))
        self._programs.prefill.run_with_iobinding(run.binding)
        self._note(row, ids.tolist())
        self._lengths[row] += len(ids)
        logits: Logits = run.logits[0]
        return logits

    def _note(self, row: int, tokens: list[int]) -> None:
        """Only ``_lengths`` says what counts, so that Ctrl-C amid a step leaves nothing half done."""
        self._tokens[row][self._lengths[row] :] = tokens

    def _bind_decode(self) -> _Run:
        """What a decode step reads and writes stays in place until the cache grows."""
        inputs = {"input_ids": np.zeros((self.rows, 1), np.int32), "past_length": np.zeros(self.rows, np.int32)}
        if self._programs.decode:
            return self._bind(self._programs.decode, slice(None), inputs, (self.rows, self._vocabulary))
        inputs |= {
            "num_tokens": np.ones(self.rows, np.int32),
            "logit_positions": np.zeros((self.rows, 1), np.int32),
        }
        return self._bind(self._programs.prefill, slice(None), inputs, (self.rows, 1, self._vocabulary))

    def _bind(
        self,
        program: ort.InferenceSession,
        rows: slice,
        inputs: Mapping[str, npt.NDArray[np.int32]],
        logits_shape: tuple[int, ...],
    ) -> _Run:
        binding = program.io_binding()
        run = _Run(binding, inputs, np.empty(logits_shape, np.float32), np.empty_like(inputs["past_length"]))
        for name, array in inputs.items():
            _bind_input(binding, name, array)
        for name, array in self._cache.items():
            _bind_input(binding, f"past_key_values.{name}", array[rows])
            _bind_output(binding, f"present.{name}", array[rows])
        _bind_output(binding, "logits", run.logits)
        _bind_output(binding, "present_length", run.present_length)
        return run

    # --------------------------------------------------------------------------------------------------------- memory

    def _allocate(self, capacity: int) -> None:
        """Fresh memory for the cache; it starts as zeros, because unused slots must be finite."""
        layout = self._programs.manifest.cache
        shape = (self.rows, layout.heads, capacity, layout.head_size)
        names = [f"{layer}.{part}" for layer in range(layout.layers) for part in ("key", "value")]
        self._cache = {name: np.zeros(shape, layout.dtype) for name in names}
        self._decode_run = self._bind_decode()

    def _make_room(self, row: int, length: int, more: int) -> None:
        needed = length + more
        if needed > self.limit:
            raise ValueError(
                f"row {row} holds {length} tokens and has no room for {more} more: "
                f"{self.limit} is all it can hold ({self._limit_name()})"
            )
        if needed > self.capacity:
            self._grow(needed)

    def _limit_name(self) -> str:
        most = self._programs.manifest.max_context
        return "the artifact's max_context" if self.limit == most else "the session's capacity"

    def _grow(self, needed: int) -> None:
        """Double until there is room, one array at a time so that both sizes are never held of all of them."""
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        capacity, used = min(capacity, self.limit), int(self._lengths.max())
        for name, old in self._cache.items():
            shape = (*old.shape[:2], capacity, old.shape[3])
            new = np.zeros(shape, old.dtype)
            new[:, :, :used] = old[:, :, :used]
            self._cache[name] = new
        self._decode_run = self._bind_decode()

    # --------------------------------------------------------------------------------------------- what is not finite

    def _refuse_non_finite(self, stepping: npt.NDArray[np.intp], logits: Logits) -> None:
        finite = np.asarray(np.isfinite(logits).all(axis=1))
        if bad := stepping[~finite].tolist():
            before = [int(self._lengths[row]) - 1 for row in bad]
            for row, length in zip(bad, before, strict=True):
                self._undo(row, length)
            raise NonFiniteLogits(bad, before, "a decode step", logits)

    def _undo(self, row: int, length: int) -> None:
        self._tainted[row] = True
        self.rewind(row, length)
        self._wipe(row, length)

    def _wipe(self, row: int, first: int) -> None:
        """Kernels that read the whole buffer multiply unused slots by zero, and 0 · NaN is NaN."""
        for array in self._cache.values():
            array[row, :, first:] = 0

    # ------------------------------------------------------------------------------------------------------- checking

    def _row(self, row: int) -> int:
        if not isinstance(row, int | np.integer) or not 0 <= row < self.rows:
            raise ValueError(f"there is no row {row!r}: this session has rows 0..{self.rows - 1}")
        return int(row)

    def _stepping(self, rows: Sequence[int] | None) -> npt.NDArray[np.intp]:
        if rows is None:
            return np.arange(self.rows)
        stepping = np.array([self._row(row) for row in rows], np.intp)
        if len(set(stepping.tolist())) != len(stepping):
            raise ValueError(f"a row can take one step at a time: {list(rows)} names one twice")
        return stepping


def token_ids(tokens: Tokens, vocabulary: int) -> npt.NDArray[np.int32]:
    """[T] int32. Raises ValueError for anything that is not a list of ids with a row in the embedding."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # ragged
        ids = np.empty(0, object)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat, non-empty sequence of token ids, not {tokens!r:.80}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if outside.size:
        raise ValueError(
            f"token id {ids[outside[0]]} (at {outside[0]}) is not in the model: its embedding has rows "
            f"0..{vocabulary - 1}. The tokenizer may have more tokens than the model was trained with"
        )
    return np.ascontiguousarray(ids, np.int32)


def _positions(wanted: Literal["last", "all"] | Sequence[int], count: int) -> npt.NDArray[np.int32]:
    if isinstance(wanted, str):
        if wanted not in ("last", "all"):
            raise ValueError(f"logits must be 'last', 'all' or positions, not {wanted!r}")
        return np.arange(count - 1 if wanted == "last" else 0, count, dtype=np.int32)
    positions = np.array(wanted, np.int64)
    if positions.ndim != 1 or ((positions < 0) | (positions >= count)).any():
        raise ValueError(f"logits are wanted at {list(wanted)}, but there are only the positions 0..{count - 1}")
    return positions.astype(np.int32)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _bind_input(binding: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(binding: ort.IOBinding, name: str, array: npt.NDArray[Any]) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
