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

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is gravity?"
FROM_HUB = ["*.json", "*.safetensors", "*.jinja"]


def artifact_name(model: str) -> str:
    """``models/SmolLM2-135M.Q4_1.gguf`` -> ``smollm2-135m.q4_1``, ``org/SmolLM2-135M`` -> ``smollm2-135m``."""
    name = Path(model).name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-.") or "model"


def artifact_of(model: str) -> Path:
    """Where the demo keeps the artifact of a model."""
    return Path("artifacts") / artifact_name(model)


def source_of(model: str) -> str:
    """What ``diptych export`` reads, fetched where ``model`` is one of our names or a Hub id (``org/name``)."""
    if model in fetch_models.KNOWN:
        return str(fetch_models.fetch(model))
    if Path(model).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    return fetch_from_hub(model)


def made_from(model: str, artifact: Path) -> bool:
    """Whether an artifact's provenance is this model: two models may have one name."""
    files = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))["source"]["files"]
    if model in fetch_models.KNOWN:
        return [file["sha256"] for file in files.values()] == [fetch_models.KNOWN[model].sha256]
    source = Path(model) if Path(model).exists() else hub_folder(model)
    folder = source if source.is_dir() else source.parent
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)


def hub_folder(model: str) -> Path:
    return fetch_models.MODELS / model.replace("/", "--")


def fetch_from_hub(model: str) -> str:
    """Download what an export reads of a Hugging Face repository into ``models/``. Raises FetchError."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    folder = hub_folder(model)
    fetch_models.say(f"{model} is no path here: fetching it from the Hugging Face Hub into {folder}")
    try:
        return huggingface_hub.snapshot_download(model, local_dir=folder, allow_patterns=FROM_HUB)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise fetch_models.FetchError(
            f"{model} is neither a path nor could it be fetched from the Hub: {reason}"
        ) from None


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
    except (fetch_models.FetchError, OSError) as error:
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
