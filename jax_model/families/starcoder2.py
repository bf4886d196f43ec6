"""StarCoder 2 (arXiv:2402.19173): layer norms and a plain MLP, biases everywhere, one window for all layers."""

from __future__ import annotations

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import ATTN_NORM, EMBED, FINAL_NORM, HEAD, MLP_NORM, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.mistral import one_window
from diptych.jax_model.families.table import bias, row


def configure(hf: Foreign) -> Config:
    """A StarCoder 2 configuration (transformers ``Starcoder2Config``)."""
    biased = hf.get("use_bias", True)
    config = llama.relative(
        hf,
        "starcoder2",
        norm_eps=hf.need("norm_epsilon", float),
        tied=hf.get("tie_word_embeddings", True),
        gated=False,
        norm="layer",
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=biased,
    )
    return one_window(hf, config)


_MLP = (
    row("layers.{i}.mlp.up", "model.layers.{i}.mlp.c_fc.weight", "blk.{i}.ffn_up.weight", "f d -> d f"),
    row("layers.{i}.mlp.down", "model.layers.{i}.mlp.c_proj.weight", "blk.{i}.ffn_down.weight", "d f -> f d"),
)

TABLE = (
    EMBED,
    ATTN_NORM,
    bias(ATTN_NORM),
    qkv(interleaved=False),
    qkv_bias(interleaved=False),
    OUT,
    OUT_BIAS,
    MLP_NORM,
    bias(MLP_NORM),
    *_MLP,
    *(bias(weight, when=lambda config, layer: config.mlp_bias) for weight in _MLP),
    FINAL_NORM,
    bias(FINAL_NORM),
    HEAD,
)
