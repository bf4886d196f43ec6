"""Rope settings as configurations carry them (transformers' ``rope_parameters``), read strictly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.rope import Linear, Llama3, LongRope, Rope, Scaling, Yarn

__all__ = ["growth", "read_rope"]

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class _Kind:
    """How to read one kind of scaling: which settings it needs, which it may have."""

    read: Callable[[Foreign, int], Scaling | None]
    needs: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


def read_rope(
    settings: Mapping[str, Any], head_size: int, max_positions: int, origin: str, *, interleaved: bool = False
) -> Rope:
    """The Rope of ``rope_parameters``, or of one kind of layer's where they are nested.

    Raises ValueError on an unknown kind, on missing, misspelt or unknown settings, and on a width that is not even.
    """
    given = Foreign(settings, f"{origin}: rope_parameters")
    name = given.get("rope_type", given.get("type", "default"))
    if name not in _KINDS:
        raise ValueError(f"{origin}: rope scaling {name!r} is not supported; known kinds: {', '.join(sorted(_KINDS))}")
    kind = _KINDS[name]
    keys = {key for key, value in settings.items() if value is not None}
    keys -= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if not kind.needs <= keys <= kind.needs | kind.may:
        may = f", may have {sorted(kind.may)}" if kind.may else ""
        raise ValueError(f"{origin}: rope scaling {name!r} needs {sorted(kind.needs)}{may}, found {sorted(keys)}")
    width = int(head_size * given.get("partial_rotary_factor", 1.0))
    if width % 2:
        raise ValueError(f"{origin}: rope turns pairs of elements, so the turning width must be even, found {width}")
    scaling = kind.read(given, max_positions)
    if isinstance(scaling, LongRope) and {len(scaling.short), len(scaling.long)} != {width // 2}:
        raise ValueError(
            f"{origin}: rope scaling 'longrope' needs a factor for each of {width // 2} pairs, found "
            f"{len(scaling.short)} short and {len(scaling.long)} long ones"
        )
    return Rope(given.need("rope_theta", float), width, scaling, interleaved)


def _llama3(given: Foreign, max_positions: int) -> Scaling:
    factor, low, high = (given.need(key, float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3(factor, low, high, given.size(_ORIGINAL))


def _yarn(given: Foreign, max_positions: int) -> Scaling:
    factor = given.need("factor", float)
    magnitude = given.find("attention_factor", float)
    if magnitude is None:
        scales = [given.get(key, 0.0) for key in ("mscale", "mscale_all_dim")]
        both = scales if all(scales) else [1.0, 0.0]  # DeepSeek's quotient of two, or the paper's one
        magnitude = math.prod(growth(factor, scale) ** power for scale, power in zip(both, (1, -1), strict=True))
    return Yarn(
        factor,
        given.size(_ORIGINAL),
        magnitude,
        given.get("beta_fast", 32.0),
        given.get("beta_slow", 1.0),
        given.get("truncate", True),
    )


def growth(factor: float, scale: float) -> float:
    """By how much YaRN lets attention scores grow (arXiv:2309.00071, eq. 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(given: Foreign, max_positions: int) -> Scaling:
    original = given.size(_ORIGINAL)
    factor = given.find("factor", float) or max_positions / original
    magnitude = given.find("attention_factor", float)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (tuple(map(float, given.need(key, list))) for key in ("short_factor", "long_factor"))
    return LongRope(short, long, original, magnitude)


_KINDS = {
    "default": _Kind(lambda given, max_positions: None),
    # Frequencies change once a sequence outgrows max_position_embeddings, which is the longest that is served: a cache
    # whose keys are turned already could not follow.
    "dynamic": _Kind(lambda given, max_positions: None, frozenset({"factor"})),
    "linear": _Kind(lambda given, max_positions: Linear(given.need("factor", float)), frozenset({"factor"})),
    "llama3": _Kind(_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL})),
    "yarn": _Kind(
        _yarn,
        frozenset({"factor", _ORIGINAL}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": _Kind(
        _longrope, frozenset({"short_factor", "long_factor", _ORIGINAL}), frozenset({"factor", "attention_factor"})
    ),
}
