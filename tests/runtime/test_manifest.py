"""An artifact may come from anywhere: what is damaged, foreign or leads out of its folder is refused, and by whom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import scripted_artifact
from diptych.runtime import Manifest, load

Change = Callable[[dict[str, Any]], Any]


def edit(artifact: Path, change: Change) -> None:
    path = artifact / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def test_a_good_artifact_opens(artifact: Path) -> None:
    manifest = Manifest.open(artifact, check_hashes=True)
    assert manifest.vocabulary.size == 97
    assert manifest.vocabulary.eos_token_ids == (2, 0)
    assert manifest.programs["decode"].inputs[0].shape == ("B", 1)
    assert manifest.to_json() == json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    assert manifest.path("tokenizer.json") == artifact.resolve() / "tokenizer.json"
    assert manifest.path("merges.txt") is None


def test_fields_of_a_newer_writer_are_let_be(artifact: Path) -> None:
    edit(artifact, lambda m: (m.update(mood="good"), m["cache"].update(colour="blue")))
    assert Manifest.open(artifact).to_json()["mood"] == "good"


DAMAGES: dict[str, tuple[Change, str]] = {
    "a newer schema": (lambda m: m.update(schema_version=2), "schema version 2; this diptych reads 1. Upgrade"),
    "an older schema": (lambda m: m.update(schema_version=0), "schema_version must be an integer of at least 1"),
    "a schema that is no number": (lambda m: m.update(schema_version=True), "schema_version must be an integer"),
    "a field is missing": (lambda m: m.pop("cache"), "has no 'cache'"),
    "a field of a part is missing": (lambda m: m["cache"].pop("heads"), "cache has no 'heads'"),
    "an object is a list": (lambda m: m.update(cache=[1]), "cache must be a JSON object, not [1]"),
    "a size is zero": (lambda m: m.update(max_context=0), "max_context must be an integer of at least 1, not 0"),
    "a size is a string": (lambda m: m["cache"].update(layers="2"), "cache: layers must be an integer of at least 1"),
    "an EOS that is not in the model": (
        lambda m: m["vocabulary"].update(eos_token_ids=[97]), "eos_token_ids must be a token id below 97, not 97",
    ),
    "more layers than inputs": (lambda m: m["cache"].update(layers=10**12), "layers cannot be"),
    "EOS is a number": (lambda m: m["vocabulary"].update(eos_token_ids=2), "eos_token_ids must be a list, not 2"),
    "no decode program": (lambda m: m["programs"].pop("decode"), "programs has no 'decode'"),
    "a program that is not listed": (
        lambda m: m["programs"]["decode"].update(file="other.onnx"), "must be the name of an .onnx file listed",
    ),
    "a program of another format": (
        lambda m: m["programs"]["decode"].update(file="tokenizer.json"), "must be the name of an .onnx file listed",
    ),
    "a shape with a bad size": (
        lambda m: m["programs"]["decode"]["inputs"][0].update(shape=["B", -1]), "inputs[0]: shape must be an integer",
    ),
    "a hash that is missing": (lambda m: m["files"]["decode.onnx"].pop("sha256"), "decode.onnx has no 'sha256'"),
    "a file of another size": (
        lambda m: m["files"]["weights.safetensors"].update(bytes=5), "bytes, but manifest.json promises 5",
    ),
    "weights that are not listed": (
        lambda m: m["files"].pop("weights.safetensors"), "'weights.safetensors', which manifest.json does not list",
    ),
    "an absolute path": (
        lambda m: m["files"].update({"/etc/passwd": {"sha256": "0", "bytes": 1}}), "'/etc/passwd' must be relative",
    ),
    "a path upwards": (
        lambda m: m["files"].update({"../x": {"sha256": "0", "bytes": 1}}), "'../x' must be relative and stay inside",
    ),
    "a path upwards in the middle": (
        lambda m: m["files"].update({"a/../../x": {"sha256": "0", "bytes": 1}}), "must be relative and stay inside",
    ),
    "a Windows path": (
        lambda m: m["files"].update({"C:\\x": {"sha256": "0", "bytes": 1}}), "must be relative and stay inside",
    ),
    "a Windows drive": (
        lambda m: m["files"].update({"C:x": {"sha256": "0", "bytes": 1}}), "must be relative and stay inside",
    ),
    "an empty path": (lambda m: m["files"].update({"": {"sha256": "0", "bytes": 1}}), "must be relative"),
    "a path with a zero byte": (lambda m: m["files"].update({"a\0": {"sha256": "0", "bytes": 1}}), "must be relative"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_manifests_are_refused(artifact: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    edit(artifact, change)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(artifact, sessions="two")
    assert str(artifact) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"schema_version": 1' + b"[" * 100_000])
def test_what_is_no_manifest_is_refused(artifact: Path, content: bytes) -> None:
    (artifact / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Manifest.open(artifact)


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json"):
        load(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"is a file.*diptych export .*model\.gguf"):
        load(tmp_path / "model.gguf")


def test_a_missing_file_is_named(artifact: Path) -> None:
    (artifact / "weights.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.safetensors is missing"):
        Manifest.open(artifact)


def test_changed_bytes_are_found_when_asked_for(artifact: Path) -> None:
    weights = artifact / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    Manifest.open(artifact)
    with pytest.raises(ValueError, match=r"weights\.safetensors has SHA-256"):
        Manifest.open(artifact, check_hashes=True)


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "decode.onnx", "tokenizer.json"])
def test_links_out_of_the_folder_are_not_followed(artifact: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "blobs" / "1234"
    outside.parent.mkdir()
    (artifact / name).rename(outside)
    (artifact / name).symlink_to(outside)
    with pytest.raises(ValueError, match=f"'{name}' is a link that leaves.*cp -rL"):
        Manifest.open(artifact)


def test_links_inside_the_folder_are_followed(artifact: Path) -> None:
    (artifact / "weights.safetensors").rename(artifact / "blob")
    (artifact / "weights.safetensors").symlink_to("blob")
    assert load(artifact, threads=1).generate([5], max_tokens=2).token_ids


def test_the_folder_itself_may_be_a_link(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(artifact)
    assert load(tmp_path / "link", threads=1).generate([5], max_tokens=2).token_ids


def test_a_loop_of_links_is_refused(artifact: Path) -> None:
    (artifact / "tokenizer.json").unlink()
    (artifact / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises((ValueError, OSError), match=r"tokenizer\.json"):
        Manifest.open(artifact)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/etc/passwd", "must be relative and stay inside"),
        ("../weights.safetensors", "must be relative and stay inside"),
        ("x/../../weights.safetensors", "must be relative and stay inside"),
        ("*/_ORT_MEM_ADDR_/*", "must be relative and stay inside"),
        ("other.bin", "'other.bin', which manifest.json does not list"),
        ("linked.bin", "is a link that leaves"),
    ],
)
def test_graphs_that_read_elsewhere_are_refused_before_they_are_opened(
    artifact: Path, tmp_path: Path, location: str, message: str
) -> None:
    (tmp_path / "secret").write_bytes(b"0" * 1000)
    graph = onnx.load(artifact / "decode.onnx", load_external_data=False)
    entry = next(tensor for tensor in graph.graph.initializer if tensor.external_data).external_data[0]
    assert entry.key == "location"
    entry.value = location
    (artifact / "decode.onnx").write_bytes(graph.SerializeToString())
    scripted_artifact.resign(artifact)
    if location == "linked.bin":
        (artifact / location).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=message):
        Manifest.open(artifact)


def test_a_graph_that_is_not_what_the_manifest_says(artifact: Path) -> None:
    graph = ir.load(artifact / "decode.onnx")
    graph.graph.inputs[1].name = "past_len"
    (artifact / "decode.onnx").unlink()
    onnx.save(ir.to_proto(graph), artifact / "decode.onnx")
    scripted_artifact.resign(artifact)
    with pytest.raises(ValueError, match=r"decode\.onnx: the inputs and outputs of decode are not .*past_len"):
        load(artifact, sessions="two")


def test_a_graph_that_onnxruntime_refuses(artifact: Path) -> None:
    graph = onnx.load(artifact / "decode.onnx", load_external_data=False)
    graph.graph.node[0].op_type = "NoSuchOperator"
    (artifact / "decode.onnx").write_bytes(graph.SerializeToString())
    scripted_artifact.resign(artifact)
    with pytest.raises(ValueError, match=r"ONNX Runtime .* cannot open .*decode\.onnx.*NoSuchOperator") as error:
        load(artifact, sessions="two")
    assert "\n" not in str(error.value)


def test_a_failed_verification_is_told(artifact: Path) -> None:
    edit(artifact, lambda m: m["verification"].update(status="failed"))
    with pytest.warns(UserWarning, match="does not agree with its source"):
        load(artifact, threads=1)


@pytest.mark.parametrize("name", ["模型 é😀 space", "x" * 200, "a'b\"c%20;&"])
def test_any_folder_name_works_in_any_locale(artifact: Path, tmp_path: Path, name: str) -> None:
    folder = artifact.rename(tmp_path / name)
    code = "import sys, diptych; print(diptych.load(sys.argv[1], threads=1).generate([5], max_tokens=3).token_ids)"
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"{load(folder, threads=1).generate([5], max_tokens=3).token_ids}\n"
