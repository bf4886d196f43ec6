"""Weights in blocks of integers: what they mean, how they are made, and artifacts that hold them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open

import tiny
from diptych.cli.export import Quantize
from diptych.export import quality
from diptych.export.artifact import describe_file
from diptych.export.lowering import TARGETS
from diptych.export.parity import TOLERANCES, verify
from diptych.export.pipeline import ExportReport, export
from diptych.jax_model import blocks, params, quantize, storage
from diptych.jax_model.blocks import FORMATS, Blocks
from diptych.jax_model.calibrate import importance
from diptych.jax_model.decoder import Cache, decode, prefill
from diptych.jax_model.quantize import RECIPES, Recipe
from diptych.jax_model.readers import StoresBlocks, open_checkpoint
from diptych.jax_model.storage import Form
from diptych.runtime.manifest import Manifest
from diptych.runtime.programs import open_programs
from diptych.runtime.session import Session
from diptych.runtime.settings import Settings
from random_models import GEMMA, GLM4, LLAMA, random_params
from reference import families

SEEDS = st.integers(0, 2**32 - 1)
NEW_FORMS = (Form(4, 32, zero_points=True), Form(4, 32), Form(8, 32), Form(4, 16, zero_points=True), Form(2, 16))


def meaning(matrix: Blocks) -> NDArray[np.float32]:
    return np.asarray(blocks.dequantize(matrix.packed, matrix.scale, matrix.shift, matrix.zero, bits=matrix.bits))


# ----------------------------------------------------------------------------------------------------------- the blocks


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 256])
def test_packing_reads_backwards(bits: int, block: int) -> None:
    q = np.random.default_rng(0).integers(0, 1 << bits, (5, 3 * block), np.uint8)
    packed = blocks.pack(q, bits, block)
    assert packed.shape == (5, 3, block * bits // 8)
    assert np.array_equal(blocks.unpack(jnp.asarray(packed), bits).reshape(q.shape), q)


def test_the_first_integer_is_in_the_low_bits() -> None:
    assert blocks.pack(np.array([[1, 2] * 8], np.uint8), 4, 16)[0, 0, 0] == 0x21


# Where a stored block of each format has float16 numbers: other bytes may be anything.
HALVES = {
    "Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_0": (0, 2), "Q4_1": (0, 4), "Q4_K": (0, 4), "Q5_0": (0, 2),
    "Q5_1": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "Q8_0": (0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_a_format_means_what_gguf_says(name: str, seed: int) -> None:
    random, form = np.random.default_rng(seed), FORMATS[name]
    raw = random.integers(0, 256, (3, 2, form.size), np.uint8)
    start, end = HALVES[name]
    raw[..., start:end] = random.normal(size=(3, 2, (end - start) // 2)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(3, -1)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = blocks.from_gguf(raw, name)
    assert (found.bits, found.block, found.shift is not None) == (form.bits, form.block, form.shifted)
    error = np.abs(meaning(found) - expected).reshape(3, -1, form.block).max(-1)
    reach = np.maximum(
        np.abs(found.scale) * 2**form.bits, 0 if found.shift is None else np.abs(found.shift.T) / form.block
    )
    assert (error <= np.spacing(reach.astype(np.float32))).all()


@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_real_models_are_carried_exactly(model: str, request: pytest.FixtureRequest) -> None:
    """The first rows of every tensor; exporting compares all of them."""
    checkpoint = open_checkpoint(request.getfixturevalue(model))
    found = {name: info for name, info in checkpoint.tensors.items() if info.dtype in FORMATS}
    assert len(found) > 100
    assert isinstance(checkpoint, StoresBlocks)
    for name, info in found.items():
        matrix = blocks.from_gguf(np.array(checkpoint.raw(name)[:64]), info.dtype)
        assert np.array_equal(meaning(matrix), checkpoint.read(name, slice(0, 64))), name


# ----------------------------------------------------------------------------------------------------------- quantising


@settings(max_examples=50, deadline=None)
@given(
    SEEDS,
    st.sampled_from(NEW_FORMS),
    st.floats(-3, 3),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
    st.sampled_from([1, 700]),
)
def test_rounding_to_the_nearest_loses_at_most_a_step(
    seed: int, form: Form, mean: float, size: float, rows: int
) -> None:
    matrix = ((np.random.default_rng(seed).normal(size=(rows, 96)) + mean) * size).astype(np.float32)
    found = quantize.quantize(matrix, form, search=False)
    step = np.abs(np.asarray(found.scale))[..., None]
    error = np.abs(meaning(found) - matrix).reshape(rows, -1, form.block)
    # Half a step; and as much again at an end of the range that rounding moved, or that has one integer less.
    assert (error <= 1.001 * step).all()
    assert (error <= 0.501 * step).mean() > (0.6 if form.bits == 2 else 0.9)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(NEW_FORMS), st.floats(-3, 3))
def test_searching_never_loses_more(seed: int, form: Form, mean: float) -> None:
    matrix = (np.random.default_rng(seed).normal(size=(5, 96)) + mean).astype(np.float32)

    def lost(*, search: bool) -> NDArray[np.float32]:
        difference = meaning(quantize.quantize(matrix, form, search=search)) - matrix
        squares: NDArray[np.float32] = np.square(difference).reshape(-1, form.block).sum(-1)
        return squares

    assert (lost(search=True) <= lost(search=False) * (1 + 1e-4)).all()
    assert lost(search=True).sum() < lost(search=False).sum()


@pytest.mark.parametrize("form", NEW_FORMS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-42, 1.0, -7.5])
@pytest.mark.parametrize("search", [False, True])
def test_a_constant_matrix(form: Form, value: float, search: bool) -> None:
    matrix = np.full((3, 64), value, np.float32)
    found = meaning(quantize.quantize(matrix, form, search=search))
    assert np.allclose(found, matrix, rtol=1e-6 if form.bits > 2 or value <= 0 else 0.5, atol=1e-37)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_what_is_important_is_met_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(40, 64)).astype(np.float32)
    weights = np.square(random.normal(size=64) * 3).astype(np.float32)

    def lost(given: NDArray[np.float32] | None) -> float:
        difference = meaning(quantize.quantize(matrix, NEW_FORMS[0], search=True, importance=given)) - matrix
        return float((np.square(difference) * weights).sum())

    assert lost(weights) < lost(None)


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        quantize.quantize(np.array([[np.nan] * 32], np.float32), NEW_FORMS[0], search=True)


def test_the_default_recipe_gives_sensitive_matrices_eight_bits() -> None:
    stored = quantize.store(RECIPES["int4"], LLAMA)
    bits = {path.split(".")[-1]: [form.bits for form in forms] for path, forms in stored.items()}
    assert bits == {"embed": [8], "qkv": [8], "out": [4], "gate_up": [4], "down": [8], "head": [8]}
    wide = dataclasses.replace(LLAMA, D=1024, H=64, N=16, K=4)  # where raising q and k would cost more than two nodes
    assert [form.bits for form in quantize.store(RECIPES["int4"], wide)["layers.0.attn.qkv"]] == [4, 4, 8]


def test_the_smaller_recipes_give_four_bits() -> None:
    for name, eight in (("int4-body", {"embed", "head"}), ("int4-nearest", set())):
        stored = quantize.store(RECIPES[name], LLAMA)
        assert {path for path, forms in stored.items() if {form.bits for form in forms} == {8}} == eight
        assert all(len(forms) == 1 for forms in stored.values())


def test_the_command_line_has_every_scheme() -> None:
    assert get_args(Quantize) == quantize.SCHEMES


@pytest.mark.parametrize(("D", "block"), [(64, 32), (48, 16), (40, None)])
def test_blocks_must_fit_a_row(D: int, block: int | None) -> None:
    stored = quantize.store(RECIPES["int8"], dataclasses.replace(LLAMA, D=D))
    assert [form.block for form in stored.get("embed", ())] == ([] if block is None else [block])


def test_forms_survive_json() -> None:
    stored = quantize.store(RECIPES["int4"], GEMMA)
    assert storage.from_json(json.loads(json.dumps(storage.to_json(stored)))) == stored
    for malformed in ({"a": [{"bits": 4}]}, {"a": 1}, [1], None):
        with pytest.raises(ValueError, match="malformed"):
            storage.from_json(malformed)


def test_importance_is_the_mean_square_of_inputs() -> None:
    tree, tokens = random_params(LLAMA), [5, 9, 2, 60]
    found = importance(LLAMA, tree, tokens, quantize.store(RECIPES["int4"], LLAMA))
    assert set(found) == {f"layers.{i}.{name}" for i in range(2) for name in MATRICES} | {"head"}
    x = np.asarray(tree["embed"])[tokens]
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + LLAMA.norm_eps) * np.asarray(tree["layers"][0]["attn_norm"])
    expected = np.square(x).mean(0)
    np.testing.assert_allclose(found["layers.0.attn.qkv"], expected / expected.mean() + 1e-3, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------ the model

MATRICES = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
MIXED = Recipe(
    "every form that there is",
    (("*.q", Form(4, 32)), ("*.k", Form(4, 16, zero_points=True)), ("*.v", Form(8, 32)), ("*.up", Form(2, 16)),
     ("*.gate", Form(4, 16, zero_points=True)), ("*", Form(8, 32))),
)  # fmt: skip


BIASED = dataclasses.replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed projections of several forms never take the widest."""
    monkeypatch.setattr(quantize, "_WORTH_A_NODE", 0)


