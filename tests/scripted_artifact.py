"""Artifacts whose model says what a test wants: the token after position p is ``script[p]``, whatever came."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

HEAD_SIZE = 4
MEMORY: Sequence[int | str] = ["B", 1, "S", HEAD_SIZE]


def write(
    folder: Path,
    script: Sequence[int],
    *,
    vocabulary: int,
    files: Mapping[str, str] | None = None,
    eos: Sequence[int] = (),
    broken: Mapping[int, float] | None = None,
    max_context: int = 64,
) -> Path:
    """Write an artifact; returns its folder.

    ``files`` are the tokenizer's.  Behind the script its last token repeats.  ``broken`` maps positions to what their
    logits and everything in the row's cache become there, such as NaN.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.array([*script, *[script[-1]] * max_context][:max_context], np.int64)
    added = np.zeros(max_context, np.float32)
    for position, value in (broken or {}).items():
        added[position] = value
    for program in ("prefill", "decode"):
        ir.save(_graph(program, tokens, added, vocabulary), folder / f"{program}.onnx")
    for name, text in (files or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    manifest = _manifest(folder, vocabulary, eos, max_context)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def resign(folder: Path, **changes: Any) -> None:
    """State the files as they are now, with other top-level fields if given."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} - {path.name}
    manifest["files"] = {name: _describe(folder / name) for name in sorted(names)}
    path.write_text(json.dumps(manifest | changes), encoding="utf-8")


def _describe(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _manifest(folder: Path, vocabulary: int, eos: Sequence[int], max_context: int) -> dict[str, Any]:
    parts = ("0.key", "0.value")
    inputs = [_io("past_length", ["B"]), *[_io(f"past_key_values.{name}", MEMORY, "float32") for name in parts]]
    outputs = [_io("present_length", ["B"]), *[_io(f"present.{name}", MEMORY, "float32") for name in parts]]
    several = [_io("input_ids", ["B", "T"]), _io("num_tokens", ["B"]), _io("logit_positions", ["B", "P"])]
    return {
        "schema_version": 1,
        "name": "scripted",
        "diptych_version": "0.1.0",
        "target": "onnx",
        "device": "cpu",
        "dtype": "float32",
        "max_context": max_context,
        "config": {},
        "cache": {"layers": 1, "heads": 1, "head_size": HEAD_SIZE, "dtype": "float32"},
        "vocabulary": {"size": vocabulary, "eos_token_ids": list(eos), "bos_token_id": None, "pad_token_id": None},
        "programs": {
            "prefill": {
                "file": "prefill.onnx",
                "inputs": [*several, *inputs],
                "outputs": [_io("logits", ["B", "P", vocabulary], "float32"), *outputs],
            },
            "decode": {
                "file": "decode.onnx",
                "inputs": [_io("input_ids", ["B", 1]), *inputs],
                "outputs": [_io("logits", ["B", vocabulary], "float32"), *outputs],
            },
        },
        "files": {path.name: _describe(path) for path in sorted(folder.iterdir()) if path.name != "manifest.json"},
        "tensors": {},
        "source": {},
        "tools": {"onnxruntime": "1.32.0"},
        "verification": {"status": "skipped", "checks": []},
    }


def _io(name: str, shape: Sequence[int | str], dtype: str = "int32") -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape)}


def _graph(program: str, tokens: np.ndarray, added: np.ndarray, vocabulary: int) -> ir.Model:
    """logits = 8 · one_hot(script[position]) + added[position]; present = past + added[last position]."""
    prefill = program == "prefill"
    graph = _Graph(tokens, added, vocabulary)
    graph.input("input_ids", ["B", "T" if prefill else 1])
    past = graph.op("Cast", graph.input("past_length", ["B"]), to=ir.DataType.INT64)
    one = graph.constant("one", np.array([1], np.int64))
    if prefill:
        count = graph.op("Cast", graph.input("num_tokens", ["B"]), to=ir.DataType.INT64)
        positions = graph.op("Cast", graph.input("logit_positions", ["B", "P"]), to=ir.DataType.INT64)
        asked = graph.op("Add", graph.op("Unsqueeze", past, one), positions)
    else:
        count, asked = one, past
    length = graph.op("Add", past, count)
    graph.output("logits", graph.logits(asked), ["B", "P", vocabulary] if prefill else ["B", vocabulary])
    graph.output("present_length", graph.op("Cast", length, to=ir.DataType.INT32), ["B"], ir.DataType.INT32)
    last = graph.op("Gather", graph.values["added"], graph.op("Sub", length, one))
    change = graph.op("Unsqueeze", last, graph.constant("axes", np.array([1, 2, 3], np.int64)))
    for part in ("key", "value"):
        cached = graph.input(f"past_key_values.0.{part}", MEMORY, ir.DataType.FLOAT)
        graph.output(f"present.0.{part}", graph.op("Add", cached, change), MEMORY)
    return graph.model(program)


class _Graph:
    def __init__(self, tokens: np.ndarray, added: np.ndarray, vocabulary: int) -> None:
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.values: dict[str, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.constant("script", tokens)
        self.constant("added", added)
        self.constant("vocabulary", np.array(vocabulary, np.int64))
        self.constant("off_on", np.array([0, 8], np.float32))

    def logits(self, positions: ir.Value) -> ir.Value:
        chosen = self.op("Gather", self.values["script"], positions)
        one_hot = self.op("OneHot", chosen, self.values["vocabulary"], self.values["off_on"], axis=-1)
        shift = self.op("Gather", self.values["added"], positions)
        return self.op(
            "Add", one_hot, self.op("Unsqueeze", shift, self.constant("minus_one", np.array([-1], np.int64)))
        )

    def input(self, name: str, shape: Sequence[int | str], dtype: ir.DataType = ir.DataType.INT32) -> ir.Value:
        self.inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype)))
        return self.inputs[-1]

    def output(
        self, name: str, value: ir.Value, shape: Sequence[int | str], dtype: ir.DataType = ir.DataType.FLOAT
    ) -> None:
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(dtype)
        self.outputs.append(value)

    def constant(self, name: str, value: np.ndarray) -> ir.Value:
        tensor, shape = ir.tensor(value, name=name), ir.Shape(value.shape)
        type_ = ir.TensorType(tensor.dtype)
        self.values[name] = ir.Value(name=name, shape=shape, type=type_, const_value=tensor)
        return self.values[name]

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        self.nodes.append(ir.node(op_type, inputs, attributes))
        output: ir.Value = self.nodes[-1].outputs[0]
        output.name = f"{op_type}.{len(self.nodes)}"
        return output

    def model(self, name: str) -> ir.Model:
        graph = ir.Graph(
            self.inputs, self.outputs, nodes=self.nodes, initializers=list(self.values.values()),
            opset_imports={"": 21}, name=name,
        )  # fmt: skip
        return ir.Model(graph, ir_version=10)
