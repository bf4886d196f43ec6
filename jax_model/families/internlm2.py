"""InternLM2 (arXiv:2403.17297): Llama under other names, with one tensor for queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config
from diptych.jax_model.families import llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.table import Filling, Part, Source, bias, row


def configure(hf: Foreign) -> Config:
    """An InternLM2 configuration (``InternLM2Config``, which comes with the models)."""
    biases = hf.get("bias", True)
    return replace(llama.relative(hf, "internlm2"), qkv_bias=biases, out_bias=biases)


# For each key/value head the rows of the query heads that share it, then the key's, then the value's.
_GROUPED = tuple(
    Source("model.layers.{i}.attention.wqkv.weight", "(k group h) d -> d (k group h)", part=part)
    for part in (Part("group", "g"), Part("group", "one", ("g",)), Part("group", "one", ("g", "one")))
)
# llama.cpp's converter takes them apart, and reorders the rows of q and k as a llama's.
_QKV = replace(llama.qkv(interleaved=True), huggingface=Filling(_GROUPED))
_LAYER, _BLOCK = "model.layers.{i}", "blk.{i}"
_OUT = row("layers.{i}.attn.out", f"{_LAYER}.attention.wo.weight", f"{_BLOCK}.attn_output.weight", "d (n h) -> (n h) d")

TABLE = (
    row("embed", "model.tok_embeddings.weight", "token_embd.weight", "v d -> v d"),
    row("layers.{i}.attn_norm", f"{_LAYER}.attention_norm.weight", f"{_BLOCK}.attn_norm.weight", "d -> d"),
    _QKV,
    bias(_QKV, when=lambda config, layer: config.qkv_bias),
    _OUT,
    bias(_OUT, when=lambda config, layer: config.out_bias),
    row("layers.{i}.mlp_norm", f"{_LAYER}.ffn_norm.weight", f"{_BLOCK}.ffn_norm.weight", "d -> d"),
    *llama.feed_forward(f"{_LAYER}.feed_forward", gate="w1", up="w3", down="w2"),
    llama.FINAL_NORM,
    row("head", "output.weight", "output.weight", "v d -> d v", when=llama.untied),
)
