"""The gate itself: it passes what is right, and names what is wrong wherever it is put."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tiny
from diptych.export import parity, stored
from diptych.export.artifact import describe_file
from diptych.export.certificate import Certificate, Check, ParityError
from diptych.export.lowering import TARGETS
from diptych.export.parity import POSITIONS, TOLERANCES, Plan, Step, compare, verify
from diptych.export.pipeline import export
from diptych.export.prompts import LONG, SHORT
from diptych.runtime import load

Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_huggingface(tiny.llama(heads=(4, 2), head_size=16), tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def artifact(target: str, source: Path, tmp_path: Path) -> Path:
    return export(source, tmp_path / "artifact", target=target, verify=False).path


@pytest.fixture
def ort_artifact(source: Path, tmp_path: Path) -> Path:
    return export(source, tmp_path / "artifact", verify=False).path


def failed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if not check.passed]


def rehash(artifact: Path, name: str) -> None:
    """What a forger would do: make the manifest agree with the changed file."""
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    manifest["files"][name] = describe_file(artifact / name)
    (artifact / "manifest.json").write_text(json.dumps(manifest))


def edit_graph(artifact: Path, program: str, edit: Callable[[ir.Model], None]) -> None:
    model = ir.load(artifact / f"{program}.onnx")
    edit(model)
    ir.save(model, artifact / f"{program}.onnx")
    rehash(artifact, f"{program}.onnx")


# -------------------------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("given_source", [True, False])
def test_what_is_right_passes(given_source: bool, artifact: Path, source: Path) -> None:
    certificate = verify(artifact, source=source if given_source else None, steps=3)
    assert certificate.status == "passed"
    assert [check.name for check in certificate.checks] == [
        "files", *["weights"] * given_source, "prefill.first", "prefill.second", "decode", "decode.one", "greedy",
    ]  # fmt: skip
    assert certificate.checks[-3].count == 3 * 2 * 97


def test_the_artifact_is_not_changed(ort_artifact: Path) -> None:
    before = {path.name: path.read_bytes() for path in ort_artifact.iterdir()}
    verify(ort_artifact, steps=1)
    assert {path.name: path.read_bytes() for path in ort_artifact.iterdir()} == before


def test_a_window_is_crossed(tmp_path: Path) -> None:
    """A window that one side forgot shows: the prompt is longer than it."""
    source = tiny.write_huggingface(tiny.gemma3(window=64, layers=2), tmp_path / "model")
    artifact = export(source, tmp_path / "artifact", target="ort").path

    def forget(model: ir.Model) -> None:
        for node in model.graph:
            if "local_window_size" in node.attributes:
                node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", -1)

    for program in ("prefill", "decode"):
        edit_graph(artifact, program, forget)
    assert {"prefill.second", "decode"} <= set(failed(verify(artifact)))


def test_an_artifact_with_parameters_of_an_earlier_version(ort_artifact: Path, source: Path, tmp_path: Path) -> None:
    """Gate and up were two. It runs, since its graphs and weights are of one export, and is told from a broken one."""
    rename_parameter(ort_artifact, "layers.1.mlp.gate_up", "layers.1.mlp.gate")
    assert load(ort_artifact).session().prefill(0, [1, 2, 3]).shape == (1, 97)
    for one in (None, source):
        with pytest.raises(ValueError, match=r"no parameter 'layers\.1\.mlp\.gate_up': an earlier .* export it again"):
            verify(ort_artifact, source=one, steps=1)
    with pytest.raises(ValueError, match=r"no parameter uses: 'layers\.1\.mlp\.gate' \(.*earlier version: export"):
        export(ort_artifact, tmp_path / "again")


def test_an_artifact_with_a_configuration_of_another_version(ort_artifact: Path) -> None:
    manifest = json.loads((ort_artifact / "manifest.json").read_text(encoding="utf-8"))
    manifest["config"]["post_norms"] = False
    (ort_artifact / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ValueError, match=r"not a configuration of this version \(.*post_norms.*\): export"):
        verify(ort_artifact, steps=1)


def rename_parameter(artifact: Path, old: str, new: str) -> None:
    """In the weights file, whose bytes stay where they are, and in the manifest; graphs know places only."""
    weights = artifact / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content.replace(f'"{old}"'.encode(), f'"{new}"'.ljust(len(old) + 2).encode()))
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    manifest["tensors"][new] = manifest["tensors"].pop(old)
    (artifact / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    rehash(artifact, weights.name)


# -------------------------------------------------------------------------------------------------------- what is wrong


def scale_attention(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.01)


def loosen_a_norm(model: ir.Model) -> None:
    node = next(node for node in model.graph if "Simplified" in node.op_type)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-2)


def swap_two_weights(model: ir.Model) -> None:
    one, other = (model.graph.initializers[f"layers.{i}.mlp.gate_up"] for i in range(2))
    one.const_value, other.const_value = other.const_value, one.const_value


def swap_gate_and_up(model: ir.Model) -> None:
    split = next(node for node in model.graph if node.op_type == "Split" and "layers.0/mlp" in (node.name or ""))
    gate, up = split.outputs
    for use in (*gate.uses(), *up.uses()):
        use.node.replace_input_with(use.idx, up if use.node.inputs[use.idx] is gate else gate)


def shift_a_rope_table(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type in ("Cos", "Sin"):
            node.op_type = "Sin" if node.op_type == "Cos" else "Cos"


@pytest.mark.parametrize("program", ["prefill", "decode"])
@pytest.mark.parametrize(
    "edit", [scale_attention, loosen_a_norm, swap_two_weights, swap_gate_and_up, shift_a_rope_table]
)
def test_a_wrong_graph_fails(edit: Callable[[ir.Model], None], program: str, ort_artifact: Path) -> None:
    edit_graph(ort_artifact, program, edit)
    found = failed(verify(ort_artifact, steps=4))
    assert "decode" in found, "decode follows its own errors, and those that prefill left in the cache"
    assert ("prefill.first" in found) == (program == "prefill")


def test_a_changed_file_is_named_and_not_run(artifact: Path) -> None:
    path = artifact / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (check,) = verify(artifact).checks
    assert (check.name, check.passed, check.max_abs_error) == ("files", False, 1.0)
    assert "weights.safetensors changed" in check.what


@pytest.mark.parametrize("piece", [1 << 24, 1000], ids=["whole", "in pieces"])
def test_weights_that_are_not_the_sources_fail_whatever_the_hashes_say(
    piece: int, ort_artifact: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_PIECE", piece)
    path = ort_artifact / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 & ~3] ^= 1
    path.write_bytes(content)
    rehash(ort_artifact, path.name)
    assert verify(ort_artifact, steps=1).status == "passed", "the artifact agrees with itself"
    assert failed(verify(ort_artifact, source=source, steps=1)) == ["weights"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_fail(value: float, tmp_path: Path) -> None:
    class Broken(tiny.Tiny):
        def tensors(self) -> dict[str, np.ndarray]:
            tensors = super().tensors()
            tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = value
            return tensors

    model = tiny.llama()
    source = tiny.write_huggingface(Broken(model.config, model.shapes), tmp_path / "model")
    with pytest.raises(ParityError, match="not finite") as caught:
        export(source, tmp_path / "out")
    found = caught.value.certificate
    assert {"prefill.first", "prefill.second", "decode"} <= set(failed(found))
    json.dumps(found.to_json(), allow_nan=False)
    assert not (tmp_path / "out").exists()


def test_another_model_is_wrong_input(ort_artifact: Path, tmp_path: Path) -> None:
    other = tiny.write_huggingface(tiny.llama(), tmp_path / "other")
    with pytest.raises(ValueError, match="made from another model"):
        verify(ort_artifact, source=other)


@pytest.mark.parametrize("steps", [0, 253])
def test_steps_must_fit(steps: int, ort_artifact: Path) -> None:
    with pytest.raises(ValueError, match=f"{steps} decode steps do not fit into a context of 256"):
        verify(ort_artifact, steps=steps)


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no artifact"):
        verify(tmp_path)


# ---------------------------------------------------------------------------------------------------------- comparison

WHAT = dict.fromkeys(("prefill.first", "prefill.second", "decode", "greedy"), "")


def steps_of(logits: NDArray[np.float32], difference: NDArray[np.float32]) -> tuple[list[Step], Iterator[Step]]:
    names = list(WHAT)[:3]
    return [Step(name, logits) for name in names], (Step(name, logits + difference) for name in names)


@given(st.integers(0, 2**32 - 1), st.floats(1e-5, 0.1))
def test_an_error_is_reported_wherever_it_is(seed: int, size: float) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(2, 3, 11)).astype(np.float32)
    difference = np.zeros_like(logits)
    difference[tuple(random.integers(difference.shape))] = size * random.choice([-1, 1])
    for check in compare(WHAT, *steps_of(logits, difference))[:3]:
        assert check.max_abs_error == pytest.approx(size, rel=0.11, abs=1e-6)
        assert check.passed == (check.max_abs_error is not None and check.max_abs_error <= 1e-3)
        assert check.count == logits.size


@pytest.mark.parametrize("second", [0.9, 0.9995])
def test_equal_tokens_pass(second: float) -> None:
    logits = np.array([[[1.0, second]]], np.float32)
    assert compare(WHAT, *steps_of(logits, np.zeros_like(logits)))[-1].passed


@pytest.mark.parametrize(("second", "passed"), [(0.9995, True), (0.998, False)])
def test_another_token_passes_only_if_the_two_were_as_good_as_equal(second: float, passed: bool) -> None:
    logits = np.array([[[1.0, second]]], np.float32)
    swapped = np.array([[[second, 1.0]]], np.float32)
    check = compare(WHAT, *steps_of(logits, swapped - logits))[-1]
    assert (check.name, check.passed) == ("greedy", passed)
    assert check.max_abs_error == pytest.approx(1 - second, rel=0.05)


def test_tolerances_have_reasons() -> None:
    assert all(tolerance.reason for tolerance in TOLERANCES.values())
    assert TOLERANCES["logits"].value == 1e-3


def test_certificates_are_json() -> None:
    good, bad = Check("a", "b", 1, 0.0, 0.0, True), Check("c", "d", 1, None, 1e-3, False)
    assert Certificate((good,)).status == "passed"
    found: dict[str, Any] = json.loads(json.dumps(Certificate((good, bad)).to_json(), allow_nan=False))
    assert found["status"] == "failed"
    assert found["checks"][1] == {
        "name": "c", "what": "d", "count": 1, "max_abs_error": None, "tolerance": 1e-3, "passed": False,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------- what is read


@given(st.integers(16, 4096), st.integers(1, 300), st.integers(2, 1000))
def test_every_plan_fits_its_context(max_context: int, steps: int, V: int) -> None:
    if max_context - steps < 4:
        return
    plan = Plan.make(None, V, max_context, steps)
    assert plan.rows == 2
    for row in range(2):
        assert all(chunk[row] for chunk in plan.chunks)
        assert sum(len(chunk[row]) for chunk in plan.chunks) + steps <= max_context
        assert all(0 <= token < V for chunk in plan.chunks for token in chunk[row])
    for chunk in plan.chunks:
        for tokens in chunk:
            positions = plan.positions(tokens)
            assert len(positions) == POSITIONS
            assert positions[0] == 0 and positions[-1] == len(tokens) - 1


def test_by_default_there_are_two_ragged_rows_and_32_steps() -> None:
    plan = Plan.make(None, 1000, 8192, None)
    assert list(plan.checks().values())[:3] == [
        "rows of 300 and 17 tokens in an empty cache",
        "300 and 31 tokens more behind them",
        "32 steps of 2 rows",
    ]


def test_prompts_are_long_enough_to_cross_a_window_of_512() -> None:
    assert len(LONG.split()) > 512, "no tokenizer makes fewer tokens than words"
    assert parity.LONG_PROMPT > 512
    assert len(SHORT.split()) < parity.SHORT_PROMPT
