"""Engines as data, and their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
# How libraries of matrix products are told their number of threads.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class EngineError(Exception):
    """An engine raised, or its process ended; the message is one line."""


@dataclass(frozen=True)
class Spec:
    """How to start an engine, and what is known without starting it.

    ``adapter`` is the file with its class ``Engine``, ``options`` what that is opened with, ``python`` the interpreter
    of the environment that it is installed in.  ``weights`` are the bytes of the file that holds them, ``read`` those
    that a decode step reads, and ``operations`` those that a token costs in a prefill, where they are known.  ``model``
    tells one model from another of the same name.
    """

    name: str
    adapter: Path
    options: Mapping[str, Any]
    python: str = sys.executable
    batches: bool = False
    weights: int | None = None
    read: int | None = None
    operations: int | None = None
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def ceilings(threads: int) -> Spec:
    """The products are split among threads of our own, so each may use one."""
    environment = dict.fromkeys(_THREAD_VARIABLES, "1")
    return Spec("ceilings", HERE / "ceilings.py", {"threads": threads}, environment=environment)


class Engine:
    """An engine's process: ``with Engine(spec) as engine: engine.ask("prefill", tokens=[…])``."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        command = [spec.python, "-P", str(HERE / "worker.py"), str(spec.adapter), json.dumps(dict(spec.options))]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe would fill up when an engine talks much
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            env={**os.environ, **spec.environment},
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Raises EngineError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.spec.name}: {answer['error']}")
        return answer["value"]

    def _ended(self) -> EngineError:
        self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode("utf-8", "replace")
        last = errors.strip().splitlines()[-1:] or [f"it said nothing, exit code {self._process.returncode}"]
        return EngineError(f"{self.spec.name}: its process ended: {last[0].strip()}")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
