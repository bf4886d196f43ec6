"""Gemma 3, text (Gemma Team 2025, arXiv:2503.19786): windows, two rope bases, norms on heads and on both sides."""

from __future__ import annotations

import functools

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import EMBED, HEAD, MLP, OUT, qkv, rope
from diptych.jax_model.families.table import row


def configure_gemma3(hf: Foreign) -> Config:
    """A Gemma 3 text configuration (transformers ``Gemma3TextConfig``)."""
    for switch in ("attention_bias", "use_bidirectional_attention"):
        hf.expect(switch, False)
    hf.expect("hidden_activation", "gelu_pytorch_tanh")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        hf.expect(cap)
    D, H = hf.size("hidden_size"), hf.size("head_dim")
    ropes = {kind: rope(settings, H, hf.origin) for kind, settings in hf.need("rope_parameters", dict).items()}
    windows = {"full_attention": None, "sliding_attention": hf.size("sliding_window")}
    return Config(
        family="gemma3_text",
        V=hf.size("vocab_size"),
        D=D,
        F=hf.size("intermediate_size"),
        N=hf.size("num_attention_heads"),
        K=hf.size("num_key_value_heads"),
        H=H,
        layers=tuple(Layer(ropes[kind], windows[kind]) for kind in hf.need("layer_types", list)),
        max_positions=hf.size("max_position_embeddings"),
        norm_eps=hf.need("rms_norm_eps", float),
        tied=hf.get("tie_word_embeddings", True),
        attn_scale=hf.need("query_pre_attn_scalar", float) ** -0.5,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        embed_scale=D**0.5,
        norm_scale_first=True,
    )


# Stored minus one by Hugging Face; GGUF files carry the sum.
_norm = functools.partial(row, hf_offset=1.0)

GEMMA3_TABLE = (
    EMBED,
    _norm("layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d"),
    qkv(interleaved=False),
    _norm("layers.{i}.attn.q_norm", "model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight", "h -> h"),
    _norm("layers.{i}.attn.k_norm", "model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight", "h -> h"),
    OUT,
    _norm(
        "layers.{i}.attn_post_norm",
        "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.post_attention_norm.weight",
        "d -> d",
    ),
    _norm(
        "layers.{i}.mlp_norm", "model.layers.{i}.pre_feedforward_layernorm.weight", "blk.{i}.ffn_norm.weight", "d -> d"
    ),
    *MLP,
    _norm(
        "layers.{i}.mlp_post_norm",
        "model.layers.{i}.post_feedforward_layernorm.weight",
        "blk.{i}.post_ffw_norm.weight",
        "d -> d",
    ),
    _norm("final_norm", "model.norm.weight", "output_norm.weight", "d -> d"),
    HEAD,
)
