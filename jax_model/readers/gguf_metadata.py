"""GGUF metadata under Hugging Face's keys, as tables: what llama.cpp's converter wrote, read back.

A key of the architecture that no table knows may change what the model computes, so it is refused, never skipped.
Defaults are those of llama.cpp's loader, which a file that leaves a key out was made for.
"""

from __future__ import annotations

import functools
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
    "bias.mlp",  # the reader's own keys: what it saw among the tensors
    "bias.out",
    "bias.qkv",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
# Without meaning for a model that has no experts and no scaling that would use them.
_IDLE = {"expert_used_count", "rope.scaling.finetuned", "tensor_data_layout"}
_DEFAULT_BASE = 10_000.0


@dataclass(frozen=True)
class Architecture:
    """``family`` is Hugging Face's name; ``rest`` translates what is the architecture's own, read from ``keys``.

    A file that counts experts is of the family ``mixture``, if there is one.
    """

    family: str
    rest: Callable[[Foreign, dict[str, Any]], dict[str, Any]]
    keys: frozenset[str] = frozenset()
    mixture: str | None = None


def _plain(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """Llama and its relatives."""
    return {"hidden_act": "silu", "rope_parameters": _rope(gguf, gguf.get("rope.freq_base", _DEFAULT_BASE), shared)}


def _llama(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    experts = {}
    if gguf.get("expert_count", 0):
        experts = {
            "num_local_experts": gguf.size("expert_count"),
            "num_experts_per_tok": gguf.size("expert_used_count"),
        }
    return {**_plain(gguf, shared), **experts}


def _smollm3(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rope: llama.cpp's loader knows no other period."""
    turns = [int((i + 1) % 4 != 0) for i in range(shared["num_hidden_layers"])]
    return {**_plain(gguf, shared), "no_rope_layers": turns}


def _ernie4_5(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    return {**_plain(gguf, shared), "use_bias": shared["attention_bias"]}


def _qwen_moe(gguf: Foreign, shared: dict[str, Any], *, normalised: bool) -> dict[str, Any]:
    """``normalised``: what llama.cpp's loader takes for granted of the architecture."""
    gguf.expect("expert_gating_func", 1)  # softmax
    F, used = shared["intermediate_size"], gguf.size("expert_used_count")
    return {
        **_plain(gguf, shared),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length", F // used or None),
        "norm_topk_prob": gguf.get("expert_weights_norm", normalised),
        "num_experts": gguf.size("expert_count"),
        "num_experts_per_tok": used,
        "qkv_bias": shared["attention_bias"],
        "shared_expert_intermediate_size": gguf.size("expert_shared_feed_forward_length", F),
    }


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
            "full_attention": _rope(gguf, gguf.need("rope.freq_base", float), shared),
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


def _rope(gguf: Foreign, base: float, shared: dict[str, Any]) -> dict[str, Any]:
    kind = gguf.get("rope.scaling.type", "none")
    if factors := gguf.find("rope.factors", list):
        return _factors(gguf, base, factors, shared)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    scaling = {"rope_type": kind, "rope_theta": base, "factor": gguf.need("rope.scaling.factor", float)}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": gguf.size("rope.scaling.original_context_length"),
            "beta_fast": gguf.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": gguf.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    return scaling


def _factors(gguf: Foreign, base: float, factors: list[float], shared: dict[str, Any]) -> dict[str, Any]:
    """Frequencies divided pair by pair: how the converter writes llama3 scaling. That is a LongRoPE with one list."""
    gguf.expect("rope.scaling.type", "none")
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": shared["max_position_embeddings"],
        "attention_factor": 1.0,
    }


_EXPERTS = frozenset(
    {
        "expert_count",
        "expert_feed_forward_length",
        "expert_gating_func",
        "expert_shared_feed_forward_length",
        "expert_weights_norm",
    }
)

# By ``general.architecture``.
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, frozenset({"expert_count", "rope.factors"}), mixture="mixtral"),
    "ernie4_5": Architecture("ernie4_5", _ernie4_5),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _plain),
    "qwen2": Architecture("qwen2", _plain),
    "qwen2moe": Architecture("qwen2_moe", functools.partial(_qwen_moe, normalised=False), _EXPERTS),
    "qwen3": Architecture("qwen3", _plain),
    "qwen3moe": Architecture("qwen3_moe", functools.partial(_qwen_moe, normalised=True), _EXPERTS),
    "seed_oss": Architecture("seed_oss", _plain),
    "smollm3": Architecture("smollm3", _smollm3, frozenset({"rope.factors"})),
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
    mixture = architecture.mixture if gguf.get("expert_count", 0) else None
    return mixture or architecture.family, shared | architecture.rest(gguf, shared)


def _shared(gguf: Foreign, vocabulary: int) -> dict[str, Any]:
    shared: dict[str, Any] = {hf: gguf.size(key) for hf, key in _SIZES.items()}
    D, N = shared["hidden_size"], shared["num_attention_heads"]
    H = gguf.size("attention.key_length", D // N or None)
    for key in ("attention.value_length", "rope.dimension_count"):
        gguf.expect(key, H)  # values as wide as keys, and rope over the whole head
    return shared | {
        "attention_bias": gguf.get("bias.qkv", False),
        "attention_out_bias": gguf.get("bias.out", False),
        "mlp_bias": gguf.get("bias.mlp", False),
        "head_dim": H,
        "num_key_value_heads": gguf.size("attention.head_count_kv", N),
        "rms_norm_eps": gguf.need(_RMS_EPS, float),
        "vocab_size": gguf.size("vocab_size", vocabulary),
    }
