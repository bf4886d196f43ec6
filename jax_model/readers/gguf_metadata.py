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
_RMS_EPS, _LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Read by the functions below.
_READ = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "bias.mlp",  # the reader's own keys: what it saw among the tensors
    "bias.out",
    "bias.qkv",
    "norm.mlp",
    "norm.qk",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
# Without meaning for a model that has no experts and no scaling that would use them.
_IDLE = {"expert_used_count", "rope.scaling.finetuned", "tensor_data_layout"}
_DEFAULT_BASE = 10_000.0
_GATING, _SOFTMAX, _SIGMOID = "expert_gating_func", 1, 2
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Architecture:
    """``family`` is Hugging Face's name; ``rest`` translates what is the architecture's own, read from ``keys``.

    A file that counts experts is of the family ``mixture``, if there is one, one with a window of ``windowed``, and one
    whose experts are chosen by sigmoids of ``sigmoid``.  ``eps`` is the epsilon of its norms, under Hugging Face's name
    and GGUF's.  In a ``partial`` one rope may turn a part of each head; in a ``latent`` one keys and values differ.
    """

    family: str
    rest: Callable[[Foreign, dict[str, Any]], dict[str, Any]]
    keys: frozenset[str] = frozenset()
    mixture: str | None = None
    windowed: str | None = None
    eps: tuple[str, str] = ("rms_norm_eps", _RMS_EPS)
    partial: bool = False
    latent: bool = False
    sigmoid: str | None = None

    def family_of(self, gguf: Foreign) -> str:
        """The family of one file."""
        if gguf.get(_GATING, _SOFTMAX) == _SIGMOID and self.sigmoid is not None:
            return self.sigmoid
        if gguf.get("expert_count", 0) and self.mixture is not None:
            return self.mixture
        return (self.windowed if gguf.get(_WINDOW, 0) else None) or self.family


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


def _internlm2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's converter knows no biases."""
    return {**_plain(gguf, shared), "bias": False}


