"""Reference values: what transformers computes in float32 for fixed token ids, and how far other logits are from it.

A sample is a prompt with its greedy continuation.  Its logits are kept at every position, in some random columns of the
vocabulary; the log of the sum of exponentials stands for the other columns, and the argmax for the decision.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

VALUES = Path(__file__).parent / "values"


@dataclass(frozen=True)
class Sample:
    """``logits[i]`` and its companions are what the model says behind ``ids[: i + 1]``; R = len(ids) - 1."""

    ids: np.ndarray  # [R + 1] int32: the prompt, then its greedy continuation
    prompt_length: np.ndarray  # [] int32
    columns: np.ndarray  # [C] int32, ascending
    logits: np.ndarray  # [R, C] float32
    logsumexp: np.ndarray  # [R] float32
    argmax: np.ndarray  # [R] int32

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = self.ids[: int(self.prompt_length)].tolist()
        return ids

    @property
    def continuation(self) -> list[int]:
        ids: list[int] = self.ids[int(self.prompt_length) :].tolist()
        return ids

    def error(self, logits_PV: np.ndarray, start: int = 0) -> float:
        """The largest difference from ``logits_PV`` at the positions from ``start`` on; infinite where one is NaN."""
        rows = slice(start, start + len(logits_PV))
        differences = [logits_PV[:, self.columns] - self.logits[rows], logsumexp(logits_PV) - self.logsumexp[rows]]
        worst = max(float(np.abs(difference).max()) for difference in differences)
        return worst if np.isfinite(logits_PV).all() else float("inf")


def logsumexp(logits_PV: np.ndarray) -> np.ndarray:
    """[P] float32, summed in float64."""
    peak_P = logits_PV.max(axis=-1)
    total_P = np.exp(logits_PV - peak_P[:, None]).sum(axis=-1, dtype=np.float64)
    return np.asarray(peak_P + np.log(total_P), np.float32)


def reduce(ids: Sequence[int], prompt_length: int, logits_RV: np.ndarray, columns: int) -> Sample:
    """The sample of ``ids`` from its full logits, keeping ``columns`` of them (all, if there are no more)."""
    V = logits_RV.shape[1]
    draw = np.random.RandomState(zlib.crc32(f"{V}/{columns}".encode())).permutation(V)
    kept = np.sort(draw[:columns]).astype(np.int32)
    return Sample(
        ids=np.asarray(ids, np.int32),
        prompt_length=np.asarray(prompt_length, np.int32),
        columns=kept,
        logits=logits_RV[:, kept].astype(np.float32),
        logsumexp=logsumexp(logits_RV),
        argmax=logits_RV.argmax(axis=-1).astype(np.int32),
    )


def save(name: str, samples: Sequence[Sample]) -> Path:
    """Write ``values/<name>.npz``; equal samples give equal bytes."""
    VALUES.mkdir(exist_ok=True)
    arrays = {
        f"{i}.{field.name}": getattr(sample, field.name) for i, sample in enumerate(samples) for field in fields(Sample)
    }
    path = VALUES / f"{name}.npz"
    np.savez_compressed(path, **arrays)
    return path


def load(name: str) -> list[Sample]:
    """The stored samples of a checkpoint. Raises FileNotFoundError."""
    with np.load(VALUES / f"{name}.npz", allow_pickle=False) as arrays:
        count = len({key.split(".")[0] for key in arrays})
        return [Sample(**{field.name: arrays[f"{i}.{field.name}"] for field in fields(Sample)}) for i in range(count)]
