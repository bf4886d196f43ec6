"""The safetensors writer: what the safetensors library reads back is what was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from diptych.export.weights import Spec, layout, write

Array = NDArray[np.generic]

DTYPES = {
    **{name: np.dtype(name) for name in ("float32", "float16", "float64", "int8", "uint8", "int32", "int64", "bool")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
CODES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "bool": "BOOL"}


def code(dtype: str) -> str:
    kind, bits = dtype.rstrip("0123456789"), dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return CODES.get(dtype) or {"float": "F", "int": "I", "uint": "U"}[kind] + bits


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any dtype, any shape with scalars and empties, sometimes transposed."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    content = draw(st.binary(min_size=(size := int(np.prod(shape)) * dtype.itemsize), max_size=size))
    if dtype == np.dtype(bool):
        content = bytes(byte & 1 for byte in content)
    array = np.frombuffer(content, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable())


def specs_of(tensors: dict[str, Array]) -> dict[str, Spec]:
    return {name: Spec(array.dtype.name, array.shape) for name, array in tensors.items()}


@given(tensors=st.dictionaries(names, arrays(), max_size=6), data=st.data())
def test_safetensors_reads_back_what_was_written(
    tensors: dict[str, Array], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    order = data.draw(st.permutations(sorted(tensors)))
    slots = write(path, specs_of(tensors), ((name, tensors[name]) for name in order))
    content = path.read_bytes()
    found: dict[str, dict[str, Any]] = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    assert set(found) == set(tensors) == set(slots)
    for name, array in tensors.items():
        assert bytes(found[name]["data"]) == array.tobytes()
        assert tuple(found[name]["shape"]) == array.shape
        assert found[name]["dtype"] == code(array.dtype.name)
        slot = slots[name]
        assert content[slot.offset : slot.offset + slot.length] == array.tobytes()
        assert slot.offset % array.dtype.itemsize == 0


def test_values_start_aligned_and_order_of_arrival_changes_nothing(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {
        "b": np.arange(3, dtype=np.uint8),
        "é": np.array(2.5, np.float32),
        "a": np.ones((2, 3), np.float32),
    }
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path, order in zip(paths, (list(tensors), list(reversed(tensors))), strict=True):
        slots = write(path, specs_of(tensors), ((name, tensors[name]) for name in order))
        assert min(slot.offset for slot in slots.values()) % 64 == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_big_endian_value_is_written_little_endian(tmp_path: Path) -> None:
    value = np.array([1.0, 2.0], ">f4")
    write(tmp_path / "w", {"x": Spec("float32", (2,))}, [("x", value)])
    assert (tmp_path / "w").read_bytes().endswith(value.astype("<f4").tobytes())


def test_a_transposed_tensor_larger_than_a_piece(tmp_path: Path) -> None:
    value = np.arange(5_000_000, dtype=np.float32).reshape(1000, 5000).T
    slots = write(tmp_path / "w", {"x": Spec("float32", (5000, 1000))}, [("x", value)])
    stored = np.fromfile(tmp_path / "w", np.float32, offset=slots["x"].offset)
    np.testing.assert_array_equal(stored.reshape(5000, 1000), value)


def test_one_value_is_alive_at_a_time(tmp_path: Path) -> None:
    class Counted(np.ndarray):
        alive = 0

        def __del__(self) -> None:
            Counted.alive -= self.base is None

    def values() -> Iterator[tuple[str, Array]]:
        for i in range(3):
            assert Counted.alive == 0, "the previous tensor is still in memory"
            Counted.alive += 1
            yield str(i), np.ndarray.__new__(Counted, (4,), np.float32)

    write(tmp_path / "w", {str(i): Spec("float32", (4,)) for i in range(3)}, values())


ONE = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("specs", "values", "message"),
    [
        ({"x": Spec("float32", (2,))}, [], "no value came for x"),
        ({"x": Spec("float32", (2,))}, [("x", ONE), ("x", ONE)], "'x' came twice"),
        ({}, [("x", ONE)], "'x' was not announced"),
        ({"x": Spec("float32", (3,))}, [("x", ONE)], r"announced as float32 \(3,\), came as float32 \(2,\)"),
        ({"x": Spec("float16", (2,))}, [("x", ONE)], "announced as float16"),
        ({"x": Spec("complex64", (2,))}, [("x", ONE)], "no dtype 'complex64'"),
        ({"__metadata__": Spec("float32", (2,))}, [("__metadata__", ONE)], "keeps that name"),
    ],
)
def test_a_wrong_value_is_an_error(
    specs: dict[str, Spec], values: list[tuple[str, Array]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "w", specs, values)


def test_places_are_known_before_any_value() -> None:
    """An 8 TB file costs nothing to lay out."""
    _, slots = layout({"a": Spec("float32", (1 << 40, 2)), "b": Spec("float32", (1,))})
    assert slots["b"].offset - slots["a"].offset == 1 << 43
