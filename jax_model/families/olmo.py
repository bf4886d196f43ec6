"""OLMo (arXiv:2402.00838, 2501.00656) and EXAONE 4 (arXiv:2507.11407): norms without weights, or behind sublayers."""

from __future__ import annotations

from typing import Any

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import EMBED, FINAL_NORM, HEAD, MLP, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.rope_parameters import read_rope
from diptych.jax_model.families.table import Parameter, row


def configure_olmo(hf: Foreign) -> Config:
    """An OLMo 1 configuration (transformers ``OlmoConfig``): layer norms without weights, clipped projections."""
    return llama.relative(hf, "olmo", norm="layer", norm_eps=1e-5, qkv_clip=hf.find("clip_qkv", float), **_biases(hf))


def configure_olmo2(hf: Foreign) -> Config:
    """An OLMo 2 configuration (transformers ``Olmo2Config``): norms behind, and one over all queries and all keys."""
    return _behind(hf, "olmo2", qk_norm="width", norm_scale_first=True, **_biases(hf))


def configure_olmo3(hf: Foreign) -> Config:
    """An OLMo 3 configuration (transformers ``Olmo3Config``): OLMo 2 with windows and a rope for each kind of layer."""
    H = hf.size("head_dim", hf.size("hidden_size") // hf.size("num_attention_heads"))
    max_positions = hf.size("max_position_embeddings")
    ropes = {
        kind: read_rope(settings, H, max_positions, hf.origin)
        for kind, settings in hf.need("rope_parameters", dict).items()
    }
    layers = llama.windowed(hf, ropes)
    return _behind(hf, "olmo3", layers=layers, qk_norm="width", norm_scale_first=True, **_biases(hf))


def configure_exaone4(hf: Foreign) -> Config:
    """An EXAONE 4 configuration (transformers ``Exaone4Config``).

    Where some layers have a window, those without one have no rope.
    """
    H = hf.size("head_dim", hf.size("hidden_size") // hf.size("num_attention_heads"))
    rope = read_rope(hf.need("rope_parameters", dict), H, hf.size("max_position_embeddings"), hf.origin)
    everywhere = hf.find("sliding_window", int) is None
    layers = llama.windowed(hf, {"full_attention": rope if everywhere else None, "sliding_attention": rope})
    return _behind(hf, "exaone4", layers=layers, qk_norm="head")


def _behind(hf: Foreign, family: str, **switches: Any) -> Config:
    return llama.relative(hf, family, norm_placement="after", **switches)


def _biases(hf: Foreign) -> dict[str, bool]:
    return dict.fromkeys(("qkv_bias", "out_bias"), hf.get("attention_bias", False))


def _qk_norm(name: str, layout: str) -> Parameter:
    return row(
        f"layers.{{i}}.attn.{name}_norm",
        f"model.layers.{{i}}.self_attn.{name}_norm.weight",
        f"blk.{{i}}.attn_{name}_norm.weight",
        layout,
    )


_ATTN = (qkv(interleaved=False), qkv_bias(interleaved=False), OUT, OUT_BIAS)
_NORMS_BEHIND = (
    row(
        "layers.{i}.attn_post_norm",
        "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.post_attention_norm.weight",
        "d -> d",
    ),
    row(
        "layers.{i}.mlp_post_norm",
        "model.layers.{i}.post_feedforward_layernorm.weight",
        "blk.{i}.post_ffw_norm.weight",
        "d -> d",
    ),
)
_WIDE_QK_NORMS = (_qk_norm("q", "(n h) -> (n h)"), _qk_norm("k", "(k h) -> (k h)"))
_QK_NORMS = (_qk_norm("q", "h -> h"), _qk_norm("k", "h -> h"))

OLMO_TABLE = (EMBED, qkv(interleaved=True), qkv_bias(interleaved=False), OUT, OUT_BIAS, *MLP, HEAD)
OLMO2_TABLE = (EMBED, *_ATTN, *_WIDE_QK_NORMS, *_NORMS_BEHIND, *MLP, FINAL_NORM, HEAD)
EXAONE4_TABLE = (EMBED, *_ATTN, *_QK_NORMS, *_NORMS_BEHIND, *MLP, FINAL_NORM, HEAD)
