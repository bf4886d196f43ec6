"""What parity found, as data. Importing this costs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["SKIPPED", "Certificate", "Check", "ParityError", "Progress", "quiet"]

SKIPPED: Mapping[str, Any] = {"status": "skipped", "checks": []}


class Progress(Protocol):
    """Called with the stage's name, what is done and what there is to do."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def quiet(stage: str, done: int, total: int, /) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Check:
    """One comparison. ``max_abs_error`` is None where a number was not finite, or nothing could be compared."""

    name: str
    what: str
    count: int  # of the numbers compared
    max_abs_error: float | None
    tolerance: float
    passed: bool


@dataclass(frozen=True)
class Certificate:
    """Every check that was made, in order."""

    checks: tuple[Check, ...]

    @property
    def status(self) -> Literal["passed", "failed"]:
        return "passed" if all(check.passed for check in self.checks) else "failed"

    def to_json(self) -> dict[str, Any]:
        """As manifests hold it under ``verification``."""
        return {"status": self.status, "checks": [asdict(check) for check in self.checks]}


class ParityError(Exception):
    """The artifact is not what the checkpoint and the JAX model say that it should be. ``certificate`` says where."""

    def __init__(self, artifact: str | Path, certificate: Certificate) -> None:
        failed = [f"{check.name} ({_numbers(check)})" for check in certificate.checks if not check.passed]
        super().__init__(
            f"{artifact}: verification failed in {', '.join(failed)}; nothing was written "
            "(--keep-failed or keep_failed=True keeps the artifact, marked as failed)"
        )
        self.certificate = certificate


def _numbers(check: Check) -> str:
    error = "not finite" if check.max_abs_error is None else f"{check.max_abs_error:.2g}"
    return f"{check.what}: {error}, allowed {check.tolerance:.2g}"
