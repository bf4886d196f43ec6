"""Hub ids: what is fetched, from a cache as the Hub's package lays it out, and what is said when nothing can be had."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, errors

import tiny
from diptych.jax_model.params import flatten, load
from diptych.jax_model.readers import hub, open_checkpoint

MODEL = tiny.llama(layers=1)
COMMIT = "0123456789abcdef" * 2 + "01234567"


def link(snapshot: Path, name: str, data: bytes) -> None:
    """A file of a snapshot: a relative link to a blob named after its content."""
    blob = snapshot.parents[1] / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(data)
    (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with ``org/tiny`` in it; no network."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    for name in ("main", "v1.0"):
        (repository / "refs" / name).write_text(COMMIT)
    for file in tiny.write_huggingface(MODEL, tmp_path / "folder").iterdir():
        link(snapshot, file.name, file.read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize("source", ["org/tiny", "org/tiny@main", "org/tiny@v1.0", f"org/tiny@{COMMIT}"])
def test_a_cached_repository_is_its_folder(source: str, cache: Path) -> None:
    one, other = open_checkpoint(source), open_checkpoint(cache.parent / "folder")
    assert one.path.name == COMMIT
    for (path, left), right in zip(flatten(load(one)).items(), flatten(load(other)).values(), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=path)
    assert one.provenance() == other.provenance()
    assert one.tokenizer.files == other.tokenizer.files


@pytest.mark.parametrize("source", ["org/other", "org/tiny@v2.0"])
def test_what_is_not_cached_costs_one_clear_error(source: str, cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"^{source}: no such path here, .*out of reach") as raised:
        open_checkpoint(source)
    assert "\n" not in str(raised.value)


def test_a_weight_that_the_cache_lacks_is_named(cache: Path) -> None:
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    link(
        snapshot,
        "model.safetensors.index.json",
        json.dumps({"weight_map": {"x": "model-00001-of-00001.safetensors"}}).encode(),
    )
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00001\.safetensors"):
        open_checkpoint("org/tiny")


def test_a_repository_of_something_else_is_refused(cache: Path) -> None:
    (cache / "models--org--tiny" / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"org/tiny: this repository .* has no config\.json"):
        open_checkpoint("org/tiny")


@pytest.mark.parametrize(
    "source",
    [
        "./org/tiny",
        "/org/tiny",
        "../org/tiny",
        "a/b/c",
        "tiny",
        "org/tiny.gguf",
        "org/",
        "folder/model",
        "a/b@",
        "C:\\a/b",
    ],
)
def test_what_looks_like_a_path_is_never_looked_up(source: str, cache: Path) -> None:
    assert not hub.is_repository(source)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_checkpoint(source)


def test_paths_win(cache: Path) -> None:
    tiny.write_huggingface(MODEL, cache.parent / "org" / "tiny")
    assert open_checkpoint("org/tiny").path == Path("org/tiny")


SHARDED = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("index", "weights"),
    [(None, ["model.safetensors"]), (SHARDED, sorted(SHARDED["weight_map"].values()))],
    ids=["one file", "shards"],
)
def test_only_what_is_needed_is_fetched(
    index: Any, weights: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts first, then the weights that they name, of the same commit; the revision and the token are passed on."""
    snapshot = tmp_path / COMMIT
    snapshot.mkdir()
    texts = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    texts += ["model.safetensors.index.json"] if index else []
    others = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "model.gguf", "a.png"]
    fetched: list[list[str]] = []
    asked: list[tuple[Any, ...]] = []

    def download(
        name: str, *, revision: str | None, allow_patterns: list[str], token: str | None, tqdm_class: Any
    ) -> str:
        names = [file for file in texts + weights + others if any(fnmatch.fnmatch(file, p) for p in allow_patterns)]
        for file in names:
            (snapshot / file).write_text(json.dumps(index or {}))
        fetched.append(names)
        asked.append((name, revision, token))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch("org/name@v1", token="secret") == snapshot
    assert fetched == [texts, weights]
    assert asked == [("org/name", "v1", "secret"), ("org/name", COMMIT, "secret")]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (errors.GatedRepoError, ValueError, "org/name: access to it must be asked for on its page"),
        (errors.RepositoryNotFoundError, FileNotFoundError, "private .* or it does not exist"),
        (errors.RevisionNotFoundError, FileNotFoundError, "no such revision"),
        (errors.HfHubHTTPError, FileNotFoundError, r"out of reach \(first second\)"),
    ],
)
def test_refusals_say_what_to_do(
    error: type[errors.HfHubHTTPError], raised: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        refusal = error.__new__(error)  # making one properly takes a response of the package's own HTTP client
        refusal.args = ("first\nsecond",)
        raise refusal

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(raised, match=words):
        hub.fetch("org/name")


def test_the_command_line_takes_ids_and_keeps_offline(cache: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}

    def inspect(source: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diptych", "inspect", source]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    done, failed = inspect("org/tiny"), inspect("org/other")
    assert done.returncode == 0 and "llama" in done.stdout
    assert failed.returncode == 2 and failed.stderr.startswith("Error: org/other: no such path here")
    assert failed.stderr.count("\n") == 1
