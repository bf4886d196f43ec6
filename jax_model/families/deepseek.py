"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, many small experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.jax_model.config import Config, Experts, LatentLayer, Layer
from diptych.jax_model.families import llama
from diptych.jax_model.families.experts import mixture, read_experts, shared
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import ATTN_NORM, EMBED, FINAL_NORM, HEAD, MLP, MLP_NORM
from diptych.jax_model.families.rope_parameters import growth, read_rope
from diptych.jax_model.families.table import Filling, Parameter, Source, When, always, bias, row


def configure_v2(hf: Foreign) -> Config:
    """A DeepSeek V2 configuration (transformers ``DeepseekV2Config``)."""
    hf.expect("mlp_bias", False)
    hf.expect("norm_topk_prob", False)
    hf.expect("scoring_func", "softmax")
    hf.expect("topk_method", "greedy", "group_limited_greedy")
    grouped = hf.get("topk_method", "greedy") == "group_limited_greedy"
    groups = _groups(hf) if grouped else {}
    return _latent(hf, "deepseek_v2", _experts(hf, normalised=False, **groups), interleaved=True)


def configure_v3(hf: Foreign) -> Config:
    """A DeepSeek V3 or R1 configuration (transformers ``DeepseekV3Config``), without the layers that draft tokens."""
    hf.expect("scoring_func", "sigmoid")
    hf.expect("topk_method", "noaux_tc")
    normalised = hf.get("norm_topk_prob", True)
    experts = _experts(hf, normalised=normalised, scoring="sigmoid", corrected=True, group_top=2, **_groups(hf))
    return _latent(hf, "deepseek_v3", experts, interleaved=hf.get("rope_interleave", True))


def _groups(hf: Foreign) -> dict[str, int]:
    groups, chosen, E = hf.size("n_group"), hf.size("topk_group"), hf.size("n_routed_experts")
    if E % groups or chosen > groups:
        raise ValueError(f"{hf.origin}: {chosen} of {groups} groups cannot be chosen, or do not divide {E} experts")
    return {"groups": groups, "top_groups": chosen}


def _experts(hf: Foreign, **fields: Any) -> Experts:
    F = hf.size("moe_intermediate_size")
    shared_F, scale = F * hf.size("n_shared_experts"), hf.need("routed_scaling_factor", float)
    return read_experts(hf, "n_routed_experts", F, shared_F=shared_F, scale=scale, **fields)


def _latent(hf: Foreign, family: str, experts: Experts, *, interleaved: bool) -> Config:
    hf.expect("moe_layer_freq", 1)
    N, turning = hf.size("num_attention_heads"), hf.size("qk_rope_head_dim")
    hf.expect("num_key_value_heads", N)
    settings, max_positions = hf.need("rope_parameters", dict), hf.size("max_position_embeddings")
    Foreign(settings, f"{hf.origin}: rope_parameters").expect("partial_rotary_factor", 1.0)
    layer = LatentLayer(
        read_rope(settings, turning, max_positions, hf.origin, interleaved=interleaved),
        rank=hf.size("kv_lora_rank"),
        key=hf.size("qk_nope_head_dim"),
        value=hf.size("v_head_dim"),
        query_rank=hf.find("q_lora_rank", int),
    )
    dense, layers = hf.get("first_k_dense_replace", 0), hf.size("num_hidden_layers")
    biased = hf.get("attention_bias", False)
    grown = growth(settings["factor"], settings["mscale_all_dim"]) if settings.get("mscale_all_dim") else 1.0
    return llama.dense(
        hf,
        family,
        K=1,
        H=turning + layer.rank,
        layers=tuple(replace(layer, experts=None if i < dense else experts) for i in range(layers)),
        attn_scale=(layer.key + turning) ** -0.5 * grown**2,
        qkv_bias=biased,
        out_bias=biased,
    )


def _compressed(config: Config, layer: Layer | None) -> bool:
    return isinstance(layer, LatentLayer) and layer.query_rank is not None


def _direct(config: Config, layer: Layer | None) -> bool:
    return not _compressed(config, layer)


def _biased(config: Config, layer: Layer | None) -> bool:
    return config.qkv_bias


def _attn(name: str, hf: str, gguf: str, layout: str, when: When = always) -> Parameter:
    path, stored = f"layers.{{i}}.attn.{name}", f"model.layers.{{i}}.self_attn.{hf}.weight"
    return row(path, stored, f"blk.{{i}}.attn_{gguf}.weight", layout, when=when)


_QUERY_DOWN = _attn("query_down", "q_a_proj", "q_a", "qrank d -> d qrank", _compressed)
_KV_DOWN = _attn("kv_down", "kv_a_proj_with_mqa", "kv_a_mqa", "h d -> d h")
_OUT = _attn("out", "o_proj", "output", "d (n value) -> (n value) d")
# llama.cpp takes it apart, and turns the keys' part round.  Files from before that are refused: theirs has other keys.
_KV_UP = replace(
    _attn("kv_up", "kv_b_proj", "kv_b", "(n keyvalue) rank -> n rank keyvalue"),
    gguf=Filling(
        (
            Source("blk.{i}.attn_k_b.weight", "n rank nope -> n rank nope"),
            Source("blk.{i}.attn_v_b.weight", "n value rank -> n rank value"),
        )
    ),
)

TABLE = (
    EMBED,
    ATTN_NORM,
    _QUERY_DOWN,
    bias(_QUERY_DOWN, when=lambda config, layer: _biased(config, layer) and _compressed(config, layer)),
    _attn("query_norm", "q_a_layernorm", "q_a_norm", "qrank -> qrank", _compressed),
    _attn("query", "q_b_proj", "q_b", "(n key) qrank -> qrank (n key)", _compressed),
    _attn("query", "q_proj", "q", "(n key) d -> d (n key)", _direct),
    _KV_DOWN,
    bias(_KV_DOWN, when=_biased),
    _attn("kv_norm", "kv_a_layernorm", "kv_a_norm", "rank -> rank"),
    _KV_UP,
    _OUT,
    bias(_OUT, when=_biased),
    MLP_NORM,
    *MLP,
    *mixture("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj"),
    row(
        "layers.{i}.mlp.router_correction",
        "model.layers.{i}.mlp.gate.e_score_correction_bias",
        "blk.{i}.exp_probs_b.bias",
        "e -> e",
        when=lambda config, layer: layer is not None and layer.experts is not None and layer.experts.corrected,
    ),
    *shared("model.layers.{i}.mlp.shared_experts"),
    FINAL_NORM,
    HEAD,
)
