"""GPT-2 (Radford et al. 2019) and GPT-NeoX (arXiv:2204.06745), of which Pythia (arXiv:2304.01373) is made."""

from __future__ import annotations

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families import llama
from diptych.jax_model.families.activations import read_activation
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.table import bias, row


def configure_gpt2(hf: Foreign) -> Config:
    """A GPT-2 configuration (transformers ``GPT2Config``), whose keys have names of their own."""
    for switch in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        hf.expect(switch, False)
    D, N = hf.size("n_embd"), hf.size("n_head")
    return Config(
        family="gpt2",
        V=hf.size("vocab_size"),
        D=D,
        F=hf.size("n_inner", 4 * D),
        N=N,
        K=N,
        H=D // N,
        layers=(Layer(rope=None),) * hf.size("n_layer"),
        max_positions=hf.size("n_positions"),
        norm_eps=hf.need("layer_norm_epsilon", float),
        tied=hf.get("tie_word_embeddings", True),
        attn_scale=(D // N) ** -0.5 if hf.get("scale_attn_weights", True) else 1.0,
        activation=read_activation(hf, "activation_function"),
        gated=False,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
    )


def configure_neox(hf: Foreign) -> Config:
    """A GPT-NeoX configuration (transformers ``GPTNeoXConfig``)."""
    N = hf.size("num_attention_heads")
    hf.expect("head_dim", hf.size("hidden_size") // N)
    biased = hf.get("attention_bias", True)
    return llama.dense(
        hf,
        "gpt_neox",
        K=N,
        gated=False,
        norm="layer",
        norm_eps=hf.need("layer_norm_eps", float),
        norm_placement="parallel" if hf.get("use_parallel_residual", True) else "before",
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=True,
    )


# GPT-2 stores its projections input-first; llama.cpp's converter turns them round.
_GPT2 = (
    row("layers.{i}.attn_norm", "transformer.h.{i}.ln_1.weight", "blk.{i}.attn_norm.weight", "d -> d"),
    row(
        "layers.{i}.attn.qkv",
        "transformer.h.{i}.attn.c_attn.weight",
        "blk.{i}.attn_qkv.weight",
        "d o -> d o",
        gguf_layout="o d -> d o",
    ),
    row(
        "layers.{i}.attn.out",
        "transformer.h.{i}.attn.c_proj.weight",
        "blk.{i}.attn_output.weight",
        "(n h) d -> (n h) d",
        gguf_layout="d (n h) -> (n h) d",
    ),
    row("layers.{i}.mlp_norm", "transformer.h.{i}.ln_2.weight", "blk.{i}.ffn_norm.weight", "d -> d"),
    row(
        "layers.{i}.mlp.up",
        "transformer.h.{i}.mlp.c_fc.weight",
        "blk.{i}.ffn_up.weight",
        "d f -> d f",
        gguf_layout="f d -> d f",
    ),
    row(
        "layers.{i}.mlp.down",
        "transformer.h.{i}.mlp.c_proj.weight",
        "blk.{i}.ffn_down.weight",
        "f d -> f d",
        gguf_layout="d f -> f d",
    ),
)
_GPT2_NORM = row("final_norm", "transformer.ln_f.weight", "output_norm.weight", "d -> d")

GPT2_TABLE = (
    row("embed", "transformer.wte.weight", "token_embd.weight", "v d -> v d"),
    row("positions", "transformer.wpe.weight", "position_embd.weight", "p d -> p d"),
    *_GPT2,
    *map(bias, _GPT2),
    _GPT2_NORM,
    bias(_GPT2_NORM),
    llama.HEAD,
)

# GPT-NeoX stores query, key and value of one head after the other; llama.cpp's converter all queries, keys, values.
_NEOX_NORMS = (
    row("layers.{i}.attn_norm", "gpt_neox.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d"),
    row(
        "layers.{i}.mlp_norm",
        "gpt_neox.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.ffn_norm.weight",
        "d -> d",
    ),
)
_NEOX_QKV = row(
    "layers.{i}.attn.qkv",
    "gpt_neox.layers.{i}.attention.query_key_value.weight",
    "blk.{i}.attn_qkv.weight",
    "(n three h) d -> d (three n h)",
    gguf_layout="o d -> d o",
)
_NEOX_OUT = row(
    "layers.{i}.attn.out",
    "gpt_neox.layers.{i}.attention.dense.weight",
    "blk.{i}.attn_output.weight",
    "d (n h) -> (n h) d",
)
_NEOX_MLP = (
    row("layers.{i}.mlp.up", "gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight", "blk.{i}.ffn_up.weight", "f d -> d f"),
    row("layers.{i}.mlp.down", "gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight", "blk.{i}.ffn_down.weight", "d f -> f d"),
)
_NEOX_NORM = row("final_norm", "gpt_neox.final_layer_norm.weight", "output_norm.weight", "d -> d")

NEOX_TABLE = (
    row("embed", "gpt_neox.embed_in.weight", "token_embd.weight", "v d -> v d"),
    *_NEOX_NORMS,
    *map(bias, _NEOX_NORMS),
    _NEOX_QKV,
    bias(_NEOX_QKV, when=lambda config, layer: config.qkv_bias),
    _NEOX_OUT,
    bias(_NEOX_OUT, when=lambda config, layer: config.out_bias),
    *_NEOX_MLP,
    *map(bias, _NEOX_MLP),
    _NEOX_NORM,
    bias(_NEOX_NORM),
    row("head", "embed_out.weight", "output.weight", "v d -> d v", when=llama.untied),
)
