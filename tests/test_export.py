"""From a checkpoint to an artifact: what is in it, what is refused, and what is left when something goes wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

import make_tiny_artifact
import tiny
from diptych.export import weights
from diptych.export.certificate import ParityError
from diptych.export.job import slug
from diptych.export.lowering import TARGETS
from diptych.export.pipeline import ExportReport, export
from diptych.jax_model.config import Config
from diptych.jax_model.params import abstract, flatten
from diptych.jax_model.quantize import RECIPES
from diptych.runtime.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("llama-16-8", "gemma3")
EXTERNAL = "weights.safetensors"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: tiny.write_huggingface(tiny.VARIANTS[name], folder / name) for name in FAMILIES}


@pytest.fixture(scope="module", params=[f"{family}/{target}" for family in FAMILIES for target in TARGETS])
def exported(
    request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> ExportReport:
    """Every tiny family for every target, verified."""
    family, target = request.param.split("/")
    return export(sources[family], tmp_path_factory.mktemp("artifacts") / target, target=target)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def initializers(graph: Path) -> dict[str, ir.TensorProtocol]:
    found = ir.load(graph).graph.initializers
    return {name: value.const_value for name, value in found.items() if value.const_value is not None}


# ----------------------------------------------------------------------------------------------- what is in an artifact


def test_it_agrees_with_jax(exported: ExportReport) -> None:
    assert exported.certificate is not None
    assert exported.certificate.status == "passed"
    assert {check.name for check in exported.certificate.checks} == {
        "files", "weights", "prefill.first", "prefill.second", "decode", "decode.one", "greedy",
    }  # fmt: skip
    assert all(check.count > 0 for check in exported.certificate.checks)


def test_the_runtime_accepts_it(exported: ExportReport) -> None:
    manifest = Manifest.open(exported.path, check_hashes=True)
    assert manifest.target == exported.target
    assert manifest.verification == "passed"
    assert sorted((*manifest.files, "manifest.json")) == names(exported.path)


def test_the_manifest_tells_everything(exported: ExportReport) -> None:
    manifest = json.loads((exported.path / "manifest.json").read_text(encoding="utf-8"))
    config = Config.from_json(manifest["config"])
    assert json.loads(json.dumps(config.to_json())) == manifest["config"]
    assert manifest["verification"] == exported.verification
    assert manifest["cache"] == {"layers": config.L, "heads": config.K, "head_size": config.H, "dtype": "float32"}
    assert set(manifest["source"]["files"]) >= {"config.json", "model.safetensors"}
    leaves = flatten(abstract(config))
    parameters = {name: entry for name, entry in manifest["tensors"].items() if not name.startswith("constants.")}
    assert {name: tuple(entry["shape"]) for name, entry in parameters.items()} == {
        name: leaf.shape for name, leaf in leaves.items()
    }
    assert all(len(entry["sources"]) == len(entry["source_dtypes"]) for entry in parameters.values())
    assert [name.split(".")[-2] for name in parameters["layers.0.attn.qkv"]["sources"]] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]


def test_both_graphs_point_into_one_file_that_safetensors_reads(exported: ExportReport) -> None:
    content = (exported.path / EXTERNAL).read_bytes()
    used: set[str] = set()
    with safe_open(exported.path / EXTERNAL, framework="numpy") as stored:
        for program in ("prefill", "decode"):
            for name, tensor in initializers(exported.path / f"{program}.onnx").items():
                if isinstance(tensor, ir.ExternalTensor):
                    assert str(tensor.location) == EXTERNAL
                    assert tensor.offset is not None and tensor.length is not None
                    there: NDArray[Any] = stored.get_tensor(name)
                    assert tuple(tensor.shape.numpy()) == there.shape
                    assert content[tensor.offset : tensor.offset + tensor.length] == there.tobytes()
                    used.add(name)
        assert used == set(stored.keys()), "every stored tensor is used by a graph"


def test_graphs_are_small_and_hold_no_weights(exported: ExportReport) -> None:
    for program in ("prefill", "decode"):
        assert exported.bytes[f"{program}.onnx"] < 1_000_000
        inline = [
            t for t in initializers(exported.path / f"{program}.onnx").values() if not isinstance(t, ir.ExternalTensor)
        ]
        assert sum(tensor.nbytes for tensor in inline) < 10_000


def test_nothing_is_stored_twice_nor_transposed(exported: ExportReport) -> None:
    with safe_open(exported.path / EXTERNAL, framework="numpy") as stored:
        tensors = [stored.get_tensor(name) for name in stored.keys()]  # noqa: SIM118  (it is no dict)
    matrices = [tensor for tensor in tensors if tensor.ndim == 2]
    contents = [form.tobytes() for matrix in matrices for form in (matrix, np.ascontiguousarray(matrix.T))]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("target", TARGETS)
def test_the_weights_file_is_as_large_as_the_parameters(target: str, tmp_path: Path) -> None:
    model = tiny.llama(heads=(8, 2), head_size=64, width=512, ffn=1536, positions=1024)
    report = export(tiny.write_huggingface(model, tmp_path / "model"), tmp_path / "out", target=target, verify=False)
    assert report.verification["status"] == "skipped"
    assert report.bytes[EXTERNAL] <= 1.02 * 4 * report.model["parameters"]


def test_the_report_is_json(exported: ExportReport) -> None:
    report = json.loads(json.dumps(exported.to_json(), allow_nan=False))
    assert report["path"] == str(exported.path)
    assert list(report["seconds"]) == ["trace", "weights", "graphs", "tokenizer", "hashes", "verify"]
    assert report["bytes"] == {name: (exported.path / name).stat().st_size for name in names(exported.path)}


def test_progress_goes_from_nothing_to_all(sources: dict[str, Path], tmp_path: Path) -> None:
    calls: dict[str, list[tuple[int, int]]] = {}
    export(
        sources["llama-16-8"],
        tmp_path / "out",
        progress=lambda stage, done, total: calls.setdefault(stage, []).append((done, total)),
    )
    assert list(calls) == ["trace", "weights", "verify: JAX", "verify: ONNX Runtime"]
    for steps in calls.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 1


def test_a_gguf_gives_the_same_parameters(sources: dict[str, Path], tmp_path: Path) -> None:
    gguf = tiny.write_gguf(tiny.VARIANTS["llama-16-8"], tmp_path / "Llama-16-8.F32.gguf")
    report = export(gguf, tmp_path / "gguf", verify=False)
    assert report.name == "llama-16-8"
    export(sources["llama-16-8"], tmp_path / "folder", verify=False)
    assert (tmp_path / "gguf" / EXTERNAL).read_bytes() == (tmp_path / "folder" / EXTERNAL).read_bytes()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m"),
        ("Qwen3-Q8_0-00002-of-00003.gguf", "qwen3"),
        ("org/Some Model (v2)", "some-model-v2"),
        ("模型.gguf", "模型"),
        ("…", "model"),
    ],
)
def test_names(path: str, name: str) -> None:
    assert slug(Path(path)) == name


def test_the_shortest_context(sources: dict[str, Path], tmp_path: Path) -> None:
    report = export(sources["llama-16-8"], tmp_path / "out", max_context=16)
    assert report.verification["status"] == "passed"
    assert Manifest.open(report.path).max_context == 16


# -------------------------------------------------------------------------------------------------------- reproducible

TWICE = """
import sys
from diptych.export.pipeline import export
for target in ("ort", "onnx", "primitive"):
    export(sys.argv[1], f"{sys.argv[2]}/{target}", target=target, verify=False)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_elsewhere(family: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """In another process with other hashes, in a C locale, below a long path that is not ASCII."""
    odd = tmp_path / "模型 é😀 space" / ("long" * 50)
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", TWICE, sources[family], odd], check=True, env=environment)
    for target in TARGETS:
        report = export(sources[family], tmp_path / target, target=target, verify=False)
        assert names(odd / target) == names(report.path)
        for name in names(report.path):
            assert (odd / target / name).read_bytes() == (report.path / name).read_bytes(), f"{target}/{name} differs"


@pytest.mark.parametrize("name", ["模型 é😀 space", "n" * 200])
def test_odd_folders_are_verified(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    report = export(sources["llama-16-8"], tmp_path / name)
    assert report.verification["status"] == "passed"


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tflite"}, "unknown target 'tflite'; known targets: ort, onnx, primitive"),
        ({"dtype": "bf16"}, "'bf16' is not available for device cpu: .*no bfloat16 matrix product.* Use fp32"),
        ({"dtype": "fp16"}, "'fp16' is not available for device cpu: .*overflow.* Use fp32"),
        ({"dtype": "fp8"}, "'fp8' is not available for device cpu: there is no such dtype. Use fp32"),
        ({"max_context": 0}, "between 16 and the model's own 256, not 0"),
        ({"max_context": 257}, "between 16 and the model's own 256, not 257"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export(sources["llama-16-8"], tmp_path / "out", **options)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "error"), [("missing.gguf", FileNotFoundError), ("empty", (FileNotFoundError, ValueError))]
)
def test_wrong_sources(source: str, error: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "sources" / "empty").mkdir(parents=True)
    with pytest.raises(error, match=source):
        export(tmp_path / "sources" / source, tmp_path / "new" / "out")
    assert names(tmp_path) == ["sources"]


def test_an_output_that_exists_is_refused_before_the_source_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        export("no such source", tmp_path / "out")


def without(model: tiny.Tiny, name: str) -> tiny.Tiny:
    return dataclasses.replace(model, shapes={key: shape for key, shape in model.shapes.items() if key != name})


def test_a_missing_tensor_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    missing = "model.layers.1.mlp.up_proj.weight"
    source = tiny.write_huggingface(without(tiny.llama(), missing), tmp_path / "model")
    with pytest.raises(ValueError, match=missing):
        export(source, tmp_path / "out")
    assert names(tmp_path) == ["model"]


def test_tokenizer_files_cannot_lead_out_of_the_artifact(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = SimpleNamespace(files={"../escaped.json": "{}"})
    monkeypatch.setattr("diptych.jax_model.readers.huggingface.HuggingFaceCheckpoint.tokenizer", evil)
    with pytest.raises(ValueError, match="is no file name"):
        export(sources["llama-16-8"], tmp_path / "out" / "artifact")
    assert names(tmp_path) == []


def test_a_full_disk_is_noticed_before_writing(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"the weights need 6\d\d,\d\d\d bytes, .* has 1,000 left"):
        export(sources["llama-16-8"], tmp_path / "out")
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------ warnings


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(tmp_path: Path) -> None:
    model = tiny.llama()
    fewer = model.config["vocab_size"] - 7
    shapes = {
        name: (fewer, *shape[1:]) if name in ("model.embed_tokens.weight", "lm_head.weight") else shape
        for name, shape in model.shapes.items()
    }
    cut = dataclasses.replace(model, config={**model.config, "vocab_size": fewer}, shapes=shapes)
    report = export(tiny.write_huggingface(cut, tmp_path / "model"), tmp_path / "out")
    assert len(report.warnings) == 1
    assert f"ids up to {fewer + 6}, the model knows {fewer}" in report.warnings[0]
    assert report.verification["status"] == "passed"


def test_without_a_tokenizer(tmp_path: Path) -> None:
    source = tiny.write_huggingface(tiny.llama(), tmp_path / "model")
    for path in source.glob("*token*"):
        path.unlink()
    report = export(source, tmp_path / "out")
    assert len(report.warnings) == 1
    assert "takes and gives token ids only" in report.warnings[0]
    assert report.verification["status"] == "passed"


def test_no_warnings_for_an_ordinary_model(exported: ExportReport) -> None:
    assert exported.warnings == ()


# ---------------------------------------------------------------------------------- what is wrong is found out in time


@pytest.fixture
def corrupting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one weight flips between writing and checking."""
    write = weights.write

    def flip(path: Path, specs: Any, values: Any) -> Any:
        slots = write(path, specs, values)
        with path.open("r+b") as file:
            file.seek(slots["layers.1.mlp.down"].offset)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))  # the lowest bit of the mantissa: too small to show in any logit
        return slots

    monkeypatch.setattr(weights, "write", flip)


@pytest.mark.usefixtures("corrupting")
def test_one_corrupted_weight_fails_the_export(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"verification failed in weights .*--keep-failed") as caught:
        export(sources["llama-16-8"], tmp_path / "out")
    assert [check.name for check in caught.value.certificate.checks if not check.passed] == ["weights"]
    assert names(tmp_path) == []


@pytest.mark.usefixtures("corrupting")
def test_force_alone_replaces_nothing_by_what_failed(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ParityError):
        export(sources["llama-16-8"], tmp_path / "out", force=True)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("corrupting")
def test_it_can_be_kept_marked_as_failed(sources: dict[str, Path], tmp_path: Path) -> None:
    report = export(sources["llama-16-8"], tmp_path / "out", keep_failed=True)
    assert report.verification["status"] == "failed"
    assert Manifest.open(tmp_path / "out").verification == "failed"


SLOW = """
import sys, time
from diptych.export import pipeline
from diptych.export.pipeline import export
write = pipeline.weights.write
def slow(*arguments):
    write(*arguments)
    print("written", flush=True)
    time.sleep(60)
pipeline.weights.write = slow
export(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_export_leaves_no_artifact(sent: signal.Signals, sources: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(sources["llama-16-8"]), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(sent)
    assert process.returncode != 0
    left = names(tmp_path)
    assert all(name.startswith(".out.partial-") for name in left) if sent == signal.SIGKILL else left == []
    export(sources["llama-16-8"], tmp_path / "out", verify=False)
    assert names(tmp_path) == ["out"]


# -------------------------------------------------------------------------------------------------------------- memory

PEAK = """
import resource, subprocess, sys
code = (
    "import sys; from diptych.export.pipeline import export; "
    "export(sys.argv[1], sys.argv[2], quantize=sys.argv[3], verify=False)"
)
subprocess.run([sys.executable, "-c", code, *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("quantize", ["none", "keep"])
def test_exporting_holds_one_tensor_in_memory(quantize: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    """Floats are 540 MB, the bound for everything is 700 MB, and this keeps a reserve."""
    command = [sys.executable, "-c", PEAK, str(smollm2_gguf), str(tmp_path / "out"), quantize]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024
    assert peak < (650e6 if quantize == "none" else 450e6)


# Bytes that the parameters need: floats; or nibbles and bytes with a scale, and a zero point or mostly a shift, for
# each 32 of them.
NEEDED = {
    ("smollm2_gguf", "keep"): (111_617_280, TARGETS),
    ("smollm2_gguf", "int4"): (116_431_488, ("ort", "onnx")),
    ("smollm2_gguf", "none"): (134_515_008 * 4, ("ort",)),
    ("gemma3_gguf", "keep"): (294_398_464, ("ort", "onnx")),
}
LEAST_TWIN = 1 << 14  # bytes from which equal content is no coincidence


@pytest.mark.parametrize(
    ("model", "quantize", "target"), [(*case, target) for case, (_, targets) in NEEDED.items() for target in targets]
)
def test_artifacts_hold_parameters_once_and_little_else(
    model: str, quantize: str, target: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Weights and graphs are at most 2 % larger than the parameters, at the context that is the default, 8192."""
    needed, _ = NEEDED[model, quantize]
    quick = dataclasses.replace(RECIPES["int4"], search=False, calibrated=False)  # of the same size, and sooner made
    report = export(
        request.getfixturevalue(model),
        tmp_path / "out",
        target=target,
        quantize=quick if quantize == "int4" else quantize,
        verify=False,
    )
    assert report.max_context == 8192
    assert needed < sum(report.bytes[file] for file in (EXTERNAL, "prefill.onnx", "decode.onnx")) <= 1.02 * needed
    contents = []
    with safe_open(tmp_path / "out" / EXTERNAL, framework="numpy") as stored:
        for name in stored.keys():  # noqa: SIM118  (it is no dict)
            tensor = stored.get_tensor(name)
            forms = [tensor, tensor.T] if tensor.ndim == 2 else [tensor]
            if tensor.nbytes >= LEAST_TWIN:
                contents += [hashlib.sha256(np.ascontiguousarray(form).data).digest() for form in forms]
    assert len(set(contents)) == len(contents)


# ----------------------------------------------------------------------------------------------- the committed artifact


def test_the_committed_artifact_still_loads() -> None:
    folder = ROOT / "artifacts" / "tiny"
    manifest = Manifest.open(folder, check_hashes=True)
    assert manifest.verification == "passed"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 700_000
    assert manifest.data["cache"]["head_size"] == make_tiny_artifact.TINY.config["head_dim"]
