"""GGUF twins: a file with the weights of a Hugging Face folder, as llama.cpp's converter writes it, loads the same.

Names come from the ``gguf`` package; what the converter does to values and which metadata it writes is restated here,
independently of the tables under test.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import tiny
from diptych.jax_model.config import Config
from diptych.jax_model.families import FAMILIES
from diptych.jax_model.families.table import expand, shape_of
from diptych.jax_model.params import configure, flatten, load
from diptych.jax_model.readers import open_checkpoint
from diptych.jax_model.rope import frequencies

WEIGHTS = "model.safetensors"
Transform = Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray]


def unchanged(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return value


def reordered(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of q and k, weights and biases: the two halves of a head are interleaved."""
    for projection, heads in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
        if projection in name:
            halves = value.reshape(config[heads], 2, -1, *value.shape[1:])
            return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def squeezed(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Older converters dropped axes of size one."""
    return value.squeeze()


def taken_apart(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """InternLM2's tensor of queries, keys and values, as llama's three; DeepSeek's of keys and values, as two."""
    result = {}
    for name, value in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
            heads = value.reshape(config["num_attention_heads"], -1, rank)
            result[name.replace("kv_b", "k_b")] = np.stack([head[:nope].T for head in heads])
            result[name.replace("kv_b", "v_b")] = np.stack([head[nope:] for head in heads])
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if not name.endswith("wqkv.weight"):
            result[name] = value
            continue
        K, rows = config["num_key_value_heads"], []
        for head in np.split(value, K):
            parts = np.split(head, config["num_attention_heads"] // K + 2)
            rows.append((np.concatenate(parts[:-2]), parts[-2], parts[-1]))
        for kind, part in zip("qkv", zip(*rows, strict=True), strict=True):
            result[name.replace("attention.wqkv", f"self_attn.{kind}_proj")] = np.concatenate(part)
    return result


def plus_one(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return value + np.float32(1) if name.endswith("norm.weight") else value


def outputs_first(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """GPT-2's projections, but not its embeddings, lie the other way round."""
    return value.T if re.search(r"\.c_(attn|fc|proj)\.weight$", name) else value


def sorted_heads(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """GPT-NeoX has query, key, value of each head in turn; then all queries come first, all values last."""
    if "query_key_value" not in name:
        return value
    heads = np.split(value, config["num_attention_heads"])
    return np.concatenate([np.concatenate(part) for part in zip(*(np.split(head, 3) for head in heads), strict=True)])


@dataclass(frozen=True)
class Twin:
    """``keys`` are those of ``config.json`` beyond the sizes, ``metadata`` those under the architecture's prefix.

    Metadata of None are not written.
    """

    arch: MODEL_ARCH
    family: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transform: Transform = unchanged
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        sizes = {
            "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 5e4,
        }  # fmt: skip
        return {"model_type": self.family, **sizes, **self.keys}


def factors(config: Mapping[str, Any]) -> np.ndarray:
    """What llama3 scaling divides frequencies by, computed one pair at a time."""
    scaling, H, divisors = config["rope_scaling"], 16, []
    for i in range(0, H, 2):
        turns = scaling["original_max_position_embeddings"] * config["rope_theta"] ** (-i / H) / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


LLAMA3 = {
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}}
YARN_METADATA = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 16.0,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS_METADATA = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
SHARED = {"shared_expert_intermediate_size": 40, "hidden_size": 96}
SHARED_METADATA = {"expert_shared_feed_forward_length": 40}

TIED = {"tie_word_embeddings": True}
GEMMA2_KEYS = {"sliding_window": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
GEMMA2_METADATA = {
    "attention.sliding_window": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
    "rope.freq_base": None,
}  # fmt: skip
LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
NO_SIZES = {"attention.key_length": None, "attention.value_length": None}  # the head's size follows from the width
ALTERNATING = {"num_hidden_layers": 5, "sliding_window": 24}
ALTERNATING_METADATA = {
    "attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, True, False, True]
}  # fmt: skip
LONG_ROPE = {"short": np.linspace(1, 2, 4, dtype=np.float32), "long": np.linspace(1, 9, 4, dtype=np.float32)}
MULTIPLIERS = {
    "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0,
    "attention_bias": True, "head_dim": 8,
}  # fmt: skip
MULTIPLIERS_METADATA = {
    **NO_SIZES, "attention.scale": 0.125, "embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0,
}  # fmt: skip


def latent(yarn: float | None, keys: Mapping[str, Any], metadata: Mapping[str, Any], query: int | None) -> Twin:
    """A DeepSeek; ``yarn`` is its ``mscale_all_dim``."""
    both = {} if yarn is None else {"mscale": yarn, "mscale_all_dim": yarn}
    sizes = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "q_lora_rank": query}
    scaling = {} if yarn is None else {**YARN_METADATA, "rope.scaling.yarn_log_multiplier": 0.1 * yarn}
    return Twin(
        MODEL_ARCH.DEEPSEEK2,
        "deepseek_v3" if keys.get("scoring_func") == "sigmoid" else "deepseek_v2",
        {
            **sizes,
            **keys,
            **({} if yarn is None else {"rope_scaling": {**YARN["rope_scaling"], **both}}),
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 6,
        },
        {
            **metadata,
            **scaling,
            "attention.head_count_kv": 1,
            "attention.key_length": 26,
            "attention.key_length_mla": 16,
            "attention.kv_lora_rank": 20,
            "attention.q_lora_rank": query,
            "attention.value_length": 20,
            "attention.value_length_mla": 12,
            "expert_count": 8,
            "expert_feed_forward_length": 24,
            "expert_group_count": keys["n_group"],
            "expert_group_used_count": keys["topk_group"],
            "expert_shared_count": 2,
            "expert_used_count": 3,
            "expert_weights_scale": keys["routed_scaling_factor"],
            "leading_dense_block_count": 1,
            "rope.dimension_count": 6,
            "vocab_size": 97,
        },
    )


EVERY_HEAD = {"head_dim": 8, "num_key_value_heads": 6}

TWINS = {
    "cohere": Twin(
        MODEL_ARCH.COMMAND_R,
        "cohere",
        {"head_dim": 8, "logit_scale": 0.125, "layer_norm_eps": 1e-5, "use_qk_norm": True, "tie_word_embeddings": True},
        {**NO_SIZES, **LAYER_NORM, "logit_scale": 0.125, "rope.scaling.type": "none"},
    ),
    "cohere2": Twin(
        MODEL_ARCH.COHERE2,
        "cohere2",
        {"head_dim": 8, "num_hidden_layers": 5, "logit_scale": 0.25, "sliding_window": 24, "tie_word_embeddings": True},
        {
            **NO_SIZES,
            **LAYER_NORM,
            "attention.sliding_window": 24,
            "logit_scale": 0.25,
            "rope.dimension_count": 8,
            "rope.scaling.type": "none",
            "vocab_size": 97,
        },
    ),
    "deepseek_v2": latent(
        0.7, {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}, {}, None
    ),
    "deepseek_v2-groups": latent(
        None,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        {"expert_gating_func": 1},
        20,
    ),
    "deepseek_v3": latent(
        1.0,
        {
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {"expert_gating_func": 2, "expert_weights_norm": True},
        18,
    ),
    "gpt2": Twin(
        MODEL_ARCH.GPT2,
        "gpt2",
        {**EVERY_HEAD, "intermediate_size": 192, "tie_word_embeddings": True},
        {**NO_SIZES, **LAYER_NORM, "attention.head_count_kv": None, "rope.freq_base": None},
        outputs_first,
    ),
    **{
        f"gpt_neox-{kind}": Twin(
            MODEL_ARCH.GPTNEOX,
            "gpt_neox",
            {**EVERY_HEAD, "rope_theta": 1e4, "rotary_pct": 0.5, "use_parallel_residual": parallel},
            {
                **NO_SIZES,
                **LAYER_NORM,
                "attention.head_count_kv": None,
                "rope.dimension_count": 4,
                "rope.freq_base": None,
                "use_parallel_residual": parallel,
            },
            sorted_heads,
        )
        for kind, parallel in (("parallel", True), ("sequential", False))
    },
    "gpt_oss": Twin(
        MODEL_ARCH.GPT_OSS,
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "rope_scaling": {**YARN["rope_scaling"], "truncate": False},
        },
        {**YARN_METADATA, "attention.sliding_window": 24, **EXPERTS_METADATA, "expert_feed_forward_length": 80},
    ),
    "nemotron": Twin(
        MODEL_ARCH.NEMOTRON,
        "nemotron",
        {**BIASES, "partial_rotary_factor": 0.5, "norm_eps": 1e-5},
        {**LAYER_NORM, "rope.dimension_count": 8, "rope.scaling.type": "none"},
        plus_one,
    ),
    "gemma": Twin(MODEL_ARCH.GEMMA, "gemma", {**TIED, "rope_theta": 1e4}, {"rope.freq_base": None}, plus_one),
    "gemma2": Twin(
        MODEL_ARCH.GEMMA2,
        "gemma2",
        {**TIED, **GEMMA2_KEYS, "rope_theta": 1e4, "query_pre_attn_scalar": 16},
        GEMMA2_METADATA,
        plus_one,
    ),
    "phi": Twin(
        MODEL_ARCH.PHI2,
        "phi",
        {"head_dim": 8, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "intermediate_size": 192},
        {**NO_SIZES, **LAYER_NORM, "rope.dimension_count": 4, "rope.freq_base": None},
    ),
    "phi3": Twin(
        MODEL_ARCH.PHI3,
        "phi3",
        {"head_dim": 8, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 256},
        {
            **NO_SIZES,
            "attention.sliding_window": 0,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 256,
        },
    ),
    "phi3-long": Twin(
        MODEL_ARCH.PHI3,
        "phi3",
        {
            "head_dim": 8,
            "sliding_window": 30,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                **{f"{kind}_factor": values.tolist() for kind, values in LONG_ROPE.items()},
            },
        },
        {
            **NO_SIZES,
            "attention.sliding_window": 30,
            "rope.dimension_count": 8,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
            "rope.scaling.original_context_length": 64,
        },
        extra={f"rope_factors_{kind}.weight": values for kind, values in LONG_ROPE.items()},
    ),
    "olmo": Twin(
        MODEL_ARCH.OLMO, "olmo", {"clip_qkv": 2.0}, {**LAYER_NORM, "attention.clamp_kqv": 2.0}, transform=reordered
    ),
    "olmo2": Twin(MODEL_ARCH.OLMO2, "olmo2"),
    "olmo3": Twin(
        MODEL_ARCH.OLMO2,
        "olmo3",
        {
            **ALTERNATING,
            "rope_parameters": {
                "full_attention": {**YARN["rope_scaling"], "attention_factor": 1.25, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
            },
        },
        {**ALTERNATING_METADATA, **YARN_METADATA, "rope.scaling.yarn_attn_factor": 1.25},
    ),
    "exaone4": Twin(MODEL_ARCH.EXAONE4, "exaone4", ALTERNATING, ALTERNATING_METADATA),
    "exaone4-everywhere": Twin(
        MODEL_ARCH.EXAONE4, "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "granite": Twin(MODEL_ARCH.GRANITE, "granite", MULTIPLIERS, MULTIPLIERS_METADATA, reordered),
    "granitemoe": Twin(
        MODEL_ARCH.GRANITE_MOE,
        "granitemoe",
        {**MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**MULTIPLIERS_METADATA, "expert_count": 4, "expert_used_count": 2},
        reordered,
    ),
    "glm4": Twin(MODEL_ARCH.GLM4, "glm4", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    "starcoder2": Twin(
        MODEL_ARCH.STARCODER2, "starcoder2", {"norm_epsilon": 1e-5, "tie_word_embeddings": True}, LAYER_NORM
    ),
    "stablelm": Twin(
        MODEL_ARCH.STABLELM,
        "stablelm",
        {"head_dim": 8, "use_qkv_bias": True, "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {**NO_SIZES, **LAYER_NORM, "rope.dimension_count": 2, "rope.freq_base": None, "use_parallel_residual": True},
    ),
    "stablelm-12b": Twin(
        MODEL_ARCH.STABLELM,
        "stablelm",
        {
            "head_dim": 8,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
        {**NO_SIZES, **LAYER_NORM, "rope.dimension_count": 2, "rope.freq_base": None, "use_parallel_residual": True},
    ),
    "llama-biases": Twin(MODEL_ARCH.LLAMA, "llama", BIASES, transform=reordered),
    "llama-linear": Twin(
        MODEL_ARCH.LLAMA,
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        reordered,
    ),
    "llama-llama3": Twin(
        MODEL_ARCH.LLAMA, "llama", LLAMA3, transform=reordered, extra={"rope_freqs.weight": factors(LLAMA3)}
    ),
    "internlm2": Twin(MODEL_ARCH.INTERNLM2, "internlm2", {"head_dim": 8, "bias": False}, NO_SIZES, reordered),
    "llama-yarn": Twin(MODEL_ARCH.LLAMA, "llama", YARN, YARN_METADATA, reordered),
    "mixtral": Twin(
        MODEL_ARCH.LLAMA,
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
        reordered,
    ),
    "smollm3": Twin(MODEL_ARCH.SMOLLM3, "smollm3", {"num_hidden_layers": 5}, transform=reordered),
    "qwen2": Twin(MODEL_ARCH.QWEN2, "qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Twin(MODEL_ARCH.QWEN2, "qwen2", YARN, YARN_METADATA),
    "qwen2_moe": Twin(MODEL_ARCH.QWEN2MOE, "qwen2_moe", {**EXPERTS, **SHARED}, {**EXPERTS_METADATA, **SHARED_METADATA}),
    "qwen2_moe-squeezed": Twin(
        MODEL_ARCH.QWEN2MOE, "qwen2_moe", {**EXPERTS, **SHARED}, {**EXPERTS_METADATA, **SHARED_METADATA}, squeezed
    ),
    "qwen3": Twin(MODEL_ARCH.QWEN3, "qwen3"),
    "qwen3_moe": Twin(MODEL_ARCH.QWEN3MOE, "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, EXPERTS_METADATA),
    "seed_oss": Twin(MODEL_ARCH.SEED_OSS, "seed_oss", {"attention_out_bias": False, "tie_word_embeddings": True}),
    "ernie4_5": Twin(MODEL_ARCH.ERNIE4_5, "ernie4_5", {"use_bias": True}),
    "hunyuan": Twin(
        MODEL_ARCH.HUNYUAN_DENSE,
        "hunyuan_v1_dense",
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
        {"rope.freq_base": 1e4 * 50.0 ** (16 / 14), "rope.scaling.type": "none", "rope.scaling.factor": 1.0},
    ),
}


def checkpoint(twin: Twin, folder: Path) -> tuple[Path, Path]:
    """The folder and the file."""
    placeholders: tiny.Shapes = {f"placeholder.{i}": (1,) for i in range(twin.config["num_hidden_layers"])}
    empty = tiny.write_huggingface(tiny.Tiny(twin.config, placeholders), folder / "config")
    config = configure(open_checkpoint(empty))
    model = tiny.Tiny(twin.config, dict(stored(config)))
    return tiny.write_huggingface(model, folder / "hf"), write_gguf(twin, model, folder / "twin.gguf")


def stored(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Hugging Face folder, as the family's table has them."""
    for parameter in expand(FAMILIES[config.family].table, config):
        sizes, filling = config.sizes(parameter.layer), parameter.huggingface
        for source in filling.sources:
            layout, skip = (filling.join, 1) if filling.join else (source.layout, 0)
            yield source.name, shape_of(layout.split("->")[0], sizes)[skip:]


def write_gguf(twin: Twin, model: tiny.Tiny, path: Path) -> Path:
    config, arch = twin.config, gguf.MODEL_ARCH_NAMES[twin.arch]
    writer = gguf.GGUFWriter(path, arch)
    common = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": config["rope_theta"],
    }  # fmt: skip
    for key, value in {**common, **twin.metadata}.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add[type(value)](f"{arch}.{key}", value)  # type: ignore[operator]
    names = gguf.get_tensor_name_map(twin.arch, config["num_hidden_layers"])
    for name, value in split(stacked(taken_apart(model.tensors(), config))):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, f"llama.cpp has no name for {name!r}"
        writer.add_tensor(found, np.ascontiguousarray(twin.transform(name, value, config)))
    for name, value in twin.extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor of a layer's experts, or of the norms of its heads, under the name that the converter gives it."""
    result: dict[str, Any] = {}
    for name, value in tensors.items():
        if name.endswith("block_sparse_moe.input_linear.weight"):
            layer = re.sub(r"model\.(.*)block_sparse_moe.*", r"\1feed_forward.experts", name)
            gate, up = np.split(value, 2, axis=1)
            result |= {f"{layer}.w1.weight": gate, f"{layer}.w3.weight": up}
            continue
        if found := re.fullmatch(r"(.*layernorm)\.norms\.\d+\.weight", name):
            result.setdefault(f"{found[1]}.weight", []).append(value)
            continue
        if found := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+\.weight)", name):
            merged = f"{found[1]}.{found[2]}"
            merged = re.sub(r"model\.(.*)block_sparse_moe", r"\1feed_forward", merged)
            result.setdefault(merged, []).append(value)
        else:
            result[name] = value
    return {name: np.stack(value) if isinstance(value, list) else value for name, value in result.items()}


def split(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """gpt-oss stores experts input-first, gate and up alternating, and no suffix; the file has each by itself."""
    for name, value in tensors.items():
        bare, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        outputs_first = value.swapaxes(1, 2) if value.ndim == 3 else value
        if bare.endswith("experts.gate_up_proj"):
            for i, part in enumerate(("gate", "up")):
                yield f"{bare.removesuffix('gate_up_proj')}{part}_proj.{kind}", outputs_first[:, i::2]
        elif bare.endswith("experts.down_proj"):
            yield f"{bare}.{kind}", outputs_first
        else:
            yield (f"{name}.weight" if name.endswith("sinks") else name), value


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_equal(name: str, tmp_path: Path) -> None:
    one, other = map(open_checkpoint, checkpoint(TWINS[name], tmp_path))
    assert_same_configuration(configure(one), configure(other))
    first, second = flatten(load(one)), flatten(load(other))
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


def test_a_deepseek_in_the_older_layout_is_refused(tmp_path: Path) -> None:
    """It has one tensor of keys and values, and other sizes under the same keys."""
    twin = TWINS["deepseek_v2"]
    older: dict[str, int | None] = {
        "attention.key_length": 16,
        "attention.value_length": 12,
        "attention.head_count_kv": 6,
    }
    older |= {"attention.key_length_mla": None, "attention.value_length_mla": None}
    _, file = checkpoint(dataclasses.replace(twin, metadata={**twin.metadata, **older}), tmp_path)
    with pytest.raises(ValueError, match=r"twin\.gguf.*no 'attention\.key_length_mla'.*convert the model again"):
        open_checkpoint(file)


def test_a_model_stored_without_its_head(tmp_path: Path) -> None:
    """As GPT-2 was published: names without a prefix, and the causal mask among the weights."""
    folder, _ = checkpoint(TWINS["gpt2"], tmp_path)
    whole = flatten(load(open_checkpoint(folder)))
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(folder / WEIGHTS).items()}
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 8, 8), np.float32)) for i in range(2)}
    save_file({**tensors, **masks}, folder / WEIGHTS)
    for path, value in flatten(load(open_checkpoint(folder))).items():
        np.testing.assert_array_equal(value, whole[path], err_msg=path)


def assert_same_configuration(one: Config, other: Config) -> None:
    """Equal, but for how the same rope is described."""
    assert dataclasses.replace(one, layers=()) == dataclasses.replace(other, layers=())
    for first, second in zip(one.layers, other.layers, strict=True):
        assert dataclasses.replace(first, rope=None) == dataclasses.replace(second, rope=None)
        assert (first.rope is None) == (second.rope is None)
        if first.rope is not None and second.rope is not None:
            assert first.rope.interleaved == second.rope.interleaved
            (inv_freq, magnitude), (again, same) = (
                frequencies(rope, config.max_positions) for rope, config in ((first.rope, one), (second.rope, other))
            )
            np.testing.assert_allclose(inv_freq, again, rtol=1e-6)
            assert magnitude == pytest.approx(same)


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_every_expert_lands_in_its_place(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Rows of the gate and of what it multiplies alternate, expert by expert."""
    family = data.draw(st.sampled_from(["mixtral", "qwen3_moe"]))
    folder, _ = checkpoint(TWINS[family], tmp_path_factory.mktemp("experts"))
    one = open_checkpoint(folder)
    e, m, i = (data.draw(st.integers(0, size - 1)) for size in (4, 24, 2))
    block, names = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }[family]
    gate, up, down = (one.read(f"model.layers.{i}.{block}.experts.{e}.{name}.weight") for name in names)
    experts = load(one)["layers"][i]["mlp"]["experts"]
    np.testing.assert_array_equal(experts["gate_up"][e, 2 * m], gate[m])
    np.testing.assert_array_equal(experts["gate_up"][e, 2 * m + 1], up[m])
    np.testing.assert_array_equal(experts["down"][e], down)
