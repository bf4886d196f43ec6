"""The engine that exports: what `diptych export` takes, in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.bench.engines import Engine as Process
from diptych.bench.engines import Spec
from diptych.export.pipeline import export


class Engine:
    """``options`` are those of :func:`diptych.export`."""

    def __init__(self, source: str, **options: Any) -> None:
        self._source, self._options = source, options

    def seconds(self, output: str) -> Mapping[str, float]:
        """By stage."""
        return export(self._source, output, **self._options).seconds


def cost(source: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """Seconds by stage and peak memory in bytes of an export that is made in ``folder`` and thrown away.

    Raises EngineError when it fails.
    """
    spec = Spec("export", Path(__file__), {"source": str(source), **options}, environment={"JAX_PLATFORMS": "cpu"})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=folder) as scratch, Process(spec) as engine:
        seconds = engine.ask("call", name="seconds", output=str(Path(scratch) / "artifact"))
        return {"seconds": seconds, "memory": engine.ask("memory").get("memory")}
