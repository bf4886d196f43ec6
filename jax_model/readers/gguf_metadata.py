"""GGUF metadata under Hugging Face's keys, as tables: what llama.cpp's converter wrote, read back.

A key of the architecture that no table knows may change what the model computes, so it is refused, never skipped.
Defaults are those of llama.cpp's loader, which a file that leaves a key out was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych.jax_model.families import Foreign

# Under the architecture's prefix.
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
}
_RMS_EPS = "attention.layer_norm_rms_epsilon"
# Read by the functions below.
_READ = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
# Without meaning for a model that has no experts and no scaling that would use them.
_IDLE = {"expert_used_count", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
_DEFAULT_BASE = 10_000.0


@dataclass(frozen=True)
class Architecture:
    """``family`` is Hugging Face's name; ``rest`` translates what is the architecture's own, read from ``keys``."""

    family: str
    rest: Callable[[Foreign, dict[str, Any]], dict[str, Any]]
    keys: frozenset[str] = frozenset()


def _llama(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    gguf.expect("expert_count", 0)
    return {"hidden_act": "silu", "rope_parameters": _rope(gguf, gguf.get("rope.freq_base", _DEFAULT_BASE))}


def _gemma3(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    layers, H = shared["num_hidden_layers"], shared["head_dim"]
    # Files say nothing of the query's scale: of Gemma's sizes only the one with 62 layers differs from the rest.
    scalar = shared["hidden_size"] // shared["num_attention_heads"] if layers == 62 else H
    local = {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", _DEFAULT_BASE)}
    return {
        "final_logit_softcapping": gguf.find("final_logit_softcapping", float) or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _windowed(gguf, layers),
        "query_pre_attn_scalar": float(scalar),
        "rope_parameters": {
            "full_attention": _rope(gguf, gguf.need("rope.freq_base", float)),
            "sliding_attention": local,
        },
        "sliding_window": gguf.size("attention.sliding_window"),
    }


def _windowed(gguf: Foreign, layers: int) -> list[str]:
    """The kind of each layer: every sixth sees everything, unless the file has a period or a list of its own."""
    pattern = gguf.find("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(value) for value in pattern]
    else:
        period = gguf.size("attention.sliding_window_pattern", 6)
        windowed = [(i + 1) % period != 0 for i in range(layers)]
    return ["sliding_attention" if yes else "full_attention" for yes in windowed]


def _rope(gguf: Foreign, base: float) -> dict[str, Any]:
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    return {"rope_type": kind, "rope_theta": base, "factor": gguf.need("rope.scaling.factor", float)}


# By ``general.architecture``.
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, frozenset({"expert_count"})),
    "gemma3": Architecture(
        "gemma3_text",
        _gemma3,
        frozenset(
            {
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "final_logit_softcapping",
                "rope.freq_base_swa",
            }
        ),
    ),
}


def translate(metadata: Mapping[str, Any], *, vocabulary: int, tied: bool, origin: str) -> tuple[str, dict[str, Any]]:
    """The family and its configuration. ``vocabulary``: rows of the embedding, where the file names no number.

    Raises ValueError on an unsupported architecture, a key that is missing, of the wrong type, or unknown.
    """
    name = Foreign(metadata, origin).need("general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{origin}: architecture {name!r} is not supported; supported in GGUF: {known}")
    architecture, prefix = ARCHITECTURES[name], f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    known_keys = {*_SIZES.values(), _RMS_EPS, *_READ, *_IDLE, *architecture.keys}
    if unknown := sorted(own.keys() - known_keys):
        raise ValueError(
            f"{origin}: this version does not know what {', '.join(prefix + key for key in unknown)} means, and "
            "leaving it out might change what the model computes"
        )
    gguf = Foreign(own, f"{origin} ({prefix}*)")
    shared = _shared(gguf, vocabulary)
    shared["tie_word_embeddings"] = tied
    return architecture.family, shared | architecture.rest(gguf, shared)


def _shared(gguf: Foreign, vocabulary: int) -> dict[str, Any]:
    shared: dict[str, Any] = {hf: gguf.size(key) for hf, key in _SIZES.items()}
    D, N = shared["hidden_size"], shared["num_attention_heads"]
    H = gguf.size("attention.key_length", D // N or None)
    for key in ("attention.value_length", "rope.dimension_count"):
        gguf.expect(key, H)  # values as wide as keys, and rope over the whole head
    return shared | {
        "head_dim": H,
        "num_key_value_heads": gguf.size("attention.head_count_kv", N),
        "rms_norm_eps": gguf.need(_RMS_EPS, float),
        "vocab_size": gguf.size("vocab_size", vocabulary),
    }
