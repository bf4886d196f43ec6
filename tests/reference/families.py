"""Tiny checkpoints of many families: what their ``config.json`` says, with sizes and switches that give mistakes away.

Configurations are spelt as checkpoints on the Hub spell them (transformers 4 style, unless a case says otherwise) and
leave out what those leave out: defaults belong to the family.  Head ratios are unusual, head sizes are not D / N where
the family allows it, windows are shorter than the prompts, caps are low enough to be reached, multipliers are far from
one, and positions go past the original length where rope is scaled.

``generate.py`` asks transformers for the names and shapes of the tensors as they lie on disk, and stores them in
``values/<name>.json``; the weights follow from names and a seed (:mod:`tiny`), so they are nowhere stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.samples import VALUES
from tiny import Tiny


@dataclass(frozen=True)
class Case:
    """``matters`` changes the configuration in ways that must change the logits, or the case could not fail."""

    config: Mapping[str, Any]
    matters: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[int, ...] = (7, 63)
    new: int = 12
    norm_mean: float = 1.0  # 0 where norm weights are stored minus one
    embed_std: float = 1.0


def _sizes(
    heads: tuple[int, int] = (8, 2), width: int = 64, layers: int = 2, ffn: int = 112, head_dim: int | None = None
) -> dict[str, Any]:
    sizes = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_hidden_layers": layers,
    }
    return sizes | ({"head_dim": head_dim} if head_dim else {})


def _config(model_type: str, architecture: str, **keys: Any) -> dict[str, Any]:
    small = {"vocab_size": 97, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "float32"} | small | keys


def _llama(**keys: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", **(_sizes((6, 2), width=96, head_dim=16) | keys))


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_SHORT_FACTORS = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
_LONG_FACTORS = [1.0, 1.3, 1.7, 2.2, 3.0, 4.5, 7.0, 12.0]

CASES: dict[str, Case] = {
    # ------------------------------------------------------------------------------------------ llama's switches
    "llama-biases": Case(_llama(attention_bias=True, mlp_bias=True)),
    "llama-linear": Case(
        _llama(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=10000.0), ({"rope_scaling": None},)
    ),
    "llama-llama3": Case(
        _llama(rope_scaling={"rope_type": "llama3", **_LLAMA3}, rope_theta=500.0, max_position_embeddings=512),
        ({"rope_scaling": None}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        prompts=(10, 70, 490),
    ),
    "llama-llama3-new-keys": Case(
        _llama(rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **_LLAMA3}, max_position_embeddings=512),
        prompts=(70,),
    ),
    "llama-yarn": Case(
        _llama(rope_scaling={"rope_type": "yarn", **_YARN}, rope_theta=10000.0),
        ({"rope_scaling": None}, {"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.0, **_YARN}}),
        prompts=(10, 150),
    ),
    "llama-yarn-factor": Case(
        _llama(rope_scaling={"type": "yarn", "attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2, **_YARN}),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1.5, **_YARN}},),
        prompts=(10, 150),
    ),
    # ------------------------------------------------------------------------------------------ llama's relatives
    "mistral": Case(
        _config("mistral", "MistralForCausalLM", sliding_window=12, rope_theta=1e5, **_sizes(head_dim=16)),
        ({"sliding_window": 13}, {"sliding_window": None}),
    ),
    "mistral-no-window": Case(_config("mistral", "MistralForCausalLM", sliding_window=None, **_sizes((8, 1)))),
    "mixtral": Case(
        _config(
            "mixtral",
            "MixtralForCausalLM",
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=None,
            **_sizes((6, 2), width=96),
        ),
        ({"num_experts_per_tok": 3},),
    ),
    "smollm3": Case(
        _config(
            "smollm3",
            "SmolLM3ForCausalLM",
            no_rope_layers=[1, 0, 1],
            no_rope_layer_interval=2,
            layer_types=["full_attention"] * 3,
            rope_theta=5e4,
            use_sliding_window=False,
            sliding_window=None,
            **_sizes((8, 2), layers=3),
        ),
        ({"no_rope_layers": [1, 1, 1]},),
    ),
    "qwen2": Case(
        _config(
            "qwen2",
            "Qwen2ForCausalLM",
            rope_theta=1e6,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=8,
            max_window_layers=1,
            **_sizes((6, 2), width=96),
        ),
        ({"rope_theta": 1e4},),
    ),
    "qwen2-window": Case(
        _config(
            "qwen2",
            "Qwen2ForCausalLM",
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
            **_sizes((8, 2), layers=3),
        ),
        ({"sliding_window": 9}, {"max_window_layers": 2}),
    ),
    "qwen3": Case(
        _config("qwen3", "Qwen3ForCausalLM", rope_theta=1e6, **_sizes(head_dim=16)),
        ({"rope_theta": 1e4},),
    ),
    "qwen2_moe": Case(
        _config(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            shared_expert_intermediate_size=72,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            use_sliding_window=False,
            **_sizes((8, 2), layers=3),
        ),
        ({"norm_topk_prob": True}, {"num_experts_per_tok": 3}),
    ),
    "qwen3_moe": Case(
        _config(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            mlp_only_layers=[],
            **_sizes((8, 2), layers=3, head_dim=16),
        ),
        ({"norm_topk_prob": False},),
    ),
    "internlm2": Case(
        _config(
            "internlm2",
            "InternLM2ForCausalLM",
            auto_map={"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
            bias=False,
            hidden_act="silu",
            rms_norm_eps=1e-5,
            rope_theta=1000000,
            tie_word_embeddings=False,
            **_sizes((6, 2), width=96),
        ),
        ({"rope_theta": 10000},),
    ),
    "seed_oss": Case(
        _config(
            "seed_oss",
            "SeedOssForCausalLM",
            attention_bias=True,
            attention_out_bias=False,
            rope_theta=1e6,
            **_sizes(head_dim=16),
        ),
    ),
    "ernie4_5": Case(
        _config("ernie4_5", "Ernie4_5ForCausalLM", rope_theta=5e4, tie_word_embeddings=True, **_sizes(head_dim=16)),
        ({"rope_theta": 1e4},),
    ),
    "hunyuan_v1_dense": Case(
        _config(
            "hunyuan_v1_dense",
            "HunYuanDenseV1ForCausalLM",
            rope_theta=10000.0,
            rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
            tie_word_embeddings=True,
            **_sizes((6, 2), width=96, head_dim=32),
        ),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},),
    ),
    # ------------------------------------------------------------------------------------------ Gemma
    "gemma": Case(
        _config(
            "gemma",
            "GemmaForCausalLM",
            hidden_act="gelu",
            hidden_activation=None,
            **_sizes((4, 1), width=48, head_dim=16),
        ),
        norm_mean=0.0,
        embed_std=48**-0.5,
    ),
    "gemma2": Case(
        _config(
            "gemma2",
            "Gemma2ForCausalLM",
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=24,
            sliding_window=8,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
            **_sizes((4, 2), width=64, layers=4, head_dim=32),
        ),
        (
            {"sliding_window": 9},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"query_pre_attn_scalar": 32},
        ),
        norm_mean=0.0,
        embed_std=0.125,
    ),
    # ------------------------------------------------------------------------------------------ Phi
    "phi3": Case(
        _config("phi3", "Phi3ForCausalLM", sliding_window=12, rope_scaling=None, **_sizes((8, 2), width=128)),
        ({"sliding_window": 13},),
    ),
    "phi3-longrope": Case(
        _config(
            "phi3",
            "Phi3ForCausalLM",
            original_max_position_embeddings=64,
            rope_scaling={"type": "longrope", "short_factor": _SHORT_FACTORS, "long_factor": _LONG_FACTORS},
            sliding_window=None,
            **_sizes((6, 2), width=96),
        ),
        ({"rope_scaling": None}, {"max_position_embeddings": 1024}),
        prompts=(20, 50, 100),
    ),
    "phi3-partial": Case(
        _config(
            "phi3",
            "Phi3ForCausalLM",
            partial_rotary_factor=0.75,
            rope_scaling=None,
            tie_word_embeddings=True,
            **_sizes((6, 2), width=96),
        ),
        ({"partial_rotary_factor": 1.0},),
    ),
    "phi": Case(
        _config("phi", "PhiForCausalLM", hidden_act="gelu_new", partial_rotary_factor=0.5, **_sizes((4, 4))),
        ({"partial_rotary_factor": 1.0},),
    ),
    # ------------------------------------------------------------------------------------------ OLMo, EXAONE
    "olmo": Case(
        _config("olmo", "OlmoForCausalLM", clip_qkv=0.9, rope_theta=10000.0, **_sizes()), ({"clip_qkv": None},)
    ),
    "olmo2": Case(
        _config("olmo2", "Olmo2ForCausalLM", rope_theta=5e5, rms_norm_eps=1e-6, **_sizes((6, 2), width=96)),
        ({"rope_theta": 1e4},),
    ),
    "olmo3": Case(
        _config(
            "olmo3",
            "Olmo3ForCausalLM",
            sliding_window=8,
            rope_theta=10000.0,
            rope_scaling={"rope_type": "yarn", "attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, **_YARN},
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            **_sizes((6, 2), width=96, layers=4),
        ),
        ({"sliding_window": 9}, {"rope_scaling": None}),
        prompts=(7, 100),
    ),
    "exaone4": Case(
        _config(
            "exaone4",
            "Exaone4ForCausalLM",
            sliding_window=8,
            sliding_window_pattern="LLLG",
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            rope_theta=1e6,
            **_sizes((6, 2), width=96, layers=4, head_dim=32),
        ),
        ({"sliding_window": 9},),
    ),
    # ------------------------------------------------------------------------------------------ Granite
    "granite": Case(
        _config(
            "granite",
            "GraniteForCausalLM",
            embedding_multiplier=12.0,
            logits_scaling=0.5,
            residual_multiplier=0.4,
            attention_multiplier=0.1,
            tie_word_embeddings=True,
            **_sizes((8, 2), width=128),
        ),
        (
            {"embedding_multiplier": 1.0},
            {"logits_scaling": 1.0},
            {"residual_multiplier": 1.0},
            {"attention_multiplier": 0.25},
        ),
        embed_std=0.1,
    ),
    "granitemoe": Case(
        _config(
            "granitemoe",
            "GraniteMoeForCausalLM",
            num_local_experts=5,
            num_experts_per_tok=2,
            embedding_multiplier=12.0,
            logits_scaling=0.5,
            residual_multiplier=0.4,
            attention_multiplier=0.1,
            tie_word_embeddings=True,
            **_sizes((6, 2), width=96),
        ),
        ({"num_experts_per_tok": 3},),
        embed_std=0.1,
    ),
    # ------------------------------------------------------------------------------------------ LayerNorm families
    "stablelm": Case(
        _config(
            "stablelm",
            "StableLmForCausalLM",
            partial_rotary_factor=0.25,
            use_qkv_bias=True,
            layer_norm_eps=1e-5,
            **_sizes((4, 2), width=128),
        ),
        ({"partial_rotary_factor": 0.5},),
    ),
    "stablelm-parallel": Case(
        _config(
            "stablelm",
            "StableLmForCausalLM",
            partial_rotary_factor=0.25,
            use_parallel_residual=True,
            qk_layernorm=True,
            **_sizes((4, 2), width=128),
        ),
    ),
    "starcoder2": Case(
        _config(
            "starcoder2",
            "Starcoder2ForCausalLM",
            hidden_act="gelu_pytorch_tanh",
            use_bias=True,
            sliding_window=12,
            norm_epsilon=1e-5,
            rope_theta=1e5,
            **_sizes((6, 2), width=96),
        ),
        ({"sliding_window": 13},),
    ),
    "cohere": Case(
        _config("cohere", "CohereForCausalLM", logit_scale=0.2, rope_theta=8e4, use_qk_norm=False, **_sizes()),
        ({"logit_scale": 1.0},),
    ),
    "cohere-qk-norm": Case(
        _config("cohere", "CohereForCausalLM", logit_scale=0.2, use_qk_norm=True, **_sizes((6, 2), width=96))
    ),
    "cohere2": Case(
        _config(
            "cohere2",
            "Cohere2ForCausalLM",
            logit_scale=0.2,
            rope_theta=5e4,
            sliding_window=8,
            sliding_window_pattern=2,
            **_sizes((6, 2), width=96, layers=4),
        ),
        ({"sliding_window": 9}, {"sliding_window_pattern": 4}),
    ),
    "nemotron": Case(
        _config(
            "nemotron",
            "NemotronForCausalLM",
            hidden_act="relu2",
            partial_rotary_factor=0.5,
            norm_eps=1e-5,
            **_sizes((6, 2), width=96, head_dim=32),
        ),
        ({"partial_rotary_factor": 1.0},),
        norm_mean=0.0,
    ),
    "gpt2": Case(
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "bos_token_id": 2,
            "eos_token_id": 2,
            "layer_norm_epsilon": 1e-5,
            "n_ctx": 128,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 128,
            "torch_dtype": "float32",
            "vocab_size": 97,
        },
    ),
    "gpt_neox": Case(
        _config(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            hidden_act="gelu",
            rotary_pct=0.25,
            rotary_emb_base=10000,
            use_parallel_residual=True,
            hidden_size=128,
            intermediate_size=160,
            num_attention_heads=4,
            num_hidden_layers=2,
        ),
        ({"rotary_pct": 0.5}, {"use_parallel_residual": False}),
    ),
    # ------------------------------------------------------------------------------------------ GLM
    "glm": Case(
        _config("glm", "GlmForCausalLM", attention_bias=True, partial_rotary_factor=0.5, **_sizes(head_dim=16)),
        ({"partial_rotary_factor": 1.0},),
    ),
    "glm4": Case(
        _config("glm4", "Glm4ForCausalLM", attention_bias=True, partial_rotary_factor=0.5, **_sizes(head_dim=16)),
        ({"partial_rotary_factor": 1.0},),
    ),
    # ------------------------------------------------------------------------------------------ sinks, latent attention
    "gpt_oss": Case(
        _config(
            "gpt_oss",
            "GptOssForCausalLM",
            attention_bias=True,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_theta=1500.0,
            rope_scaling={"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **_YARN},
            swiglu_limit=1.0,
            **_sizes(head_dim=16, ffn=48),
        ),
        (
            {"sliding_window": 9},
            {"rope_scaling": {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **_YARN}},
            {"swiglu_limit": 7.0},
        ),
        prompts=(7, 100),
    ),
    "deepseek_v2": Case(
        _config(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            q_lora_rank=None,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            first_k_dense_replace=1,
            moe_intermediate_size=40,
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            rope_theta=10000,
            rope_scaling={
                "type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.9,
                "mscale_all_dim": 0.7,
                **_YARN,
            },
            **_sizes((6, 6), width=96, layers=3),
        ),
        ({"rope_scaling": None}, {"num_experts_per_tok": 3}),
        prompts=(7, 100),
    ),
    "deepseek_v2-groups": Case(
        _config(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            q_lora_rank=20,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            first_k_dense_replace=1,
            moe_intermediate_size=40,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            routed_scaling_factor=4.0,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            **_sizes((8, 8), layers=2),
        ),
        ({"routed_scaling_factor": 1.0}, {"topk_group": 4}),
    ),
    "deepseek_v3": Case(
        _config(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            q_lora_rank=20,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            first_k_dense_replace=1,
            moe_intermediate_size=40,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            n_group=4,
            topk_group=2,
            num_nextn_predict_layers=0,
            rope_theta=10000,
            rope_scaling={
                "type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                **_YARN,
            },
            **_sizes((6, 6), width=96, layers=2),
        ),
        ({"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, {"topk_group": 4}, {"rope_scaling": None}),
        prompts=(7, 100),
    ),
}


def save(name: str, checkpoint: Tiny) -> Path:
    """Write ``values/<name>.json``: everything that a checkpoint follows from, a tensor a line."""
    shapes = ",\n".join(f"{json.dumps(key)}: {list(shape)}" for key, shape in checkpoint.shapes.items())
    numbers = {"seed": checkpoint.seed, "norm_mean": checkpoint.norm_mean, "embed_std": checkpoint.embed_std}
    text = (
        f'{{"config": {json.dumps(checkpoint.config)},\n"numbers": {json.dumps(numbers)},\n"shapes": {{\n{shapes}}}}}\n'
    )
    path = VALUES / f"{name}.json"
    path.write_text(text, encoding="utf-8")
    return path


def load(name: str) -> Tiny:
    """The checkpoint of a stored case. Raises FileNotFoundError."""
    stored = json.loads((VALUES / f"{name}.json").read_text(encoding="utf-8"))
    shapes = {key: tuple(shape) for key, shape in stored["shapes"].items()}
    return Tiny(stored["config"], shapes, **stored["numbers"])
