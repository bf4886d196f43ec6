"""Microsoft's Phi: Phi-1 and 2 (arXiv:2309.05463), Phi-3, 3.5 and 4 (arXiv:2404.14219)."""

from __future__ import annotations

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import ATTN_NORM, EMBED, FINAL_NORM, HEAD, MLP_NORM, OUT, PACKED_MLP
from diptych.jax_model.families.mistral import one_window
from diptych.jax_model.families.table import Parameter, bias, row


def configure_phi(hf: Foreign) -> Config:
    """A Phi-1 or Phi-2 configuration (transformers ``PhiConfig``)."""
    return llama.dense(
        hf,
        "phi",
        norm_eps=hf.need("layer_norm_eps", float),
        gated=False,
        norm="layer",
        norm_placement="parallel",
        qk_norm="head" if hf.get("qk_layernorm", False) else None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def configure_phi3(hf: Foreign) -> Config:
    """A Phi-3 configuration (transformers ``Phi3Config``), with one window for all layers where it has one."""
    return one_window(hf, llama.dense(hf, "phi3"))


def _has_qk_norm(config: Config, layer: Layer | None) -> bool:
    return config.qk_norm is not None


_PHI_FINAL_NORM = row("final_norm", "model.final_layernorm.weight", "output_norm.weight", "d -> d")
_PHI_OUT = row(
    "layers.{i}.attn.out", "model.layers.{i}.self_attn.dense.weight", "blk.{i}.attn_output.weight", "d (n h) -> (n h) d"
)
_PHI_MLP = (
    row("layers.{i}.mlp.up", "model.layers.{i}.mlp.fc1.weight", "blk.{i}.ffn_up.weight", "f d -> d f"),
    row("layers.{i}.mlp.down", "model.layers.{i}.mlp.fc2.weight", "blk.{i}.ffn_down.weight", "d f -> f d"),
)


def _qk_norms(name: str) -> tuple[Parameter, Parameter]:
    """llama.cpp knows no Phi with these."""
    weight = row(
        f"layers.{{i}}.attn.{name}_norm",
        f"model.layers.{{i}}.self_attn.{name}_layernorm.weight",
        None,
        "h -> h",
        when=_has_qk_norm,
    )
    return weight, bias(weight, when=_has_qk_norm)


PHI_TABLE = (
    EMBED,
    ATTN_NORM,
    bias(ATTN_NORM),
    llama.qkv(interleaved=False),
    llama.qkv_bias(interleaved=False),
    *_qk_norms("q"),
    *_qk_norms("k"),
    _PHI_OUT,
    bias(_PHI_OUT),
    *_PHI_MLP,
    *map(bias, _PHI_MLP),
    _PHI_FINAL_NORM,
    bias(_PHI_FINAL_NORM),
    HEAD,
    bias(HEAD),
)

PHI3_TABLE = (
    EMBED,
    ATTN_NORM,
    row("layers.{i}.attn.qkv", "model.layers.{i}.self_attn.qkv_proj.weight", "blk.{i}.attn_qkv.weight", "o d -> d o"),
    OUT,
    MLP_NORM,
    *PACKED_MLP,
    FINAL_NORM,
    HEAD,
)
