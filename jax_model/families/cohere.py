"""Cohere's Command R, Aya and Command R7B: attention and MLP side by side behind one norm without bias."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import ATTN_NORM, EMBED, FINAL_NORM, HEAD, MLP, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.table import Parameter, row


def configure(hf: Foreign) -> Config:
    """A Command R configuration (transformers ``CohereConfig``)."""
    biased = hf.get("attention_bias", False)
    return llama.relative(
        hf,
        "cohere",
        rope_interleaved=True,
        norm="layer",
        norm_eps=hf.need("layer_norm_eps", float),
        norm_placement="parallel",
        qk_norm="head" if hf.get("use_qk_norm", False) else None,
        qkv_bias=biased,
        out_bias=biased,
        logit_scale=hf.need("logit_scale", float),
    )


def configure_cohere2(hf: Foreign) -> Config:
    """A Command R7B configuration (transformers ``Cohere2Config``): only layers with a window have rope."""
    config = configure(hf)
    layers = llama.windowed(hf, {"sliding_attention": config.layers[0].rope, "full_attention": None})
    return replace(config, family="cohere2", layers=layers)


def _qk_norm(name: str, heads: str) -> Parameter:
    """A weight for every element of every head."""
    return row(
        f"layers.{{i}}.attn.{name}_norm",
        f"model.layers.{{i}}.self_attn.{name}_norm.weight",
        f"blk.{{i}}.attn_{name}_norm.weight",
        f"{heads} h -> {heads} h",
        when=lambda config, layer: config.qk_norm is not None,
    )


TABLE = (
    EMBED,
    ATTN_NORM,
    qkv(interleaved=False),
    qkv_bias(interleaved=False),
    _qk_norm("q", "n"),
    _qk_norm("k", "k"),
    OUT,
    OUT_BIAS,
    *MLP,
    FINAL_NORM,
    HEAD,
)
