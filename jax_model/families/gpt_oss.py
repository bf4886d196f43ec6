"""OpenAI's gpt-oss (arXiv:2508.10925): attention sinks, every second layer a window, experts with biases."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config, Experts
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import ATTN_NORM, EMBED, FINAL_NORM, HEAD, OUT, OUT_BIAS, qkv, qkv_bias
from diptych.jax_model.families.table import Filling, Parameter, Source, always, bias, row


def configure(hf: Foreign) -> Config:
    """A gpt-oss configuration (transformers ``GptOssConfig``)."""
    hf.expect("hidden_act", "silu")
    biased = hf.get("attention_bias", True)
    experts = Experts(
        E=hf.size("num_local_experts"),
        top_k=hf.size("num_experts_per_tok"),
        F=hf.size("intermediate_size"),
        normalised=True,
        alpha=hf.need("swiglu_alpha", float),
        beta=1.0,
        limit=hf.need("swiglu_limit", float),
    )
    config = llama.relative(hf, "gpt_oss", norm_scale_first=True, qkv_bias=biased, out_bias=biased)
    rope = config.layers[0].rope
    layers = llama.windowed(hf, {"full_attention": rope, "sliding_attention": rope})
    return replace(config, layers=tuple(replace(layer, experts=experts) for layer in layers))


def _experts(name: str, hf: str, hf_layout: str, gguf: tuple[str, ...], gguf_layout: str) -> Parameter:
    """All experts in one tensor of Hugging Face's, in as many as ``gguf`` names of GGUF's."""
    return Parameter(
        f"layers.{{i}}.mlp.experts.{name}",
        Filling((Source(f"model.layers.{{i}}.mlp.experts.{hf}", hf_layout),)),
        Filling(tuple(Source(f"blk.{{i}}.{one}", "") for one in gguf), gguf_layout),
        always,
    )


_ROUTER = row(
    "layers.{i}.mlp.router", "model.layers.{i}.mlp.router.weight", "blk.{i}.ffn_gate_inp.weight", "e d -> d e"
)
_SINK = row("layers.{i}.attn.sink", "model.layers.{i}.self_attn.sinks", "blk.{i}.attn_sinks.weight", "n -> n")
_MLP_NORM = row(
    "layers.{i}.mlp_norm",
    "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.post_attention_norm.weight",
    "d -> d",
)

TABLE = (
    EMBED,
    ATTN_NORM,
    qkv(interleaved=False),
    qkv_bias(interleaved=False),
    _SINK,
    OUT,
    OUT_BIAS,
    _MLP_NORM,
    _ROUTER,
    bias(_ROUTER),
    _experts(
        "gate_up",
        "gate_up_proj",
        "e d (m two) -> e (m two) d",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "two e m d -> e (m two) d",
    ),
    _experts(
        "gate_up_bias",
        "gate_up_proj_bias",
        "e (m two) -> e (m two)",
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        "two e m -> e (m two)",
    ),
    _experts("down", "down_proj", "e m d -> e d m", ("ffn_down_exps.weight",), "() e d m -> e d m"),
    _experts("down_bias", "down_proj_bias", "e d -> e d", ("ffn_down_exps.bias",), "() e d -> e d"),
    FINAL_NORM,
    HEAD,
)
