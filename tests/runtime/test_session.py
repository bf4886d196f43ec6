"""Rows, lengths and the cache: however tokens arrive, the logits are those of one pass over the whole text."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scripted_artifact
from diptych.runtime import LanguageModel, Session, load, session
from diptych.runtime.session import NonFiniteLogits

Load = Callable[..., LanguageModel]

# What may differ: products are summed in another order when more or fewer tokens come at once.
TOLERANCE = 2e-5
VARIANTS = [
    ("llama", "ort", "two"),
    ("llama", "ort", "one"),
    ("llama", "onnx", "two"),
    ("llama", "primitive", "two"),
    ("gemma3", "ort", "two"),  # windows of 16
    ("gemma3", "onnx", "one"),
]
TOKENS = np.random.default_rng(7).integers(3, 97, 200).tolist()


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def variant(request: pytest.FixtureRequest, load_variant: Load) -> LanguageModel:
    return load_variant(*request.param)


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max(initial=0) < TOLERANCE)


@pytest.fixture(scope="module")
def expected(variant: LanguageModel) -> np.ndarray:
    """[200, V] from one pass."""
    return variant.session(capacity=200).prefill(0, TOKENS, logits="all")


@pytest.mark.parametrize("sizes", [[1] * 5, [2, 3, 1], [63, 1, 64, 65], [100, 100], [199, 1]], ids=str)
def test_tokens_may_come_in_any_pieces(variant: LanguageModel, expected: np.ndarray, sizes: Sequence[int]) -> None:
    row = variant.session()
    done = 0
    for size in sizes:
        found = row.prefill(0, TOKENS[done : done + size], logits="all")
        assert close(found, expected[done : done + size])
        done += size
    assert row.lengths.tolist() == [done]
    assert row.tokens(0) == TOKENS[:done]


def test_decode_is_prefill_of_one_token(variant: LanguageModel, expected: np.ndarray) -> None:
    row = variant.session(capacity=200)
    row.prefill(0, TOKENS[:1])
    for position in range(1, 200):  # past 1 to capacity - 1
        assert close(row.decode([TOKENS[position]])[0], expected[position])


@pytest.mark.parametrize("positions", [[0], [4, 1, 1], [], range(10)])
def test_logits_at_any_positions(variant: LanguageModel, expected: np.ndarray, positions: Sequence[int]) -> None:
    found = variant.session().prefill(0, TOKENS[:10], logits=positions)
    assert found.shape == (len(positions), variant.manifest.vocabulary.size)
    assert close(found, expected[list(positions)])


def test_long_prompts_are_computed_in_pieces(
    variant: LanguageModel, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CHUNK", 48)
    done: list[int] = []
    row = variant.session(capacity=200)
    found = row.prefill(0, TOKENS, logits=[150, 3, 199, 47, 48], on_chunk=done.append)
    assert done == [48, 96, 144, 192, 200]
    assert close(found, expected[[150, 3, 199, 47, 48]])
    assert close(variant.session().prefill(0, TOKENS), expected[-1:])


def test_a_prompt_can_be_stopped_between_two_pieces(
    variant: LanguageModel, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CHUNK", 48)

    def stop(done: int) -> None:
        if done == 96:
            raise KeyboardInterrupt

    row = variant.session()
    with pytest.raises(KeyboardInterrupt):
        row.prefill(0, TOKENS, on_chunk=stop)
    assert row.lengths.tolist() == [96]
    assert close(row.prefill(0, TOKENS[96:98]), expected[97:98])


def test_rows_of_different_lengths_do_not_see_each_other(variant: LanguageModel, expected: np.ndarray) -> None:
    rows = variant.session(rows=3)
    for row, length in enumerate((3, 17, 40)):
        assert close(rows.prefill(row, TOKENS[:length])[0], expected[length - 1])
    for _ in range(20):
        before = rows.lengths.copy()
        found = rows.decode([TOKENS[length] for length in before])
        assert close(found, expected[before])
    # several tokens behind decode steps, in one of the rows
    assert close(rows.prefill(1, TOKENS[37:50], logits="all"), expected[37:50])
    assert close(rows.decode([TOKENS[length] for length in rows.lengths]), expected[rows.lengths - 1])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_any_number_of_rows(variant: LanguageModel, expected: np.ndarray, rows: int) -> None:
    batch = variant.session(rows=rows)
    for row in range(rows):
        batch.prefill(row, TOKENS[: row + 1])
    assert close(batch.decode(TOKENS[1 : rows + 1]), expected[1 : rows + 1])


def test_some_rows_may_wait(variant: LanguageModel, expected: np.ndarray) -> None:
    rows = variant.session(rows=3)
    for row, length in enumerate((5, 9, 2)):
        rows.prefill(row, TOKENS[:length])
    for _ in range(4):
        stepping = [2, 0]
        found = rows.decode([TOKENS[rows.lengths[row]] for row in stepping], stepping)
        assert close(found, expected[rows.lengths[stepping] - 1])
    assert rows.lengths.tolist() == [9, 9, 6]
    assert close(rows.decode([TOKENS[length] for length in rows.lengths]), expected[[9, 9, 6]])


def test_more_tokens_after_steps_in_two_rows(variant: LanguageModel, expected: np.ndarray) -> None:
    """A second turn of two conversations: prompts of different lengths, steps together, then prompts again."""
    both = variant.session(rows=2)
    starts, (first, second) = (0, 9), (40, 17)
    lengths = [first, second]
    other = variant.session(capacity=200).prefill(0, TOKENS[starts[1] :], logits="all")
    want = (expected, other)
    for row in range(2):
        both.prefill(row, TOKENS[starts[row] : starts[row] + lengths[row]])
    for step in range(3):
        found = both.decode([TOKENS[starts[row] + lengths[row] + step] for row in range(2)])
        assert all(close(found[row], want[row][lengths[row] + step]) for row in range(2))
    for row, more in ((1, 30), (0, 5)):
        at = lengths[row] + 3
        found = both.prefill(row, TOKENS[starts[row] + at : starts[row] + at + more], logits="all")
        assert close(found, want[row][at : at + more])
    assert both.lengths.tolist() == [first + 8, second + 33]


@pytest.mark.parametrize("to", [0, 7, 15])
def test_rewinding(variant: LanguageModel, expected: np.ndarray, to: int) -> None:
    row = variant.session()
    row.prefill(0, TOKENS[:10])
    for token in (9, 9, 9, 9, 9):
        row.decode([token])
    for _ in range(2):  # twice is as good as once
        row.rewind(0, to)
        row.rewind(0, to)
        assert row.tokens(0) == (TOKENS[:10] + [9] * 5)[:to]
        row.rewind(0, min(to, 10))
        rest = TOKENS[min(to, 10) : 60]  # past the window of 16
        assert close(row.prefill(0, rest, logits="all"), expected[min(to, 10) : 60])
        row.rewind(0, min(to, 10))
        row.prefill(0, [9] * (15 - min(to, 10)))


def test_rewinding_across_a_window(variant: LanguageModel, expected: np.ndarray) -> None:
    row = variant.session()
    row.prefill(0, TOKENS[:100])
    row.rewind(0, 30)
    for position in range(30, 60):
        assert close(row.decode([TOKENS[position]])[0], expected[position])


def test_forked_rows_go_their_own_ways(variant: LanguageModel, expected: np.ndarray) -> None:
    rows = variant.session(rows=2)
    rows.prefill(1, [9] * 40)
    rows.prefill(0, TOKENS[:20])
    rows.fork(0, 1)
    rows.fork(0, 0)
    assert rows.tokens(1) == TOKENS[:20]
    assert close(rows.decode([TOKENS[20], 9])[0], expected[20])
    rows.rewind(1, 20)
    assert close(rows.decode([9, TOKENS[20]])[1], expected[20])


def test_the_cache_grows_by_doubling(variant: LanguageModel, expected: np.ndarray, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "FIRST_CAPACITY", 8)
    rows = variant.session(rows=2)
    assert rows.capacity == 8
    rows.prefill(0, TOKENS[:5])
    rows.prefill(1, TOKENS[:8])
    capacities = []
    while rows.lengths[1] < 150:
        found = rows.decode([TOKENS[length] for length in rows.lengths])
        assert close(found, expected[rows.lengths - 1])
        capacities.append(rows.capacity)
    assert sorted(set(capacities)) == [16, 32, 64, 128, 256]
    assert rows.room(1) == 256 - 150


def test_growth_ends_at_what_the_artifact_holds(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FIRST_CAPACITY", 100)
    row = model.session()
    row.prefill(0, TOKENS)
    assert row.capacity == 200
    row.prefill(0, TOKENS[:56])
    assert (row.capacity, row.room(0)) == (256, 0)
    before = row.cache["1.value"].copy()
    message = r"holds 256 tokens and has no room for 1 more: 256 is all .*max_context"
    with pytest.raises(ValueError, match=message):
        row.decode([5])
    with pytest.raises(ValueError, match=message):
        row.prefill(0, [5])
    assert row.lengths.tolist() == [256]
    assert np.array_equal(row.cache["1.value"], before)


def test_a_given_capacity_is_fixed(model: LanguageModel) -> None:
    row = model.session(capacity=32)
    row.prefill(0, TOKENS[:30])
    row.decode([5])
    row.decode([5])
    last = row.cache["0.key"][0, :, 31].copy()
    with pytest.raises(ValueError, match=r"32 is all it can hold .the session's capacity"):
        row.decode([5])
    assert (row.capacity, row.lengths.tolist()) == (32, [32])
    assert np.array_equal(row.cache["0.key"][0, :, 31], last)
    with pytest.raises(ValueError, match="no room for 33 more"):
        model.session(capacity=32).prefill(0, TOKENS[:33])
    assert model.session(capacity=32).prefill(0, TOKENS[:32]).shape == (1, 97)


def test_a_full_row_cannot_wait(model: LanguageModel) -> None:
    rows = model.session(rows=2, capacity=8)
    rows.prefill(0, TOKENS[:8])
    rows.prefill(1, TOKENS[:3])
    with pytest.raises(ValueError, match="row 0 holds 8 tokens"):
        rows.decode([5], [1])
    rows.rewind(0)
    assert rows.decode([5], [1]).shape == (1, 97)


@pytest.mark.parametrize("sessions", ["two", "one"])
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_steps_write_into_the_cache_where_it_lies(load_variant: Load, target: str, sessions: str) -> None:
    row = load_variant("llama", target, sessions).session(rows=2)
    places = {name: array.ctypes.data for name, array in row.cache.items()}
    row.prefill(0, TOKENS[:10])
    row.prefill(1, TOKENS[:4])
    for _ in range(5):
        before = {name: array.copy() for name, array in row.cache.items()}
        at = row.lengths.copy()
        row.decode([5, 6])
        for name, array in row.cache.items():
            changed = np.argwhere((array != before[name]).any(axis=(1, 3))).tolist()
            assert changed == [[0, at[0]], [1, at[1]]]
    assert places == {name: array.ctypes.data for name, array in row.cache.items()}


MEASURE = """
import resource, sys
import numpy as np
from diptych.runtime import load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = load(sys.argv[1], threads=1)
rows = model.session(rows=1500, capacity=256)
for name, array in rows._memory.cache.items():
    array[:] = 0.5  # touch it: memory is given only then
