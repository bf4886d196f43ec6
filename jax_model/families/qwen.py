"""Qwen 2 (arXiv:2407.10671), Qwen 3 (arXiv:2505.09388) and their mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.jax_model.config import Config
from diptych.jax_model.families.experts import mixed, mixture, read_experts, shared
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import by_type, qk_norms, relative, table
from diptych.jax_model.families.mistral import one_window
from diptych.jax_model.families.table import row


def configure_qwen2(hf: Foreign) -> Config:
    """A Qwen 2 or 2.5 configuration (transformers ``Qwen2Config``)."""
    return replace(by_type(hf, relative(hf, "qwen2")), qkv_bias=True)


def configure_qwen3(hf: Foreign) -> Config:
    """A Qwen 3 configuration (transformers ``Qwen3Config``)."""
    return by_type(hf, _qwen3(hf, "qwen3"))


def configure_qwen2_moe(hf: Foreign) -> Config:
    """A Qwen 1.5 or 2 mixture (transformers ``Qwen2MoeConfig``): every token passes through a gated, shared expert."""
    config = replace(by_type(hf, relative(hf, "qwen2_moe")), qkv_bias=hf.get("qkv_bias", True))
    return _sparse(hf, config, shared_F=hf.size("shared_expert_intermediate_size"), shared_gate=True)


def configure_qwen3_moe(hf: Foreign) -> Config:
    """A Qwen 3 mixture (transformers ``Qwen3MoeConfig``)."""
    return _sparse(hf, one_window(hf, _qwen3(hf, "qwen3_moe")))


def _qwen3(hf: Foreign, family: str) -> Config:
    biases = hf.get("attention_bias", False)
    return replace(relative(hf, family), qkv_bias=biases, out_bias=biases, qk_norm="head")


def _sparse(hf: Foreign, config: Config, **shared: Any) -> Config:
    """Experts in every ``decoder_sparse_step``-th layer, unless ``mlp_only_layers`` has it."""
    experts = read_experts(
        hf,
        "num_local_experts" if hf.find("num_experts") is None else "num_experts",  # transformers 5 has either name
        hf.size("moe_intermediate_size"),
        normalised=hf.get("norm_topk_prob", False),
        **shared,
    )
    step, dense = hf.size("decoder_sparse_step", 1), set(hf.get("mlp_only_layers", []))
    layers = (
        layer if i in dense or (i + 1) % step else replace(layer, experts=experts)
        for i, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers))


_MIXTURE = mixture("model.layers.{i}.mlp", gate="gate_proj", up="up_proj", down="down_proj")
_SHARED_GATE = row(
    "layers.{i}.mlp.shared_gate",
    "model.layers.{i}.mlp.shared_expert_gate.weight",
    "blk.{i}.ffn_gate_inp_shexp.weight",
    "() d -> d ()",
    gguf_layout="d -> d ()",
    when=mixed,
)

QWEN2_TABLE = table()
QWEN3_TABLE = table(norms=qk_norms())
QWEN2_MOE_TABLE = table(mixture=(*_MIXTURE, *shared("model.layers.{i}.mlp.shared_expert"), _SHARED_GATE))
QWEN3_MOE_TABLE = table(norms=qk_norms(), mixture=_MIXTURE)
