"""Assembling an artifact's folder: complete or not there, whatever happens in between."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.export import artifact
from diptych.export.artifact import assemble, write_text


def fill(folder: Path, text: str) -> None:
    for name in ("manifest.json", "weights.safetensors"):
        write_text(folder, name, text)


def make(output: Path, text: str, *, force: bool = False) -> None:
    with assemble(output, force=force) as folder:
        fill(folder, text)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole(text: str) -> dict[str, str]:
    return {"manifest.json": text, "weights.safetensors": text}


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def one_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to swap two folders: the system's own, and the renames for systems without it."""
    if not request.param:
        monkeypatch.setattr(artifact, "_renameat2_exchange", lambda one, other: False)
    return bool(request.param)


def test_nothing_has_the_final_name_before_the_end(tmp_path: Path) -> None:
    output = tmp_path / "model"
    with assemble(output) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".model.partial-")
        fill(folder, "new")
        assert not output.exists()
    assert content(output) == whole("new")
    assert names(tmp_path) == ["model"]


def test_the_folder_gets_the_usual_permissions(tmp_path: Path) -> None:
    make(tmp_path / "model", "new")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("existing", [True, False])
def test_an_exception_leaves_what_was_there(error: BaseException, existing: bool, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "er" / "model"
    if existing:
        make(output, "old")
    with pytest.raises(type(error)), assemble(output, force=True) as folder:
        fill(folder, "new")
        raise error
    if existing:
        assert names(output.parent) == ["model"]
        assert content(output) == whole("old")
    else:
        assert names(tmp_path) == []


def test_an_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    make(tmp_path / "model", "old")
    with pytest.raises(FileExistsError, match=r"model exists already: .*--force"):
        make(tmp_path / "model", "new")
    assert content(tmp_path / "model") == whole("old")


@pytest.mark.usefixtures("one_step")
def test_force_replaces(tmp_path: Path) -> None:
    make(tmp_path / "model", "old")
    make(tmp_path / "model", "new", force=True)
    assert content(tmp_path / "model") == whole("new")
    assert names(tmp_path) == ["model"]


def test_force_replaces_the_target_of_a_link(tmp_path: Path) -> None:
    make(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    make(tmp_path / "link", "new", force=True)
    assert content(tmp_path / "real") == whole("new")
    assert (tmp_path / "link").is_symlink()


def test_force_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make(tmp_path / "model", "new", force=True)
    assert content(tmp_path / "model") == whole("new")


def test_force_never_replaces_what_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("ten years")
    (tmp_path / "file").write_text("x")
    for name in ("home", "file"):
        with pytest.raises(FileExistsError, match="is no artifact"):
            make(tmp_path / name, "new", force=True)
    assert content(tmp_path / "home") == {"thesis.txt": "ten years"}


def test_a_root_is_no_output() -> None:
    with pytest.raises(ValueError, match="no name"):
        make(Path("/"), "new", force=True)


@pytest.mark.parametrize("parent", ["file", "file/below", "file/far/below"])
def test_a_parent_that_is_a_file_is_named(parent: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"cannot write to .*: .*/file is not a folder"):
        make(tmp_path / parent / "model", "new")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("parent", ["below/locked", "locked"])
def test_a_parent_that_cannot_be_written_is_refused_before_any_work(parent: str, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / parent).mkdir(mode=0o500)
    if os.access(tmp_path / parent, os.W_OK):
        parent = f"/proc/{parent}"  # to root everything is writable, but not this
    with pytest.raises(OSError, match=r"cannot write to .*locked: \w+|cannot write to /proc.*: \w+"):
        make(tmp_path / parent / "model", "new")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "C:x", "a\0"])
def test_a_file_name_cannot_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file name"):
        write_text(tmp_path, name, "x")


@pytest.mark.parametrize("name", ["模型 é😀 space", "n" * 200, "🦙" * 63, "-rf *"])
def test_odd_names(name: str, tmp_path: Path) -> None:
    make(tmp_path / name, "old")
    make(tmp_path / name, "new", force=True)
    assert content(tmp_path / name) == whole("new")
    assert names(tmp_path) == [name]


# ------------------------------------------------------------------------------------------------------- sudden deaths

ENDLESS = """
import sys
from pathlib import Path
from diptych.export.artifact import assemble, write_text
print("ready", flush=True)
generation = 0
while True:
    with assemble(sys.argv[1], force=True) as folder:
        for name in ("manifest.json", "weights.safetensors"):
            write_text(folder, name, str(generation) * 100_000)
    generation += 1
"""


def endless(output: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, output], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_whenever_a_run_is_killed_the_artifact_is_whole_or_absent(sent: signal.Signals, tmp_path: Path) -> None:
    output = tmp_path / "model"
    moments = random.Random(7)
    for _ in range(6):
        with endless(output) as process:
            time.sleep(moments.uniform(0, 0.02))
            process.send_signal(sent)
        assert process.returncode != 0
        if output.exists():
            found = content(output)
            assert found == whole(found["manifest.json"])
            assert len(found["manifest.json"]) >= 100_000
        if sent != signal.SIGKILL:
            assert names(tmp_path) in ([], ["model"]), "the partial folder should have been removed"
    make(output, "after", force=True)
    assert names(tmp_path) == ["model"], "what dead runs left behind should have been removed"


def test_a_living_run_and_strangers_are_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / ".model.partial-notours"
    nested = tmp_path / ".model.partial-00000000"
    other = tmp_path / ".model2.partial-00000000"
    dead = tmp_path / ".model.partial-11111111"
    for folder in (stranger, nested / "folder", other, dead):
        folder.mkdir(parents=True)
    with assemble(tmp_path / "model") as living:
        make(tmp_path / "model", "second run")
        fill(living, "first run")
        assert not dead.exists()
        assert {stranger, nested, other, living} <= set(tmp_path.iterdir())
        (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert content(tmp_path / "model") == whole("first run")


def test_a_death_between_two_renames_is_mended(tmp_path: Path) -> None:
    make(tmp_path / "model", "old")
    (tmp_path / "model").rename(tmp_path / ".model.partial-00000000.old")
    with pytest.raises(FileExistsError, match="exists already"):
        make(tmp_path / "model", "new")
    assert content(tmp_path / "model") == whole("old")


def test_two_runs_to_one_place_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="model exists already"), assemble(tmp_path / "model") as slow:
        fill(slow, "slow")
        make(tmp_path / "model", "quick")
    assert content(tmp_path / "model") == whole("quick")
    assert names(tmp_path) == ["model"]
