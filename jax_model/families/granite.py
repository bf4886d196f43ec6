"""IBM's Granite 3: llama with scalar multipliers (in the manner of Yang et al. 2022, arXiv:2203.03466)."""

from __future__ import annotations

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import (
    ATTN_NORM,
    EMBED,
    FINAL_NORM,
    HEAD,
    MLP,
    MLP_BIASES,
    MLP_NORM,
    OUT,
    OUT_BIAS,
    qkv,
    qkv_bias,
)


def configure(hf: Foreign) -> Config:
    """A Granite configuration (transformers ``GraniteConfig``)."""
    biased = hf.get("attention_bias", False)
    return llama.relative(
        hf,
        "granite",
        attn_scale=hf.need("attention_multiplier", float),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=hf.get("mlp_bias", False),
        embed_scale=hf.need("embedding_multiplier", float),
        residual_scale=hf.need("residual_multiplier", float),
        logit_scale=1 / hf.need("logits_scaling", float),
    )


_ATTN = (ATTN_NORM, qkv(interleaved=True), qkv_bias(interleaved=True), OUT, OUT_BIAS)
TABLE = (EMBED, *_ATTN, MLP_NORM, *MLP, *MLP_BIASES, FINAL_NORM, HEAD)