def _smollm3(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rope: llama.cpp's loader knows no other period."""
    turns = [int((i + 1) % 4 != 0) for i in range(shared["num_hidden_layers"])]
    return {**_plain(gguf, shared), "no_rope_layers": turns}


def _ernie4_5(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    return {**_plain(gguf, shared), "use_bias": shared["attention_bias"]}


def _qwen_moe(gguf: Foreign, shared: dict[str, Any], *, normalised: bool) -> dict[str, Any]:
    """``normalised``: what llama.cpp's loader takes for granted of the architecture."""
    gguf.expect(_GATING, _SOFTMAX)
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
        "layer_types": _windowed(gguf, layers, 6),
        "query_pre_attn_scalar": float(scalar),
        "rope_parameters": {
            "full_attention": _rope(gguf, gguf.need("rope.freq_base", float), shared),
            "sliding_attention": local,
        },
        "sliding_window": gguf.size("attention.sliding_window"),
    }


def _gemma(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    return {**_plain(gguf, shared), "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    layers = shared["num_hidden_layers"]
    # As with Gemma 3, the largest has a scale of its own.
    scalar = shared["hidden_size"] // shared["num_attention_heads"] if layers == 46 else shared["head_dim"]
    return {
        **_plain(gguf, shared),
        "attn_logit_softcapping": gguf.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": gguf.get("final_logit_softcapping", 30.0),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _windowed(gguf, layers, 2),
        "query_pre_attn_scalar": float(scalar),
        "sliding_window": gguf.size(_WINDOW, 4096),
    }


def _phi2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    return {**_plain(gguf, shared), "hidden_act": "gelu_new"}


def _phi3(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE's two lists are tensors."""
    rope = _rope(gguf, gguf.get("rope.freq_base", _DEFAULT_BASE), shared)
    if long := gguf.find("rope.factors.long", list):
        rope |= {
            "rope_type": "longrope",
            "short_factor": gguf.need("rope.factors.short", list),
            "long_factor": long,
            "original_max_position_embeddings": gguf.size("rope.scaling.original_context_length"),
            "attention_factor": gguf.find("rope.scaling.attn_factor", float),
        }
    return {"hidden_act": "silu", "rope_parameters": rope, "sliding_window": gguf.get(_WINDOW, 0) or None}


def _olmo(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    gguf.expect(_LAYER_EPS, 1e-5)
    return {**_plain(gguf, shared), "clip_qkv": gguf.find("attention.clamp_kqv", float)}


def _olmo2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """With windows, scaling is for the layers without."""
    if not gguf.get(_WINDOW, 0):
        return _plain(gguf, shared)
    base = gguf.get("rope.freq_base", _DEFAULT_BASE)
    local = {"rope_type": "default", "rope_theta": gguf.get("rope.freq_base_swa", base)}
    return {
        **_plain(gguf, shared),
        "layer_types": _windowed(gguf, shared["num_hidden_layers"], 4),
        "rope_parameters": {"full_attention": _rope(gguf, base, shared), "sliding_attention": local},
        "sliding_window": gguf.size(_WINDOW),
    }


def _exaone4(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    layers, window = shared["num_hidden_layers"], gguf.get(_WINDOW, 0) or None
    kinds = ["full_attention"] * layers if window is None else _windowed(gguf, layers, 4)
    return {**_plain(gguf, shared), "layer_types": kinds, "sliding_window": window}


def _granite(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    gguf.expect("rope.scaling.finetuned", True)  # llama.cpp's switch for rope in this architecture
    return {
        **_llama(gguf, shared),
        "attention_multiplier": gguf.get("attention.scale", 0.0) or shared["head_dim"] ** -0.5,
        "embedding_multiplier": gguf.get("embedding_scale", 0.0) or 1.0,
        "logits_scaling": gguf.need("logit_scale", float),
        "residual_multiplier": gguf.get("residual_scale", 0.0) or 1.0,
    }


def _starcoder2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """Its window is not written."""
    return {**_plain(gguf, shared), "hidden_act": "gelu_pytorch_tanh", "use_bias": shared["attention_bias"]}


def _stablelm(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """Where a second norm is missing, attention and MLP stand side by side, whatever ``use_parallel_residual`` says."""
    return {
        **_plain(gguf, shared),
        "qk_layernorm": gguf.get("norm.qk", False),
        "use_parallel_residual": not gguf.get("norm.mlp", False),
        "use_qkv_bias": shared["attention_bias"],
    }


def _cohere(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    return {
        **_plain(gguf, shared),
        "logit_scale": gguf.need("logit_scale", float),
        "use_qk_norm": gguf.get("norm.qk", False),
    }


def _cohere2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    kinds = _windowed(gguf, shared["num_hidden_layers"], 4)
    return {**_cohere(gguf, shared), "layer_types": kinds, "sliding_window": gguf.size(_WINDOW)}


def _gpt2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    }
    return {"activation_function": "gelu_new", **{ours: shared[theirs] for ours, theirs in names.items()}}


def _gpt_neox(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp approximates its activation; the models were trained with the exact one."""
    parallel = gguf.get("use_parallel_residual", True)
    return {**_plain(gguf, shared), "attention_bias": True, "hidden_act": "gelu", "use_parallel_residual": parallel}


def _gpt_oss(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """What files leave out, llama.cpp has as constants; its rounding of YaRN's border pairs is not the model's."""
    plain = _plain(gguf, shared)
    rope = plain["rope_parameters"]
    return {
        **plain,
        "intermediate_size": gguf.size("expert_feed_forward_length"),
        "layer_types": _windowed(gguf, shared["num_hidden_layers"], 2),
        "num_experts_per_tok": gguf.size("expert_used_count"),
        "num_local_experts": gguf.size("expert_count"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        "sliding_window": gguf.size(_WINDOW),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _nemotron(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    return {**_plain(gguf, shared), "hidden_act": "relu2"}


def _deepseek2(gguf: Foreign, shared: dict[str, Any]) -> dict[str, Any]:
    """Files know nothing of YaRN's ``mscale`` but that it is ``mscale_all_dim``, of which they hold a tenth.

    llama.cpp ranks groups of experts by their two best; those that are chosen by a softmax were trained with the best.
    """
    gguf.expect(_GATING, _SOFTMAX, _SIGMOID)
    if gguf.find("attention.key_length_mla") is None:
        raise ValueError(
            f"{gguf.origin}: there is no 'attention.key_length_mla', as in files of older versions of llama.cpp, which "
            "store keys and values together; convert the model again"
        )
    turning, N = gguf.size("rope.dimension_count"), shared["num_attention_heads"]
    rope = _scaled(gguf, gguf.get("rope.freq_base", _DEFAULT_BASE), shared)
    if rope["rope_type"] == "yarn" and (tenth := gguf.get("rope.scaling.yarn_log_multiplier", 0.0)):
        growing = round(10 * tenth, 6)  # 0.07 is stored in single precision
        rope |= {"mscale": growing, "mscale_all_dim": growing}
    groups = gguf.size("expert_group_count", 1)
    if gguf.get(_GATING, _SOFTMAX) == _SIGMOID:
        choice = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    else:
        choice = {"scoring_func": "softmax", "topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    return {
        **choice,
        "attention_bias": False,
        "first_k_dense_replace": gguf.get("leading_dense_block_count", 0),
        "hidden_act": "silu",
        "kv_lora_rank": gguf.size("attention.kv_lora_rank"),
        "moe_intermediate_size": gguf.size("expert_feed_forward_length"),
        "n_group": groups,
        "n_routed_experts": gguf.size("expert_count"),
        "n_shared_experts": gguf.size("expert_shared_count"),
        "norm_topk_prob": gguf.get("expert_weights_norm", False),
        "num_experts_per_tok": gguf.size("expert_used_count"),
        "num_key_value_heads": N,
        "q_lora_rank": gguf.get("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": gguf.size("attention.key_length_mla") - turning,
        "qk_rope_head_dim": turning,
        "rope_parameters": rope,
        "routed_scaling_factor": gguf.get("expert_weights_scale", 0.0) or 1.0,
        "topk_group": gguf.size("expert_group_used_count", 1),
        "v_head_dim": gguf.size("attention.value_length_mla"),
    }


def _windowed(gguf: Foreign, layers: int, period: int) -> list[str]:
    """The kind of each layer: every ``period``-th sees everything, unless the file has a rule of its own."""
    pattern = gguf.find(_PATTERN)
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(value) for value in pattern]
    else:
        period = gguf.size(_PATTERN, period)
        windowed = [(i + 1) % period != 0 for i in range(layers)]
    return ["sliding_attention" if yes else "full_attention" for yes in windowed]


def _rope(gguf: Foreign, base: float, shared: dict[str, Any]) -> dict[str, Any]:
    H = shared["head_dim"]
    width = gguf.size("rope.dimension_count", H)
    # Half an element more, lest the product be rounded down to less than the width.
    part = {} if width == H else {"partial_rotary_factor": (width + 0.5) / H}
    return {**_scaled(gguf, base, shared), **part}


def _scaled(gguf: Foreign, base: float, shared: dict[str, Any]) -> dict[str, Any]:
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
            "attention_factor": gguf.find("rope.scaling.yarn_attn_factor", float),
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
        _GATING,
        "expert_shared_feed_forward_length",
        "expert_weights_norm",
    }
)

_LATENT = frozenset(
    {
        "attention.key_length_mla",
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        "attention.value_length_mla",
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "expert_weights_scale",
        "leading_dense_block_count",
        "rope.scaling.yarn_log_multiplier",
    }
)

_LAYER_NORM = ("layer_norm_eps", _LAYER_EPS)
_LONG_ROPE = frozenset({"rope.factors.long", "rope.factors.short", "rope.scaling.attn_factor"})
_MULTIPLIERS = frozenset({"attention.scale", "embedding_scale", "logit_scale", "residual_scale"})
_SOFT_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_WINDOWS = frozenset({_WINDOW, _PATTERN})

# By ``general.architecture``.
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, frozenset({"expert_count", "rope.factors"}), mixture="mixtral"),
    "cohere2": Architecture("cohere2", _cohere2, _WINDOWS | {"logit_scale"}, eps=_LAYER_NORM),
    "command-r": Architecture("cohere", _cohere, frozenset({"logit_scale"}), eps=_LAYER_NORM),
    "deepseek2": Architecture(
        "deepseek_v2", _deepseek2, _LATENT | _EXPERTS, partial=True, latent=True, sigmoid="deepseek_v3"
    ),
    "ernie4_5": Architecture("ernie4_5", _ernie4_5),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _plain),
    "internlm2": Architecture("internlm2", _internlm2),
    "qwen2": Architecture("qwen2", _plain),
    "qwen2moe": Architecture("qwen2_moe", functools.partial(_qwen_moe, normalised=False), _EXPERTS),
    "qwen3": Architecture("qwen3", _plain),
    "qwen3moe": Architecture("qwen3_moe", functools.partial(_qwen_moe, normalised=True), _EXPERTS),
    "seed_oss": Architecture("seed_oss", _plain),
    "smollm3": Architecture("smollm3", _smollm3, frozenset({"rope.factors"})),
    "exaone4": Architecture("exaone4", _exaone4, _WINDOWS | {"rope.factors"}),
    "gemma": Architecture("gemma", _gemma),
    "gemma2": Architecture("gemma2", _gemma2, _WINDOWS | _SOFT_CAPS),
    "gemma3": Architecture("gemma3_text", _gemma3, _WINDOWS | {"final_logit_softcapping", "rope.freq_base_swa"}),
    "glm4": Architecture("glm4", _plain, partial=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, _WINDOWS | _EXPERTS),
    "gpt2": Architecture("gpt2", _gpt2, eps=("layer_norm_epsilon", _LAYER_EPS)),
    "gptneox": Architecture("gpt_neox", _gpt_neox, frozenset({"use_parallel_residual"}), eps=_LAYER_NORM, partial=True),
    "granite": Architecture("granite", _granite, _MULTIPLIERS),
    "granitemoe": Architecture("granite", _granite, _MULTIPLIERS | {"expert_count"}, mixture="granitemoe"),
    "nemotron": Architecture("nemotron", _nemotron, eps=("norm_eps", _LAYER_EPS), partial=True),
    "olmo": Architecture("olmo", _olmo, frozenset({"attention.clamp_kqv"}), eps=_LAYER_NORM),
    "olmo2": Architecture("olmo2", _olmo2, _WINDOWS | {"rope.freq_base_swa"}, windowed="olmo3"),
    "phi2": Architecture("phi", _phi2, eps=_LAYER_NORM, partial=True),
    "phi3": Architecture("phi3", _phi3, _LONG_ROPE | {_WINDOW}, partial=True),
    "stablelm": Architecture(
        "stablelm", _stablelm, frozenset({"use_parallel_residual"}), eps=_LAYER_NORM, partial=True
    ),
    "starcoder2": Architecture("starcoder2", _starcoder2, eps=("norm_epsilon", _LAYER_EPS)),
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
    known_keys = {*_SIZES.values(), architecture.eps[1], *_READ, *_IDLE, *architecture.keys}
    if unknown := sorted(own.keys() - known_keys):
        raise ValueError(
            f"{origin}: this version does not know what {', '.join(prefix + key for key in unknown)} means, and "
            "leaving it out might change what the model computes"
        )
    gguf = Foreign(own, f"{origin} ({prefix}*)")
    shared = _shared(gguf, vocabulary, architecture)
    shared["tie_word_embeddings"] = tied
    return architecture.family_of(gguf), shared | architecture.rest(gguf, shared)


def _shared(gguf: Foreign, vocabulary: int, architecture: Architecture) -> dict[str, Any]:
    shared: dict[str, Any] = {hf: gguf.size(key) for hf, key in _SIZES.items()}
    D, N = shared["hidden_size"], shared["num_attention_heads"]
    H = gguf.size("attention.key_length", D // N or None)
    if not architecture.latent:
        gguf.expect("attention.value_length", H)
    if not architecture.partial:
        gguf.expect("rope.dimension_count", H)
    eps, stored_eps = architecture.eps
    return shared | {
        "attention_bias": gguf.get("bias.qkv", False),
        "attention_out_bias": gguf.get("bias.out", False),
        "mlp_bias": gguf.get("bias.mlp", False),
        "head_dim": H,
        "num_key_value_heads": gguf.size("attention.head_count_kv", N),
        eps: gguf.need(stored_eps, float),
        "vocab_size": gguf.size("vocab_size", vocabulary),
    }