rows.prefill(0, [5, 6, 7])
before = peak()
for _ in range(3):
    rows.decode([5] * 1500)
print(sum(array.nbytes for array in rows.cache.values()) / 2**20, peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the resource module")
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_steps_need_no_memory_of_the_size_of_the_cache(load_variant: Load, target: str) -> None:
    folder = load_variant("llama", target).manifest.folder
    output = subprocess.check_output([sys.executable, "-c", MEASURE, str(folder)], text=True)
    cache, grown = map(float, output.split())
    assert cache > 180  # MB
    assert grown < cache / 8  # one of the four arrays would be a quarter


def test_views_cannot_be_written_to(model: LanguageModel) -> None:
    row = model.session()
    for array in (row.lengths, row.cache["0.key"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    row.prefill(0, [5, 6])
    row.rewind(0, row.lengths[0] - 2)  # numbers may be NumPy's
    row.tokens(0).append(5)
    assert row.tokens(0) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "non-empty sequence of token ids"),
        ([[]], "flat, non-empty"),
        ([[1, 2]], "flat, non-empty"),
        ([[1], [1, 2]], "flat, non-empty"),
        ([1.0], "token ids"),
        ([True], "token ids"),
        (["a"], "token ids"),
        (5, "flat, non-empty"),
        ([2**70], "token ids"),
        ([5, 97], r"token id 97 \(at 1\) is not in the model: its embedding has rows 0\.\.96"),
        ([-1], "token id -1"),
        (np.array([2**40]), "is not in the model"),
    ],
)
def test_what_is_no_token_is_refused(model: LanguageModel, tokens: Any, message: str) -> None:
    row = model.session()
    with pytest.raises(ValueError, match=message):
        row.prefill(0, tokens)
    assert row.lengths.tolist() == [0]
    assert row.prefill(0, [5]).shape == (1, 97)


