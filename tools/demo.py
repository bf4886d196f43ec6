"""From a checkpoint to an answer, with the commands that anyone would type: export, inspect, run.

    python tools/demo.py                                  # the default model, fetched first
    python tools/demo.py path/to/model.gguf --question "Who wrote Faust?"

A second run finds the model and the artifact and uses them again.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import fetch_models
from diptych.jax_model.readers import hub

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is gravity?"


def artifact_name(model: str) -> str:
    """``models/SmolLM2-135M.Q4_1.gguf`` -> ``smollm2-135m.q4_1``, ``org/SmolLM2-135M`` -> ``smollm2-135m``."""
    name = Path(model).name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-.") or "model"


def artifact_of(model: str) -> Path:
    """Where the demo keeps the artifact of a model."""
    return Path("artifacts") / artifact_name(model)


def source_of(model: str) -> str:
    """What ``diptych export`` reads: our own names are fetched, paths and Hub ids it finds. Raises FetchError."""
    return str(fetch_models.fetch(model)) if model in fetch_models.KNOWN else model


def made_from(model: str, artifact: Path) -> bool:
    """Whether an artifact's provenance is this model: two models may have one name.

    Raises FileNotFoundError or ValueError about a Hub id that can no longer be found.
    """
    files = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))["source"]["files"]
    if model in fetch_models.KNOWN:
        return [file["sha256"] for file in files.values()] == [fetch_models.KNOWN[model].sha256]
    source = hub.fetch(model) if hub.is_repository(model) else Path(model)
    folder = source if source.is_dir() else source.parent
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)


def diptych(*arguments: str) -> int:
    """Run our command line and show what is run."""
    print(f"\n$ diptych {shlex.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", "diptych", *arguments], cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Export a model and ask it something.")
    parser.add_argument("model", nargs="?", default=fetch_models.DEFAULT)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--no-answer", action="store_true", help="only see to it that the artifact is there")
    options = parser.parse_args()
    artifact = artifact_of(options.model)
    try:
        code = see_to(options.model, artifact)
    except (fetch_models.FetchError, OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    if code or options.no_answer:
        return code
    return diptych("run", str(artifact), options.question, "--max-tokens", "128")


def see_to(model: str, artifact: Path) -> int:
    """Make the artifact, or show the one that is there. Raises FetchError, FileExistsError."""
    if not (ROOT / artifact / "manifest.json").exists():
        return diptych("export", source_of(model), "--output", str(artifact))
    if not made_from(model, ROOT / artifact):
        raise FileExistsError(f"{artifact} was made from another model than {model}: remove it, or use diptych export")
    return diptych("inspect", str(artifact))


if __name__ == "__main__":
    sys.exit(main())
