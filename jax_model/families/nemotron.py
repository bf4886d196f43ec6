"""NVIDIA's Nemotron-4 and Minitron (arXiv:2402.16819): layer norms stored minus one, a plain MLP of squared ReLU."""

from __future__ import annotations

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import DOWN, EMBED, HEAD, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.table import bias, row


def configure(hf: Foreign) -> Config:
    """A Nemotron configuration (transformers ``NemotronConfig``)."""
    biased = hf.get("attention_bias", False)
    return llama.dense(
        hf,
        "nemotron",
        gated=False,
        norm="layer",
        norm_eps=hf.need("norm_eps", float),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=hf.get("mlp_bias", False),
    )


# Stored minus one by Hugging Face; GGUF files carry the sum.
_NORMS = tuple(
    row(path, hf, gguf, "d -> d", hf_offset=1.0)
    for path, hf, gguf in (
        ("layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"),
        ("layers.{i}.mlp_norm", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"),
        ("final_norm", "model.norm.weight", "output_norm.weight"),
    )
)
_ATTN_NORM, _MLP_NORM, _FINAL_NORM = _NORMS
_MLP = (
    row("layers.{i}.mlp.up", "model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight", "f d -> d f"),
    DOWN,
)

TABLE = (
    EMBED,
    _ATTN_NORM,
    bias(_ATTN_NORM),
    qkv(interleaved=False),
    qkv_bias(interleaved=False),
    OUT,
    OUT_BIAS,
    _MLP_NORM,
    bias(_MLP_NORM),
    *_MLP,
    *(bias(weight, when=lambda config, layer: config.mlp_bias) for weight in _MLP),
    _FINAL_NORM,
    bias(_FINAL_NORM),
    HEAD,
)
