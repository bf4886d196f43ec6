"""Hunyuan, dense, version 1: norms of the heads behind rope, and a rope base stretched once for all lengths."""

from __future__ import annotations

from typing import Any

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import qk_norms, relative, table
from diptych.jax_model.rope import Rope


def configure(hf: Foreign) -> Config:
    """A dense Hunyuan configuration (transformers ``HunYuanDenseV1Config``)."""
    for switch, only in (("mlp_bias", False), ("use_cla", False), ("use_qk_norm", True)):
        hf.expect(switch, only)
    biases = hf.get("attention_bias", False)
    return relative(
        hf, "hunyuan_v1_dense", qk_norm="head_after_rope", qkv_bias=biases, out_bias=biases, **_stretched(hf)
    )


def _stretched(hf: Foreign) -> dict[str, Any]:
    """The layers, where "dynamic" scaling has an ``alpha``: the slowest pair turns that many times as slowly.

    That is transformers' ``ntk_alpha``.  Other settings of scaling, which the published configurations carry as well,
    do nothing beside it.
    """
    settings = Foreign(hf.need("rope_parameters", dict), f"{hf.origin}: rope_parameters")
    alpha = settings.find("alpha", float)
    if settings.find("rope_type", str) != "dynamic" or not alpha:
        return {}
    H = hf.size("head_dim")
    rope = Rope(settings.need("rope_theta", float) * alpha ** (H / (H - 2)), H)
    return {"layers": (Layer(rope),) * hf.size("num_hidden_layers")}


TABLE = table(norms=qk_norms("query_layernorm", "key_layernorm"))
