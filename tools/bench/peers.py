"""Other runtimes as data: what they are installed from, and how their model is made from the same checkpoint.

Each has an environment of its own in ``build/peers/``, because their requirements exclude each other and ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diptych.bench.engines import Spec
from diptych.bench.plan import Plan

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "peers"
ENGINES = HERE / "engines"


class PeerError(Exception):
    """A peer could not be set up; the message is one line."""


@dataclass(frozen=True)
class Peer:
    """``name`` is also that of its adapter and its environment; ``model`` makes from a GGUF file what it opens."""

    name: str
    requirements: tuple[str, ...]
    model: Callable[[Path, Path], Path]  # the GGUF file, the environment's Python -> what the adapter opens
    environment: Mapping[str, str] = field(default_factory=dict)  # while it is installed

    @property
    def python(self) -> Path:
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        return FOLDER / self.name / scripts / "python"

    def is_installed(self) -> bool:
        return self.python.exists() and _installed(self.python).exists()


def _same_file(gguf: Path, python: Path) -> Path:
    return gguf


def _built_for_genai(gguf: Path, python: Path) -> Path:
    """Int4 as the builder makes it by default; made once."""
    folder = FOLDER / "models" / f"{gguf.stem}.genai-int4"
    if not (folder / "genai_config.json").exists():
        floats = FOLDER / "models" / f"{gguf.stem}.float32"
        _run([str(python), str(HERE / "gguf_to_hugging_face.py"), str(gguf), str(floats)])
        command = [str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(floats), "-o", str(folder)]
        _run([*command, "-p", "int4", "-e", "cpu", "-c", str(FOLDER / "cache"), "--extra_options", "hf_token=false"])
        shutil.rmtree(floats)
    return folder


PEERS = (
    Peer(
        "onnxruntime_genai",
        ("onnxruntime-genai", "onnx", "onnx-ir", "torch", "transformers", "gguf", "accelerate"),
        _built_for_genai,
    ),
    # Compiled here for this processor, which takes some ten minutes on two cores.
    Peer("llama_cpp", ("llama-cpp-python",), _same_file, {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}),
    Peer("openvino_genai", ("openvino-genai",), _same_file),
)


def install(peer: Peer) -> None:
    """Make the peer's environment, unless it is there. Raises PeerError."""
    if peer.is_installed():
        return
    folder = peer.python.parents[1]
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(peer.python), "-m", "pip", "install", "--quiet", *peer.requirements], peer.environment)
    _installed(peer.python).touch()


def spec(peer: Peer, gguf: Path, plan: Plan) -> Spec:
    """The peer as an engine. Raises PeerError where its model cannot be made."""
    model = peer.model(gguf, peer.python)
    size = _weights(model)
    options = {"model": str(model), "threads": plan.threads}
    if peer.name != "openvino_genai":  # which sizes its cache itself
        options["capacity"] = plan.capacity
    read = size if peer.name != "openvino_genai" else None  # it has other numbers than its file
    return Spec(peer.name, ENGINES / f"{peer.name}.py", options, str(peer.python), weights=size, read=read)


def _weights(model: Path) -> int:
    """Bytes of the file that holds them: of a folder's, the largest."""
    return max(file.stat().st_size for file in ([model] if model.is_file() else model.iterdir()))


def _installed(python: Path) -> Path:
    return python.parents[1] / ".installed"


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    if done.returncode:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise PeerError(f"{' '.join(command[:6])} … failed: {last[0]}")
