"""GLM-4 (arXiv:2406.12793): half of each head turns, in interleaved pairs; gate and up are one tensor."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import (
    ATTN_NORM,
    EMBED,
    FINAL_NORM,
    HEAD,
    MLP_NORM,
    OUT,
    PACKED_MLP,
    qkv,
    qkv_bias,
)
from diptych.jax_model.families.table import row


def configure(hf: Foreign) -> Config:
    """A GLM configuration (transformers ``GlmConfig``)."""
    return llama.dense(hf, "glm", rope_interleaved=True, qkv_bias=hf.get("attention_bias", False))


def configure_glm4(hf: Foreign) -> Config:
    """A GLM-4-0414 configuration (transformers ``Glm4Config``): norms on both sides of attention and MLP."""
    return replace(configure(hf), family="glm4", norm_placement="around")


_ATTN = (ATTN_NORM, qkv(interleaved=False), qkv_bias(interleaved=False), OUT)
_MLP = (MLP_NORM, *PACKED_MLP)

TABLE = (EMBED, *_ATTN, *_MLP, FINAL_NORM, HEAD)
GLM4_TABLE = (
    EMBED,
    *_ATTN,
    row(
        "layers.{i}.attn_post_norm",
        "model.layers.{i}.post_self_attn_layernorm.weight",
        "blk.{i}.post_attention_norm.weight",
        "d -> d",
    ),
    *_MLP,
    row(
        "layers.{i}.mlp_post_norm",
        "model.layers.{i}.post_mlp_layernorm.weight",
        "blk.{i}.post_ffw_norm.weight",
        "d -> d",
    ),
    FINAL_NORM,
    HEAD,
)
