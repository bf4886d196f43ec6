"""StableLM 2 and 3B (arXiv:2402.17834): layer norms, and rope on a part of each head."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import ATTN_NORM, EMBED, FINAL_NORM, HEAD, MLP, MLP_NORM, OUT, qkv, qkv_bias
from diptych.jax_model.families.table import Parameter, bias, join


def configure(hf: Foreign) -> Config:
    """A StableLM configuration (transformers ``StableLmConfig``)."""
    D, N = hf.size("hidden_size"), hf.size("num_attention_heads")
    hf.expect("head_dim", D // N)  # transformers reads it for rope only
    return llama.dense(
        hf,
        "stablelm",
        norm_eps=hf.need("layer_norm_eps", float),
        norm="layer",
        norm_placement="parallel" if hf.get("use_parallel_residual", False) else "before",
        qk_norm="head" if hf.get("qk_layernorm", False) else None,
        qkv_bias=hf.get("use_qkv_bias", False),
    )


def _in_sequence(config: Config, layer: Layer | None) -> bool:
    return config.norm_placement == "before"


def _has_qk_norm(config: Config, layer: Layer | None) -> bool:
    return config.qk_norm is not None


def _qk_norm(name: str, heads: str) -> Parameter:
    """A weight for every element of every head, which Hugging Face stores head by head."""
    return join(
        f"layers.{{i}}.attn.{name}_norm",
        (f"model.layers.{{i}}.self_attn.{name}_layernorm.norms.{{{heads}}}.weight",),
        f"{heads} h -> {heads} h",
        (f"blk.{{i}}.attn_{name}_norm.weight",),
        f"() {heads} h -> {heads} h",
        when=_has_qk_norm,
    )


_MLP_NORM = replace(MLP_NORM, when=_in_sequence)

TABLE = (
    EMBED,
    ATTN_NORM,
    bias(ATTN_NORM),
    qkv(interleaved=False),
    qkv_bias(interleaved=False),
    _qk_norm("q", "n"),
    _qk_norm("k", "k"),
    OUT,
    _MLP_NORM,
    bias(_MLP_NORM, when=_in_sequence),
    *MLP,
    FINAL_NORM,
    bias(FINAL_NORM),
    HEAD,
)
