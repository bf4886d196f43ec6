"""Llama and its relatives: SmolLM2, Llama 1 and 2, TinyLlama, Yi and whatever else says ``llama``."""

from __future__ import annotations

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.rope_parameters import read_rope
from diptych.jax_model.families.table import Parameter, pack, row


def configure(hf: Foreign) -> Config:
    """A llama configuration (transformers ``LlamaConfig``)."""
    for switch in ("attention_bias", "mlp_bias"):
        hf.expect(switch, False)
    hf.expect("hidden_act", "silu")
    N, D = hf.size("num_attention_heads"), hf.size("hidden_size")
    H = hf.size("head_dim", D // N)
    max_positions = hf.size("max_position_embeddings")
    layer = Layer(read_rope(hf.need("rope_parameters", dict), H, max_positions, hf.origin))
    return Config(
        family="llama",
        V=hf.size("vocab_size"),
        D=D,
        F=hf.size("intermediate_size"),
        N=N,
        K=hf.size("num_key_value_heads", N),
        H=H,
        layers=(layer,) * hf.size("num_hidden_layers"),
        max_positions=max_positions,
        norm_eps=hf.need("rms_norm_eps", float),
        tied=hf.get("tie_word_embeddings", False),
        attn_scale=H**-0.5,
    )


def untied(config: Config, layer: Layer | None) -> bool:
    return not config.tied


# llama.cpp's converter reorders the rows of q and k of a llama for interleaved rope: (two halves, h/2) became (h/2,
# two).
_Q = "(n h) d -> d (n h)"
_K = "(k h) d -> d (k h)"
_Q_INTERLEAVED = "(n j two) d -> d (n two j)"
_K_INTERLEAVED = "(k j two) d -> d (k two j)"

EMBED = row("embed", "model.embed_tokens.weight", "token_embd.weight", "v d -> v d")
HEAD = row("head", "lm_head.weight", "output.weight", "v d -> d v", when=untied)
OUT = row(
    "layers.{i}.attn.out",
    "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.attn_output.weight",
    "d (n h) -> (n h) d",
)
MLP = (
    row("layers.{i}.mlp.gate", "model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight", "f d -> d f"),
    row("layers.{i}.mlp.up", "model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight", "f d -> d f"),
    row("layers.{i}.mlp.down", "model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight", "d f -> f d"),
)


def qkv(*, interleaved: bool) -> Parameter:
    """The packed projection ``[D, (N + 2 K) H]``; ``interleaved`` says that GGUF reordered the rows of q and k."""
    attn, blk = "model.layers.{i}.self_attn", "blk.{i}"
    return pack(
        "layers.{i}.attn.qkv",
        row(
            "", f"{attn}.q_proj.weight", f"{blk}.attn_q.weight", _Q, gguf_layout=_Q_INTERLEAVED if interleaved else None
        ),
        row(
            "", f"{attn}.k_proj.weight", f"{blk}.attn_k.weight", _K, gguf_layout=_K_INTERLEAVED if interleaved else None
        ),
        row("", f"{attn}.v_proj.weight", f"{blk}.attn_v.weight", _K),
    )


TABLE = (
    EMBED,
    row("layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d"),
    qkv(interleaved=True),
    OUT,
    row("layers.{i}.mlp_norm", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight", "d -> d"),
    *MLP,
    row("final_norm", "model.norm.weight", "output_norm.weight", "d -> d"),
    HEAD,
)
