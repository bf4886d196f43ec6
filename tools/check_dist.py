"""Check that a wheel and an sdist contain every module of the project, and the licence.

python tools/check_dist.py dist/*
"""

from __future__ import annotations

import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules() -> dict[str, str]:
    """Every file that is to be installed: its path in the repository and its path in site-packages."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    return {
        path.relative_to(ROOT).as_posix(): f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in settings["package-dir"].items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


def missing_from(archive: Path) -> list[str]:
    """The files that the wheel or sdist lacks."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = set(wheel.namelist())
        return [name for name in modules().values() if name not in names]
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    return [name for name in (*modules(), "pyproject.toml", "README.md", "LICENSE") if name not in names]


def main(archives: Sequence[str]) -> int:
    failed = False
    for archive in map(Path, archives):
        missing = missing_from(archive)
        print(f"{archive.name}: " + (f"lacks {', '.join(missing)}" if missing else f"all {len(modules())} files there"))
        failed = failed or bool(missing)
    return 1 if failed or not archives else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
