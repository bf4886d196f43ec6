"""The engine that exports: what an export takes, in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.bench.engines import Engine as Process
from diptych.bench.engines import Spec
from diptych.export.job import KV_DTYPES
from diptych.export.pipeline import export
from diptych.runtime import Manifest


class Engine:
    """``options`` are those of :func:`diptych.export`."""

    def __init__(self, source: str, options: Mapping[str, Any]) -> None:
        self._source, self._options = source, options

    def seconds(self, output: str) -> Mapping[str, float]:
        """By stage."""
        return export(self._source, output, **self._options).seconds


def options_of(manifest: Manifest) -> dict[str, Any]:
    """The options of :func:`diptych.export` that an artifact was made with, as far as they cost anything."""
    quantization = manifest.data.get("quantization")
    options: dict[str, Any] = {"target": manifest.target, "max_context": manifest.max_context}
    if manifest.cache.dtype != "float32":
        options["kv_dtype"] = next(name for name, dtype in KV_DTYPES.items() if dtype == manifest.cache.dtype)
    options["quantize"] = "none" if quantization is None else quantization["scheme"]
    if manifest.verification == "skipped":
        options["verify"] = False
        options["accuracy_level"] = 1 if quantization is None else quantization["accuracy_level"]
    return options


def cost(source: Path, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Seconds by stage and peak memory in bytes of an export that is made in ``folder`` and thrown away.

    Raises EngineError when it fails.
    """
    arguments = {"source": str(source), "options": dict(options)}
    spec = Spec("export", Path(__file__), arguments, environment={"JAX_PLATFORMS": "cpu"})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=folder) as scratch, Process(spec) as engine:
        seconds = engine.ask("call", name="seconds", output=str(Path(scratch) / "artifact"))
        return {"options": dict(options), "seconds": seconds, "memory": engine.ask("memory").get("memory")}
