"""From a checkpoint to an answer, with the commands that anyone would type: export, inspect, run.

    python tools/demo.py                                  # the default model, fetched first
    python tools/demo.py path/to/model.gguf --question "Who wrote Faust?"

A second run finds the model and the artifact and uses them again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import fetch_models

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is gravity?"
FROM_HUB = ["*.json", "*.safetensors", "*.jinja"]
# What file names add to a model's name: SmolLM2-135M-Instruct.Q4_1, gemma-3-270m-q4_k_m, tiny-f16.
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32)$")


def artifact_name(model: str) -> str:
    """``models/SmolLM2-135M-Instruct.Q4_1.gguf``, ``org/SmolLM2-135M-Instruct`` -> ``smollm2-135m-instruct``."""
    name = Path(model).name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", _QUANTISATION.sub("", name)).strip("-.") or "model"


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


def fetch_from_hub(model: str) -> str:
    """Download what an export reads of a Hugging Face repository into ``models/``. Raises FetchError."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    folder = fetch_models.MODELS / model.replace("/", "--")
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
    artifact = str(artifact_of(options.model))
    try:
        if (ROOT / artifact / "manifest.json").exists():
            code = diptych("inspect", artifact)
        else:
            code = diptych("export", source_of(options.model), "--output", artifact)
    except (fetch_models.FetchError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    if code or options.no_answer:
        return code
    return diptych("run", artifact, options.question, "--max-tokens", "128")


if __name__ == "__main__":
    sys.exit(main())
