"""Finding where ONNX files keep their weights, however deep, without the onnx package, and without trusting them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from diptych.runtime.external_data import external_locations

Paths = pytest.TempPathFactory


def external(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=location, data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("offset", "64"), ("location", location), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def everywhere(names: list[str]) -> onnx.ModelProto:
    """A model with an external tensor at every place of the format that can have one, named by ``names`` in turn."""
    a, b, c, d, e, f, g, h = map(external, names)
    sparse = onnx.SparseTensorProto(values=b, indices=c)
    inner = helper.make_graph([], "inner", [], [], initializer=[d])
    attributes = [
        helper.make_attribute("one", e),
        onnx.AttributeProto(name="several", type=onnx.AttributeProto.TENSORS, tensors=[f]),
        helper.make_attribute("body", inner),
        onnx.AttributeProto(name="sparse", sparse_tensor=onnx.SparseTensorProto(values=g)),
    ]
    node = onnx.NodeProto(op_type="If", attribute=attributes)
    graph = onnx.GraphProto(name="g", node=[node], initializer=[a], sparse_initializer=[sparse])
    function = onnx.FunctionProto(name="f", node=[onnx.NodeProto(attribute=[helper.make_attribute("x", h)])])
    return onnx.ModelProto(ir_version=10, graph=graph, functions=[function])


def locations(path: Path, content: bytes) -> set[str]:
    path.write_bytes(content)
    return external_locations(path)


def test_every_place_is_looked_at(tmp_path: Path) -> None:
    names = ["a.bin", "é/b", "../c", "/d", "", "f" * 300, "g", "h"]
    assert locations(tmp_path / "m.onnx", everywhere(names).SerializeToString()) == set(names)


def test_what_is_inline_has_no_place(tmp_path: Path) -> None:
    graph = helper.make_graph([], "g", [], [], initializer=[helper.make_tensor("location", 1, [2], [1.0, 2.0])])
    assert locations(tmp_path / "m.onnx", helper.make_model(graph).SerializeToString()) == set()


def test_parts_of_one_message_may_come_apart(tmp_path: Path) -> None:
    """Protobuf merges repeated occurrences of one field: all of them count."""
    one = onnx.ModelProto(graph=onnx.GraphProto(initializer=[external("first")]))
    other = onnx.ModelProto(graph=onnx.GraphProto(initializer=[external("second")]))
    both = one.SerializeToString() + other.SerializeToString()
    assert {t.name for t in onnx.ModelProto.FromString(both).graph.initializer} == {"first", "second"}
    assert locations(tmp_path / "m.onnx", both) == {"first", "second"}


def test_a_field_number_that_others_cut_short_is_refused(tmp_path: Path) -> None:
    """A tag with bits above the 32nd is field 7 to some parsers, and none that we would look at."""
    graph = onnx.GraphProto(initializer=[external("../secret")]).SerializeToString()
    tag = (7 << 3 | 2) | 1 << 33
    encoded = bytes((tag >> shift & 0x7F) | (0x80 if shift < 28 else 0) for shift in range(0, 35, 7))
    with pytest.raises(ValueError, match="not a valid ONNX file"):
        locations(tmp_path / "m.onnx", encoded + bytes([len(graph)]) + graph)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    content = external("deep").SerializeToString()
    for number in (5, *(6, 5, 1) * 60):  # initializer, then graph of an attribute of a node
        content = bytes([number << 3 | 2]) + _varint(len(content)) + content
    with pytest.raises(ValueError, match="nested too deeply"):
        locations(tmp_path / "m.onnx", bytes([7 << 3 | 2]) + _varint(len(content)) + content)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_give_places_or_a_clear_error(tmp_path: Path, content: bytes) -> None:
    try:
        assert isinstance(locations(tmp_path / "m.onnx", content), set)
    except ValueError as error:
        assert "m.onnx is" in str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000), value=st.integers(0, 255))
def test_whatever_protobuf_accepts_hides_nothing(tmp_path: Path, cut: int, flip: int, value: int) -> None:
    """Of a damaged file that the reference parser still reads, we see every place that it sees, or refuse it."""
    content = bytearray(everywhere(["a", "b", "c", "d", "e", "f", "g", "h"]).SerializeToString())
    content[flip % len(content)] = value
    del content[cut % len(content) + 1 :]
    try:
        parsed = onnx.ModelProto.FromString(bytes(content))
    except Exception:
        return
    seen = {entry.value for t in parsed.graph.initializer for entry in t.external_data if entry.key == "location"}
    with contextlib.suppress(ValueError):
        assert seen <= locations(tmp_path / "m.onnx", bytes(content))
