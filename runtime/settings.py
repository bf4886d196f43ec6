"""How an artifact is run on this machine: what was asked for, else what ``diptych tune`` found, else a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from diptych.runtime.machine import physical_cores

Sessions = Literal["one", "two"]


@dataclass(frozen=True)
class Settings:
    """What changes speed and memory, and no promise.

    ``sessions``: ``"one"`` runs prefill's graph in both phases, ``"two"`` gives each phase its own; every ONNX Runtime
    session packs its own copy of the weights.  ``threads`` of each session; 0 lets ONNX Runtime count.  ``spinning``:
    threads without work look out for more for a millisecond before they sleep.  ``float32_prefill``: with two sessions,
    prefill does not round activations for products with 4-bit integers in blocks of 32, where this ONNX Runtime has a
    kernel for it.  ``why`` says of each where it comes from.
    """

    sessions: Sessions = "one"
    threads: int = 0
    spinning: bool = True
    float32_prefill: bool = False
    why: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.sessions not in get_args(Sessions):
            raise ValueError(f"sessions must be one of {', '.join(get_args(Sessions))}, not {self.sessions!r}")
        if type(self.threads) is not int or self.threads < 0:
            raise ValueError(f"threads must be an integer of at least 1, not {self.threads!r}")
        for name in ("spinning", "float32_prefill"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.float32_prefill and self.sessions == "one":
            raise ValueError("float32_prefill needs a session of its own for prefill: sessions='two'")

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DEFAULTS}


DEFAULTS: Mapping[str, str] = {
    "sessions": "default: one copy of the packed weights serves both phases",
    "threads": "default: the physical cores that this process may use",
    "spinning": "default: faster where cores are idle",
    "float32_prefill": "default: both phases compute alike",
}


def choose(asked: Mapping[str, Any], tuned: Mapping[str, Any] | None = None) -> Settings:
    """Settings from those ``asked`` for (None: not asked), those ``tuned`` on this machine, and defaults.

    What was tuned was tuned together: it counts only where nothing of it is asked for.  Raises ValueError for a wrong
    value.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked.get("threads") == 0:
        raise ValueError("threads must be an integer of at least 1, not 0")
    why = dict(DEFAULTS) | dict.fromkeys(asked, "asked for")
    if not asked and tuned is not None:
        return Settings(**tuned, why=dict.fromkeys(DEFAULTS, "measured by diptych tune"))
    return Settings(**{"threads": physical_cores(), **asked}, why=why)
