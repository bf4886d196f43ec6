"""Gemma (Gemma Team 2024 and 2025; arXiv:2403.08295, 2408.00118, 2503.19786): scaled embeddings, windows, soft caps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.activations import read_activation
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import EMBED, HEAD, MLP, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.rope_parameters import read_rope
from diptych.jax_model.families.table import row
from diptych.jax_model.rope import Rope


def configure_gemma(hf: Foreign) -> Config:
    """A Gemma 1 configuration (transformers ``GemmaConfig``)."""
    hf.expect("use_bidirectional_attention", False)
    biased = hf.get("attention_bias", False)
    return llama.relative(
        hf,
        "gemma",
        tied=hf.get("tie_word_embeddings", True),
        qkv_bias=biased,
        out_bias=biased,
        embed_scale=hf.size("hidden_size") ** 0.5,
        norm_scale_first=True,
    )


def configure_gemma2(hf: Foreign) -> Config:
    """A Gemma 2 configuration (transformers ``Gemma2Config``)."""
    rope = read_rope(
        hf.need("rope_parameters", dict), hf.size("head_dim"), hf.size("max_position_embeddings"), hf.origin
    )
    return _later(hf, "gemma2", {"full_attention": rope, "sliding_attention": rope})


def configure_gemma3(hf: Foreign) -> Config:
    """A Gemma 3 text configuration (transformers ``Gemma3TextConfig``)."""
    H, max_positions = hf.size("head_dim"), hf.size("max_position_embeddings")
    ropes = {
        kind: read_rope(settings, H, max_positions, hf.origin)
        for kind, settings in hf.need("rope_parameters", dict).items()
    }
    return replace(_later(hf, "gemma3_text", ropes), qk_norm="head")


def _later(hf: Foreign, family: str, ropes: Mapping[str, Rope]) -> Config:
    """What Gemma 2 and 3 have in common."""
    hf.expect("use_bidirectional_attention", False)
    biased = hf.get("attention_bias", False)
    return llama.relative(
        hf,
        family,
        layers=llama.windowed(hf, ropes),
        tied=hf.get("tie_word_embeddings", True),
        attn_scale=hf.need("query_pre_attn_scalar", float) ** -0.5,
        activation=read_activation(hf, "hidden_activation"),
        norm_placement="around",
        qkv_bias=biased,
        out_bias=biased,
        attn_softcap=hf.find("attn_logit_softcapping", float),
        logit_softcap=hf.find("final_logit_softcapping", float),
        embed_scale=hf.size("hidden_size") ** 0.5,
        norm_scale_first=True,
    )


# Stored minus one by Hugging Face; GGUF files carry the sum.
_norm = functools.partial(row, hf_offset=1.0)
_ATTN_NORM = _norm(
    "layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d"
)
_FINAL_NORM = _norm("final_norm", "model.norm.weight", "output_norm.weight", "d -> d")
_ATTN = (qkv(interleaved=False), qkv_bias(interleaved=False), OUT, OUT_BIAS)
_QK_NORMS = tuple(
    _norm(
        f"layers.{{i}}.attn.{name}_norm",
        f"model.layers.{{i}}.self_attn.{name}_norm.weight",
        f"blk.{{i}}.attn_{name}_norm.weight",
        "h -> h",
    )
    for name in "qk"
)
_NORMS_AROUND = (
    _norm(
        "layers.{i}.attn_post_norm",
        "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.post_attention_norm.weight",
        "d -> d",
    ),
    _norm(
        "layers.{i}.mlp_norm", "model.layers.{i}.pre_feedforward_layernorm.weight", "blk.{i}.ffn_norm.weight", "d -> d"
    ),
    _norm(
        "layers.{i}.mlp_post_norm",
        "model.layers.{i}.post_feedforward_layernorm.weight",
        "blk.{i}.post_ffw_norm.weight",
        "d -> d",
    ),
)

GEMMA_TABLE = (
    EMBED,
    _ATTN_NORM,
    *_ATTN,
    _norm(
        "layers.{i}.mlp_norm", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight", "d -> d"
    ),
    *MLP,
    _FINAL_NORM,
    HEAD,
)
GEMMA2_TABLE = (EMBED, _ATTN_NORM, *_ATTN, *_NORMS_AROUND, *MLP, _FINAL_NORM, HEAD)
GEMMA3_TABLE = (EMBED, _ATTN_NORM, *_ATTN, *_QK_NORMS, *_NORMS_AROUND, *MLP, _FINAL_NORM, HEAD)
