"""Cohere's Command R, Aya and Command R7B: attention and MLP side by side behind one norm without bias."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families.activations import read_activation
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import EMBED, HEAD, MLP, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.rope_parameters import read_rope
from diptych.jax_model.families.table import Parameter, row


def configure(hf: Foreign) -> Config:
    """A Command R configuration (transformers ``CohereConfig``)."""
    D, N = hf.size("hidden_size"), hf.size("num_attention_heads")
    H = hf.size("head_dim", D // N)
    max_positions, biased = hf.size("max_position_embeddings"), hf.get("attention_bias", False)
    rope = read_rope(hf.need("rope_parameters", dict), H, max_positions, hf.origin, interleaved=True)
    return Config(
        family="cohere",
        V=hf.size("vocab_size"),
        D=D,
        F=hf.size("intermediate_size"),
        N=N,
        K=hf.size("num_key_value_heads", N),
        H=H,
        layers=(Layer(rope),) * hf.size("num_hidden_layers"),
        max_positions=max_positions,
        norm_eps=hf.need("layer_norm_eps", float),
        tied=hf.get("tie_word_embeddings", True),
        attn_scale=H**-0.5,
        activation=read_activation(hf),
        norm="layer",
        norm_placement="parallel",
        qk_norm="head" if hf.get("use_qk_norm", False) else None,
        qkv_bias=biased,
        out_bias=biased,
        logit_scale=hf.need("logit_scale", float),
    )


def configure_cohere2(hf: Foreign) -> Config:
    """A Command R7B configuration (transformers ``Cohere2Config``): only layers with a window have rope."""
    config = configure(hf)
    local = replace(config.layers[0], window=hf.size("sliding_window"))
    kinds = {"full_attention": Layer(None), "sliding_attention": local}
    layers = tuple(kinds[kind] for kind in hf.need("layer_types", list))
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
    row("layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d"),
    qkv(interleaved=False),
    qkv_bias(interleaved=False),
    _qk_norm("q", "n"),
    _qk_norm("k", "k"),
    OUT,
    OUT_BIAS,
    *MLP,
    row("final_norm", "model.norm.weight", "output_norm.weight", "d -> d"),
    HEAD,
)
