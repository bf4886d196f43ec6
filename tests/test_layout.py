"""The layout: one import name, one copy of each module, arrows between rooms, a runtime that stands alone."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from diptych.cli.errors import EXPORT_EXTRA

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]

# What each room may import of the others; "diptych" is the facade, which knows the version.
ROOMS = {
    "diptych.jax_model": {"diptych.jax_model"},
    "diptych.export": {"diptych.export", "diptych.jax_model", "diptych.runtime", "diptych"},
    "diptych.runtime": {"diptych.runtime"},
    "diptych": {"diptych", "diptych.cli", "diptych.export", "diptych.jax_model", "diptych.runtime"},
}


def modules(room: str) -> dict[str, Path]:
    """Every module of a room by its import name, found in the folder that the build maps to that room."""
    folder = ROOT / FOLDERS[room]
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join((room, *parts)).removesuffix(".__init__")] = path
    return found


def imports(path: Path, *, at_import_time: bool = False) -> Iterator[str]:
    """The modules that a file imports, or only those that it imports as soon as it is imported itself."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path}: relative imports hide which room a name comes from"
                yield child.module or ""
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            elif at_import_time and (is_function(child) or is_type_checking(child)):
                continue
            yield from walk(child)

    return walk(ast.parse(path.read_text(encoding="utf-8")))


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def room_of(module: str) -> str:
    rooms = ("diptych.jax_model", "diptych.export", "diptych.runtime", "diptych.cli")
    return next((room for room in rooms if module == room or module.startswith(room + ".")), "diptych")


def third_party(path: Path, *, at_import_time: bool = False) -> set[str]:
    tops = {name.partition(".")[0] for name in imports(path, at_import_time=at_import_time)}
    return tops - set(sys.stdlib_module_names) - {"diptych"}


def import_names(requirements: list[str]) -> set[str]:
    """The modules that come with requirements such as ``onnx-ir>=1.0``, as the installed distributions state them."""
    wanted = {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    return {
        module
        for module, distributions in packages_distributions().items()
        if wanted & {canonical(distribution) for distribution in distributions}
    }


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def run_python(code: str) -> str:
    """What a fresh interpreter prints, started outside the checkout."""
    return subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").strip()


def test_the_links_for_type_checkers_agree_with_the_build() -> None:
    for package, folder in FOLDERS.items():
        assert (ROOT / "src" / package.replace(".", "/")).resolve() == ROOT / folder, package


def test_every_subpackage_is_in_the_wheel() -> None:
    found = {
        name if path.name == "__init__.py" else name.rpartition(".")[0]
        for room in FOLDERS
        for name, path in modules(room).items()
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms(room: str) -> None:
    for path in modules(room).values():
        for module in imports(path):
            if module.partition(".")[0] == "diptych":
                assert room_of(module) in ROOMS[room], f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_import_is_declared(room: str) -> None:
    base, extra = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]["export"]
    allowed = import_names(base if room == "diptych.runtime" else base + extra)
    allowed -= {"typer", "rich"} if room != "diptych" else set()
    for path in modules(room).values():
        assert third_party(path) <= allowed, path.relative_to(ROOT)


def test_what_tests_and_tools_import_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = import_names(PROJECT["project"]["dependencies"] + extras["export"] + extras["dev"])
    files = [path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    ours = {path.stem for path in files} | {"reference"}
    brought_along = {"torch"}  # by the extra `reference`, which few install
    for path in files:
        assert third_party(path) <= declared | ours | brought_along, path.relative_to(ROOT)


def test_the_command_line_knows_what_the_extra_brings() -> None:
    base = import_names(PROJECT["project"]["dependencies"])
    rooms = ("diptych.jax_model", "diptych.export")
    needed = {name for room in rooms for path in modules(room).values() for name in third_party(path)} - base
    assert needed == EXPORT_EXTRA


def test_everything_declared_is_imported() -> None:
    used = {name for room in FOLDERS for path in modules(room).values() for name in third_party(path)}
    for requirement in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["export"]:
        assert import_names([requirement]) & used, f"{requirement} is declared and never imported"


def test_the_command_line_starts_light() -> None:
    allowed = {"typer", "rich"}
    for path in modules("diptych").values():
        assert third_party(path, at_import_time=True) <= allowed, path.relative_to(ROOT)


def test_the_runtime_stands_alone() -> None:
    loaded = run_python("import diptych.runtime, sys; print(*sys.modules)").split()
    foreign = {"jax", "flax", "onnx", "onnx_ir", "transformers", "torch", "safetensors", "gguf", "typer", "rich"}
    assert not foreign & set(loaded)
    assert not [name for name in loaded if name.startswith(("diptych.export", "diptych.jax_model", "diptych.cli"))]


def test_nothing_of_ours_loads_an_optimiser() -> None:
    names = [name for room in FOLDERS for name in modules(room) if not name.endswith("__main__")]
    loaded = run_python(
        f"import importlib, sys\nfor name in {sorted(names)}: importlib.import_module(name)\nprint(*sys.modules)"
    ).split()
    assert {"jax", "flax", *names} <= set(loaded)
    assert "optax" not in loaded


@pytest.mark.parametrize("bare", ["export", "runtime", "jax_model"])
def test_an_application_may_have_modules_of_the_same_names(bare: str) -> None:
    assert run_python(f"import importlib.util; print(importlib.util.find_spec({bare!r}))") == "None"


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "diptych": ["__version__", "export", "load"],
        "diptych.runtime": [
            "Generation",
            "LanguageModel",
            "Manifest",
            "Message",
            "Result",
            "Session",
            "Text",
            "Timing",
            "Usage",
            "load",
        ],
        "diptych.cli": ["main"],
    }.items(),
)
def test_public_surface(module: str, names: list[str]) -> None:
    package = importlib.import_module(module)
    assert sorted(package.__all__) == names
    for name in names:
        assert getattr(package, name).__class__
