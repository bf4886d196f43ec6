"""IBM's Granite 3, with and without experts: llama with scalar multipliers (compare arXiv:2203.03466)."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.experts import read_experts
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.table import always, join, row


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


def configure_moe(hf: Foreign) -> Config:
    """A Granite MoE configuration (transformers ``GraniteMoeConfig``)."""
    config = configure(hf)
    experts = read_experts(hf, "num_local_experts", config.F, normalised=True)
    return replace(
        config, family="granitemoe", layers=tuple(replace(layer, experts=experts) for layer in config.layers)
    )


_MOE = "model.layers.{i}.block_sparse_moe"
# An expert's gate and up are one matrix here, all of the one before all of the other.
_MIXTURE = (
    row("layers.{i}.mlp.router", f"{_MOE}.router.layer.weight", "blk.{i}.ffn_gate_inp.weight", "e d -> d e"),
    join(
        "layers.{i}.mlp.experts.gate_up",
        (f"{_MOE}.input_linear.weight",),
        "() e (two m) d -> e (m two) d",
        ("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight"),
        "two e m d -> e (m two) d",
        when=always,
    ),
    row(
        "layers.{i}.mlp.experts.down", f"{_MOE}.output_linear.weight", "blk.{i}.ffn_down_exps.weight", "e d m -> e d m"
    ),
)

TABLE = llama.table(interleaved=True)
MOE_TABLE = llama.table(interleaved=True, mixture=_MIXTURE)