def test_packed_projections_take_forms_by_their_own_names(apart: None) -> None:
    stored = quantize.store(MIXED, LLAMA)
    assert stored["layers.1.attn.qkv"] == (Form(4, 32), Form(4, 16, zero_points=True), Form(8, 32))
    assert stored["layers.1.mlp.gate_up"] == (Form(4, 16, zero_points=True), Form(2, 16))
    packed = quantize.store(MIXED, GLM4)  # gate and up are one tensor there
    assert packed["layers.1.mlp.gate_up"] == (Form(2, 16),)


@pytest.mark.parametrize("config", [LLAMA, BIASED, GEMMA], ids=["llama", "biases", "gemma3"])
def test_the_model_on_blocks_is_the_model_on_what_they_mean(config: Any, apart: None) -> None:
    stored = quantize.store(MIXED, config)
    assert [len(stored[f"layers.0.{name}"]) for name in ("attn.qkv", "mlp.gate_up")] == [3, 2]
    tree = in_blocks(random_params(config), config, stored)
    tokens, count, positions = jnp.arange(14).reshape(2, 7), jnp.array([7, 5]), jnp.array([[0, 6], [1, 4]])

    def run(tree: Any) -> list[jax.Array]:
        cache = Cache.zeros(config, 2, 16)
        first, cache = prefill(config, tree, cache, tokens, count, positions)
        return [first, decode(config, tree, cache, jnp.array([3, 4]))[0]]

    for one, other in zip(run(tree), run(params.dense(tree)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def in_blocks(tree: Any, config: Any, stored: storage.Storage) -> Any:
    leaves: dict[str, Any] = {}
    queries, keys = config.N * config.H, config.K * config.H
    cuts = {1: [], 2: [config.F], 3: [queries, queries + keys]}  # of the outputs, by the number of parts
    for path, value in params.flatten(tree).items():
        forms, matrix = stored.get(path, ()), params.outputs_first(path, np.asarray(value))
        parts = np.split(matrix, cuts[len(forms)]) if forms else []
        made = [quantize.quantize(part, form, search=True) for part, form in zip(parts, forms, strict=True)]
        leaves |= params.flatten({path: made[0] if len(made) == 1 else made}) if made else {path: value}
    return params.fill(params.abstract(config, storage=stored), jax.tree.map(jnp.asarray, leaves))


# --------------------------------------------------------------------------------------------------------- the artifact

MODEL = tiny.llama(heads=(4, 2), head_size=16)
# Packed projections of one form but for the shift, and of several; a shifted matrix, a centred one, one of floats.
TYPES = {
    "blk.0.attn_v.weight": "Q4_1", "blk.0.attn_?.weight": "Q4_0", "blk.1.attn_v.weight": "Q8_0",
    "blk.1.attn_?.weight": "Q4_1", "blk.1.attn_output.weight": "Q4_1", "blk.0.ffn_up.weight": "Q4_0",
    "blk.1.ffn_up.weight": "Q8_0", "*.ffn_gate.weight": "Q4_1", "*.ffn_down.weight": "Q5_0",
    "token_embd.weight": "Q8_0",
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    floats = tiny.write_huggingface(MODEL, folder / "floats")
    return {"keep": tiny.write_gguf(MODEL, folder / "blocks.gguf", TYPES), "int4": floats, "int8": floats}


CASES = [f"{scheme}/{target}" for scheme in ("keep", "int4", "int8") for target in TARGETS]


@pytest.fixture(scope="module", params=CASES)
def exported(
    request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> ExportReport:
    scheme, target = request.param.split("/")
    return export(
        sources[scheme],
        tmp_path_factory.mktemp("artifacts") / "out",
        target=target,
        quantize=None if scheme == "keep" else scheme,
        max_context=64,
    )


def test_what_integers_cost_is_in_the_manifest(exported: ExportReport) -> None:
    assert exported.verification["status"] == "passed"
    quantization = json.loads((exported.path / "manifest.json").read_text(encoding="utf-8"))["quantization"]
    assert quantization == exported.quantization
    assert quantization["scheme"] in ("keep", "int4", "int8")
    forms = quantization["tensors"]
    if quantization["scheme"] == "keep":
        assert quantization["from"] == {"Q4_0": 3, "Q4_1": 6, "Q5_0": 2, "Q8_0": 3}
        assert [len(forms[f"layers.{i}.attn.qkv"]) for i in range(2)] == [1, 3]
        assert [len(forms[f"layers.{i}.mlp.gate_up"]) for i in range(2)] == [1, 2]
        assert "layers.0.attn.out" not in forms
    else:
        assert quantization["from"] == {"F32": 16}
        cost = quantization["quality"]["against_float"]
        assert set(cost) == {"prose", "code", "question", "chat"}
        assert all(0 < score["kl"] < (0.01 if quantization["scheme"] == "int8" else 0.5) for score in cost.values())
    assert ("level_4_against_1" in quantization["quality"]) == (exported.target == "ort")


def test_it_verifies_without_its_source(exported: ExportReport) -> None:
    assert verify(exported.path, steps=2).status == "passed"


def test_everything_stored_is_used_and_nothing_twice(exported: ExportReport) -> None:
    used: set[str] = set()
    with safe_open(exported.path / "weights.safetensors", framework="numpy") as stored:
        content = (exported.path / "weights.safetensors").read_bytes()
        for program in ("prefill", "decode"):
            for name, value in ir.load(exported.path / f"{program}.onnx").graph.initializers.items():
                tensor = value.const_value
                if isinstance(tensor, ir.ExternalTensor):
                    name = name.split(":")[0]
                    assert tensor.offset is not None and tensor.length is not None
                    there = stored.get_tensor(name).tobytes()
                    assert content[tensor.offset : tensor.offset + tensor.length] == there
                    used.add(name)
        assert used == set(stored.keys())
        matrices = [stored.get_tensor(name) for name in used]
    large = [matrix.tobytes() for matrix in matrices if matrix.nbytes > 512]
    assert len(set(large)) == len(large)


def test_bytes_are_those_of_the_forms(exported: ExportReport) -> None:
    assert exported.quantization is not None
    manifest = json.loads((exported.path / "manifest.json").read_text(encoding="utf-8"))
    tensors = manifest["tensors"]
    for path, forms in exported.quantization["tensors"].items():
        for i, form in enumerate(forms):
            name = path if len(forms) == 1 else f"{path}.{i}"
            outputs, per_row, size = tensors[f"{name}.packed"]["shape"]
            assert size == form["block"] * form["bits"] // 8
            assert tensors[f"{name}.scale"]["shape"] == [outputs, per_row]
            assert (f"{name}.shift" in tensors, f"{name}.zero" in tensors) == (form["shifted"], form["zero_points"])


def change(artifact: Path, name: str) -> None:
    """Change one bit of a tensor, and the manifest with it."""
    path = artifact / "weights.safetensors"
    content = bytearray(path.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start, end = header[name]["data_offsets"]
    middle = (start + end) // 2 | 3  # the exponent, where it is a float
    content[8 + int.from_bytes(content[:8], "little") + middle] ^= 0x10
    path.write_bytes(content)
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    manifest["files"][path.name] = describe_file(path)
    (artifact / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("leaf", ["layers.1.mlp.gate_up.1.packed", "layers.0.mlp.gate_up.shift", "embed.scale"])
def test_blocks_that_mean_something_else_fail(leaf: str, sources: dict[str, Path], tmp_path: Path) -> None:
    artifact = export(sources["keep"], tmp_path / "out", verify=False, max_context=64).path
    change(artifact, leaf)
    failed = [check.name for check in verify(artifact, source=sources["keep"], steps=1).checks if not check.passed]
    assert "blocks" in failed


@pytest.mark.parametrize(
    ("scheme", "options", "problem"),
    [
        ("int8", {"quantize": "keep"}, "no blocks of integers to keep"),
        ("int8", {"quantize": "int3"}, "unknown quantisation 'int3'"),
        ("keep", {"accuracy_level": 2}, "accuracy_level must be 1"),
        ("keep", {"accuracy_level": 4, "quantize": "none"}, "this artifact has none"),
    ],
)
def test_wrong_options(
    scheme: str, options: dict[str, Any], problem: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        export(sources[scheme], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_level_that_nobody_measured_is_told(sources: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantize": "keep", "verify": False, "max_context": 64}
    report = export(sources["keep"], tmp_path / "fast", **options)
    assert report.quantization is not None
    assert report.quantization["accuracy_level"] == 4
    assert any("was not measured" in warning for warning in report.warnings)
    assert not export(sources["keep"], tmp_path / "exact", accuracy_level=1, **options).warnings


@pytest.mark.parametrize("level", [1, 4])
def test_the_accuracy_level_can_be_chosen(level: int, sources: dict[str, Path], tmp_path: Path) -> None:
    report = export(sources["int8"], tmp_path / "out", quantize="int8", accuracy_level=level, max_context=64)
    assert report.quantization is not None
    assert report.quantization["accuracy_level"] == level
    for program in ("prefill.onnx", "decode.onnx"):
        graph = ir.load(report.path / program).graph
        levels = {node.attributes["accuracy_level"].as_int() for node in graph if node.op_type == "MatMulNBits"}
        assert levels == {level}
    names = [check["name"] for check in report.verification["checks"]]
    assert ("shipped.kl" in names) == ("shipped.greedy" in names) == (level == 4)


@pytest.mark.parametrize("target", TARGETS)
def test_several_tokens_behind_decode_steps_in_a_batch(target: str, sources: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": target, "accuracy_level": 1, "max_context": 64, "verify": False}
    programs = open_programs(Manifest.open(export(sources["keep"], tmp_path / "out", **options).path), Settings("two"))
    batch = Session(programs, rows=2)
    rows = [[5, 6, 7], [8, 9]]
    for row, tokens in enumerate(rows):
        batch.prefill(row, tokens)
    for step in ([3, 4], [1, 2]):
        batch.decode(np.array(step, np.int32))
        rows = [[*tokens, new] for tokens, new in zip(rows, step, strict=True)]
    for row, more in ((1, [20, 21]), (0, [10, 11, 12])):
        found = batch.prefill(row, more)
        fresh = Session(programs, rows=1).prefill(0, rows[row] + more)
        np.testing.assert_allclose(found, fresh, atol=1e-4)


APART = Recipe("parts of several forms", (("*.k", Form(8, 32)), ("*.up", Form(8, 16)), ("*", Form(4, 32))))


@pytest.mark.parametrize("target", TARGETS)
def test_packed_projections_of_several_forms_have_their_biases(target: str, apart: None, tmp_path: Path) -> None:
    source = tiny.write_huggingface(families.load("llama-biases"), tmp_path / "source")
    report = export(source, tmp_path / "out", target=target, quantize=APART, max_context=64)
    assert report.verification["status"] == "passed"
    assert report.quantization is not None
    forms = report.quantization["tensors"]
    assert [len(forms[f"layers.1.{name}"]) for name in ("attn.qkv", "mlp.gate_up")] == [3, 2]


def test_floats_of_a_gguf_can_be_asked_for(sources: dict[str, Path], tmp_path: Path) -> None:
    report = export(sources["keep"], tmp_path / "out", quantize="none", max_context=64)
    assert report.quantization is None
    assert report.verification["status"] == "passed"


# -------------------------------------------------------------------------------------------------------------- quality


class Given:
    """A reader whose logits are given."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    def read(self, tokens: Any) -> Any:
        return (self._logits[i : i + quality.PIECE] for i in range(0, len(tokens), quality.PIECE))


@given(SEEDS, st.integers(2, 150))
def test_scores_are_what_the_textbook_says(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    one, other = random.normal(size=(2, n, 11)).astype(np.float32) * 3
    tokens = random.integers(0, 11, n).tolist()
    score = quality.compare(Given(one), Given(other), {"text": tokens})["text"]
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (one.astype(float), other.astype(float)))
    assert score.positions == n
    assert score.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean())
    assert score.top1 == (p.argmax(-1) == q.argmax(-1)).mean()
    following = np.arange(n - 1), tokens[1:]
    assert score.perplexity == pytest.approx(np.exp(-np.log(q[following]).mean()))
    assert score.expected_perplexity == pytest.approx(np.exp(-np.log(p[following]).mean()))
    assert quality.compare(Given(one), Given(one), {"text": tokens})["text"].kl == 0


def test_tolerances_of_integers_have_reasons() -> None:
    assert all(TOLERANCES[name].reason for name in ("blocks", "quantised", "shipped.kl", "shipped.greedy"))