def test_tokens_may_be_an_array(model: LanguageModel) -> None:
    for dtype in (np.int64, np.uint8, np.int32):
        found = model.session().prefill(0, np.array(TOKENS[:9], dtype))
        assert np.array_equal(found, model.session().prefill(0, TOKENS[:9]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.prefill(2, [5]), r"no row 2: this session has rows 0\.\.1"),
        (lambda s: s.prefill(-1, [5]), "no row -1"),
        (lambda s: s.prefill(0, [5, 6], logits=[2]), r"only the positions 0\.\.1"),
        (lambda s: s.prefill(0, [5, 6], logits=[-1]), r"only the positions 0\.\.1"),
        (lambda s: s.prefill(0, [5, 6], logits=[0.5]), r"only the positions 0\.\.1"),
        (lambda s: s.prefill(0, [5, 6], logits=[[0]]), r"only the positions 0\.\.1"),
        (lambda s: s.prefill(True, [5]), "no row True"),
        (lambda s: s.prefill(0, [5, 6], logits="first"), "'last', 'all' or positions, not 'first'"),
        (lambda s: s.decode([5]), "one token for each of 2 rows, not 1"),
        (lambda s: s.decode([5, 5], [0, 0]), "names one twice"),
        (lambda s: s.decode([5], [2]), "no row 2"),
        (lambda s: s.decode([5, 97]), "not in the model"),
        (lambda s: s.rewind(0, 1), r"can be rewound to 0\.\.0, not to 1"),
        (lambda s: s.rewind(0, -1), "not to -1"),
        (lambda s: s.fork(0, 2), "no row 2"),
    ],
)
def test_wrong_calls_change_nothing(model: LanguageModel, call: Any, message: str) -> None:
    rows = model.session(rows=2)
    with pytest.raises(ValueError, match=message):
        call(rows)
    assert rows.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows must be an integer of at least 1"),
        ({"rows": 1.0}, "rows must be"),
        ({"capacity": 0}, "capacity must be an integer from 1 to the artifact's 256"),
        ({"capacity": 257}, "capacity must be"),
    ],
)
def test_wrong_sizes_are_refused(model: LanguageModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.session(**arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("name", ["layers.0.mlp.down", "layers.1.attn.out", "layers.1.mlp.gate_up"])
def test_one_broken_weight_never_gives_a_token(artifact: Path, name: str, value: float) -> None:
    """1e38 is finite, and so is what comes out: a norm makes zeros of it. The first token would win."""
    path = artifact / "weights.safetensors"
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    start = 8 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
    struct.pack_into("<f", content, start, value)
    path.write_bytes(content)
    scripted_artifact.resign(artifact)
    broken = load(artifact, threads=1)
    with pytest.raises(NonFiniteLogits, match="row 0 after 0 tokens"):
        broken.generate(TOKENS[:20])


BROKEN = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> LanguageModel:
    """Position 5 is not finite, in the logits and in the cache."""
    folder = scripted_artifact.write(tmp_path, [3, 4, 5], vocabulary=9, broken={5: BROKEN[request.param]})
    return load(folder, threads=1)


def sound(rows: Session) -> bool:
    return all(np.isfinite(array).all() for array in rows.cache.values())


def test_decode_refuses_logits_that_are_not_finite_and_other_rows_go_on(broken: LanguageModel) -> None:
    rows = broken.session(rows=3)
    for row, length in enumerate((2, 5, 3)):
        rows.prefill(row, [1] * length)
    with pytest.raises(NonFiniteLogits, match=r"a decode step gave logits .*row 1 after 5 tokens") as error:
        rows.decode([2, 2, 2])
    assert (error.value.rows, error.value.lengths) == ((1,), (5,))
    assert error.value.logits[[0, 2]].argmax(axis=1).tolist() == [5, 5]
    assert rows.lengths.tolist() == [3, 5, 4]
    assert rows.tokens(1) == [1] * 5
    rows.rewind(1)
    assert sound(rows)
    assert rows.prefill(1, [1]).argmax() == 3
    assert rows.decode([2, 2, 2]).argmax(axis=1).tolist() == [5, 4, 5]


def test_a_row_that_waits_does_not_matter(broken: LanguageModel) -> None:
    rows = broken.session(rows=2)
    rows.prefill(0, [1] * 5)
    rows.prefill(1, [1])
    assert rows.decode([2], [1]).argmax(axis=1).tolist() == [4]


def test_prefill_refuses_logits_that_are_not_finite(broken: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CHUNK", 5)  # the first ends where it breaks
    rows = broken.session(rows=2)
    rows.prefill(0, [1])
    with pytest.raises(NonFiniteLogits, match=r"prefill of 20 tokens gave .*row 0 after 1 tokens"):
        rows.prefill(0, [1] * 20, logits=[19])  # far behind, and yet noticed
    assert rows.lengths.tolist() == [1, 0]
    rows.rewind(0)
    assert sound(rows)
    assert rows.prefill(0, [1, 1]).argmax() == 4
