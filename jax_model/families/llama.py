"""Llama and its relatives: SmolLM2, Llama 1 and 2, TinyLlama, Yi and whatever else says ``llama``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families.activations import read_activation
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.rope_parameters import read_rope
from diptych.jax_model.families.table import Parameter, When, always, pack, row
from diptych.jax_model.rope import Rope


def configure(hf: Foreign) -> Config:
    """A llama configuration (transformers ``LlamaConfig``)."""
    for switch in ("attention_bias", "mlp_bias"):
        hf.expect(switch, False)
    return dense(hf, "llama")


def dense(hf: Foreign, family: str, *, rope_interleaved: bool = False, **switches: Any) -> Config:
    """A configuration whose keys have the names that llama's have. ``switches`` are fields that differ from llama's.

    Every layer has the one rope of ``rope_parameters`` and no window, unless ``layers`` are given.
    """
    N, D = hf.size("num_attention_heads"), hf.size("hidden_size")
    H = hf.size("head_dim", D // N)
    if "layers" not in switches:
        rope = read_rope(
            hf.need("rope_parameters", dict),
            H,
            hf.size("max_position_embeddings"),
            hf.origin,
            interleaved=rope_interleaved,
        )
        switches["layers"] = (Layer(rope),) * hf.size("num_hidden_layers")
    if "norm_eps" not in switches:
        switches["norm_eps"] = hf.need("rms_norm_eps", float)
    if "activation" not in switches:
        switches["activation"] = read_activation(hf)
    fields = {
        "V": hf.size("vocab_size"),
        "D": D,
        "F": hf.size("intermediate_size"),
        "N": N,
        "K": hf.size("num_key_value_heads", N),
        "H": H,
        "max_positions": hf.size("max_position_embeddings"),
        "tied": hf.get("tie_word_embeddings", False),
        "attn_scale": H**-0.5,
    }
    return Config(family=family, **(fields | switches))


def windowed(hf: Foreign, ropes: Mapping[str, Rope | None]) -> tuple[Layer, ...]:
    """The layers of ``layer_types``: each kind with its rope, sliding attention with a window as well.

    Raises ValueError on a kind that has no rope in ``ropes``.
    """
    windows = {"sliding_attention": hf.find("sliding_window", int)}
    kinds = hf.need("layer_types", list)
    if unknown := set(kinds) - ropes.keys():
        raise ValueError(f"{hf.origin}: layer_types has {sorted(unknown)}; known kinds: {', '.join(sorted(ropes))}")
    return tuple(Layer(ropes[kind], windows.get(kind)) for kind in kinds)


def untied(config: Config, layer: Layer | None) -> bool:
    return not config.tied


EMBED = row("embed", "model.embed_tokens.weight", "token_embd.weight", "v d -> v d")
HEAD = row("head", "lm_head.weight", "output.weight", "v d -> d v", when=untied)
OUT = row(
    "layers.{i}.attn.out",
    "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.attn_output.weight",
    "d (n h) -> (n h) d",
)
OUT_BIAS = row(
    "layers.{i}.attn.out_bias",
    "model.layers.{i}.self_attn.o_proj.bias",
    "blk.{i}.attn_output.bias",
    "d -> d",
    when=lambda config, layer: config.out_bias,
)


def _mlp(name: str, layout: str) -> Parameter:
    hf, gguf = f"model.layers.{{i}}.mlp.{name}_proj.weight", f"blk.{{i}}.ffn_{name}.weight"
    return row(f"layers.{{i}}.mlp.{name}", hf, gguf, layout, when=lambda config, layer: not _mixture(layer))


def _mlp_bias(name: str, layout: str) -> Parameter:
    hf, gguf = f"model.layers.{{i}}.mlp.{name}_proj.bias", f"blk.{{i}}.ffn_{name}.bias"
    path = f"layers.{{i}}.mlp.{name}_bias"
    return row(path, hf, gguf, layout, when=lambda config, layer: config.mlp_bias and not _mixture(layer))


def _mixture(layer: Layer | None) -> bool:
    return layer is not None and layer.experts is not None


MLP = (_mlp("gate", "f d -> d f"), _mlp("up", "f d -> d f"), _mlp("down", "d f -> f d"))
MLP_BIASES = (_mlp_bias("gate", "f -> f"), _mlp_bias("up", "f -> f"), _mlp_bias("down", "d -> d"))


def qkv(*, interleaved: bool) -> Parameter:
    """The packed projection ``[D, (N + 2 K) H]``; ``interleaved`` says that GGUF reordered the rows of q and k."""
    return _packed("layers.{i}.attn.qkv", "weight", " d", "d ", interleaved)


def qkv_bias(*, interleaved: bool) -> Parameter:
    """The packed projection's bias ``[(N + 2 K) H]``, where the configuration has one."""
    return _packed("layers.{i}.attn.qkv_bias", "bias", "", "", interleaved, lambda config, layer: config.qkv_bias)


def _packed(path: str, kind: str, from_d: str, to_d: str, interleaved: bool, when: When = always) -> Parameter:
    """Queries, keys and values as one parameter; the layouts have the axis D after the heads and before them."""

    def part(name: str, heads: str, reordered: bool) -> Parameter:
        gguf_layout = f"({heads} j two){from_d} -> {to_d}({heads} two j)" if reordered else None
        return row(
            "",
            f"model.layers.{{i}}.self_attn.{name}_proj.{kind}",
            f"blk.{{i}}.attn_{name}.{kind}",
            f"({heads} h){from_d} -> {to_d}({heads} h)",
            gguf_layout=gguf_layout,
            when=when,
        )

    # llama.cpp's converter reorders the rows of q and k of a llama for interleaved rope: (two halves, h/2) became (h/2,
    # two).
    return pack(path, part("q", "n", interleaved), part("k", "k", interleaved), part("v", "k", False))


ATTN_NORM = row(
    "layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d"
)
MLP_NORM = row(
    "layers.{i}.mlp_norm", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight", "d -> d"
)
FINAL_NORM = row("final_norm", "model.norm.weight", "output_norm.weight", "d -> d")

TABLE = (EMBED, ATTN_NORM, qkv(interleaved=True), OUT, MLP_NORM, *MLP, FINAL_NORM, HEAD)
