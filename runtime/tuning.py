"""Which settings an artifact is fastest with on this machine: measured once, remembered in the user's cache folder.

What is remembered is one small file for each artifact, processor, number of cores and version of ONNX Runtime, put in
place whole, so that processes may tune and load at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from diptych.runtime.machine import physical_cores, processor
from diptych.runtime.manifest import Manifest
from diptych.runtime.programs import open_programs
from diptych.runtime.session import Session
from diptych.runtime.settings import Settings, choose

__all__ = ["Trial", "forget", "remembered", "tune"]

PROMPT, ANSWER = 512, 128  # tokens: the request whose time is compared
WARM_UP, STEPS = 2, 24  # decode steps before those that are timed, and these
ROUNDS = 3  # over all candidates, against a machine's moods
WORTH = 0.95  # two sessions hold the weights twice, and have to be so much faster

# Every candidate differs from the defaults in these; the first is the default.
CANDIDATES: tuple[Mapping[str, Any], ...] = (
    {"sessions": "one"},
    {"sessions": "one", "spinning": False},
    {"sessions": "two"},
    {"sessions": "two", "float32_prefill": True},
)


@dataclass(frozen=True)
class Trial:
    """What was measured with some settings: medians, in seconds, of a prompt and of one decode step behind it."""

    settings: Settings
    prompt_tokens: int
    prefill_s: float
    decode_s: float
    chosen: bool = False

    @property
    def request_s(self) -> float:
        """Of a request with that prompt and :data:`ANSWER` tokens of answer."""
        return self.prefill_s + ANSWER * self.decode_s

    def to_json(self) -> dict[str, Any]:
        measured = {"prompt_tokens": self.prompt_tokens, "prefill_s": self.prefill_s, "decode_s": self.decode_s}
        return {**self.settings.to_json(), **measured, "request_s": self.request_s, "chosen": self.chosen}


def tune(path: str | Path, progress: Callable[[str, int, int], object] | None = None) -> list[Trial]:
    """Measure the candidates on this machine and remember the fastest, which ``load`` then takes by default.

    Raises what opening an artifact raises, and OSError where nothing can be remembered.
    """
    manifest = Manifest.open(path)
    every = [choose(candidate) for candidate in CANDIDATES]
    if not manifest.data.get("quantization"):
        every = [settings for settings in every if not settings.float32_prefill]  # it is about integers
    place = _place(manifest)
    place.parent.mkdir(parents=True, exist_ok=True)
    measured: list[list[tuple[float, float]]] = [[] for _ in every]
    steps = min(STEPS, (manifest.max_context - WARM_UP) // 2)
    length = min(PROMPT, manifest.max_context - WARM_UP - steps)
    for turn in range(ROUNDS * len(every)):
        i = turn % len(every)
        measured[i].append(_measure(manifest, every[i], length, steps))
        if progress:
            progress("tune", turn + 1, ROUNDS * len(every))
    trials = [
        Trial(settings, length, *(statistics.median(times) for times in zip(*rounds, strict=True)))
        for settings, rounds in zip(every, measured, strict=True)
    ]
    best = min(trials, key=lambda trial: trial.request_s / (WORTH if trial.settings.sessions == "two" else 1))
    _write(place, best.settings.to_json())
    return [Trial(**{**vars(trial), "chosen": trial is best}) for trial in trials]


def remembered(manifest: Manifest) -> dict[str, Any] | None:
    """The settings that :func:`tune` found for this artifact on this machine; None if it was not run."""
    try:
        found: dict[str, Any] = json.loads(_place(manifest).read_text(encoding="utf-8"))
        Settings(**found)
    except (OSError, RuntimeError, ValueError, TypeError):  # not there, or not ours to read: tuning is no promise
        return None
    return found


def forget(path: str | Path) -> bool:
    """Back to the defaults; returns whether anything had been remembered."""
    place = _place(Manifest.open(path))
    if not place.exists():
        return False
    place.unlink()
    return True


def _measure(manifest: Manifest, settings: Settings, length: int, steps: int) -> tuple[float, float]:
    """Seconds of a prompt of ``length`` tokens, and of one decode step behind it, averaged over ``steps``."""
    session = Session(open_programs(manifest, settings), capacity=length + WARM_UP + steps)
    tokens = (np.arange(length) * 7919 + 13) % manifest.vocabulary.size
    session.prefill(0, tokens)
    session.rewind(0)
    start = time.perf_counter()
    session.prefill(0, tokens)
    prefill = time.perf_counter() - start
    for _ in range(WARM_UP):
        session.decode(tokens[:1])
    start = time.perf_counter()
    for _ in range(steps):
        session.decode(tokens[:1])
    return prefill, (time.perf_counter() - start) / steps


def _place(manifest: Manifest) -> Path:
    files = {name: entry.sha256 for name, entry in manifest.files.items()}
    key = [ort.__version__, processor(), physical_cores(), files]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return _cache_folder() / "tuning" / f"{name}.json"


def _cache_folder() -> Path:
    """By the conventions of the systems: XDG's, and those of Windows and macOS."""
    if given := os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA"):
        return Path(given) / "diptych"
    home = Path.home()
    mac = home / "Library" / "Caches"
    return (mac if mac.is_dir() else home / ".cache") / "diptych"


def _write(place: Path, content: Mapping[str, Any]) -> None:
    part = place.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(place)
