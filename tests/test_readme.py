"""The README is true: its example runs, its file map and its table of commands are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from diptych.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("jax_model", "export", "runtime")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its head."""
    table = re.search(r"(^\|.*\n)+", README[README.index(f"## {heading}") :], re.MULTILINE)
    assert table
    lines = table[0].replace(r"\|", "/").splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_example_runs(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2_gguf.name).symlink_to(smollm2_gguf)
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example
    exec(compile(example[1], "README.md", "exec"), {})
    assert capsys.readouterr().out == "The capital of France is Paris."


def test_the_file_map_names_what_is_there() -> None:
    paths = [code(cells[0])[0] for cells in rows("File map")]
    assert paths == sorted(set(paths), key=paths.index)
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("room", ROOMS)
def test_the_file_map_is_complete(room: str) -> None:
    named = {code(cells[0])[0].rstrip("/") for cells in rows("File map")}
    for path in (ROOT / room).glob("*.py"):
        assert path.name == "__init__.py" or f"{room}/{path.name}" in named, path.name
    for path in (ROOT / room).glob("*/__init__.py"):
        assert f"{room}/{path.parent.name}" in named, path.parent.name


def test_the_table_of_commands_is_complete() -> None:
    documented = {code(cells[0])[0].split()[1]: set(code(cells[2])) for cells in rows("Command line")}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
    }
    assert documented == {
        name: {option for option in names if option.startswith("--") and option != "--help"}
        for name, names in options.items()
    }


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/facts.md", "docs/families.md", "artifacts/README.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
