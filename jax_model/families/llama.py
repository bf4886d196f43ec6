"""Llama and its relatives: all that says ``llama`` (SmolLM2, TinyLlama, Yi, Falcon 3), SmolLM3, Seed-OSS, ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.families.activations import read_activation
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.rope_parameters import read_rope
from diptych.jax_model.families.table import Parameter, When, always, bias, pack, row
from diptych.jax_model.rope import Rope


def configure(hf: Foreign) -> Config:
    """A llama configuration (transformers ``LlamaConfig``)."""
    biases = hf.get("attention_bias", False)
    return replace(relative(hf, "llama"), qkv_bias=biases, out_bias=biases, mlp_bias=hf.get("mlp_bias", False))


def configure_smollm3(hf: Foreign) -> Config:
    """A SmolLM3 configuration (transformers ``SmolLM3Config``): some layers have no rope."""
    config = by_type(hf, replace(configure(hf), family="smollm3"))
    turns = hf.need("no_rope_layers", list)  # 1 where there *is* rope
    if len(turns) < config.L:
        raise ValueError(f"{hf.origin}: 'no_rope_layers' has {len(turns)} entries for {config.L} layers")
    layers = zip(config.layers, turns, strict=False)
    return replace(config, layers=tuple(layer if turn else replace(layer, rope=None) for layer, turn in layers))


def configure_seed_oss(hf: Foreign) -> Config:
    """A Seed-OSS configuration (transformers ``SeedOssConfig``)."""
    return replace(configure(hf), family="seed_oss", out_bias=hf.get("attention_out_bias", False))


def configure_ernie4_5(hf: Foreign) -> Config:
    """A dense ERNIE 4.5 configuration (transformers ``Ernie4_5Config``): rope turns neighbours, all biases or none."""
    biases = hf.get("use_bias", False)
    config = relative(hf, "ernie4_5", rope_interleaved=True)
    return replace(config, qkv_bias=biases, out_bias=biases, mlp_bias=biases)


def by_type(hf: Foreign, config: Config) -> Config:
    """Windows for the layers that ``layer_types``, where there is one, calls sliding."""
    rope = config.layers[0].rope
    return replace(config, layers=windowed(hf, {"full_attention": rope, "sliding_attention": rope}))


def relative(hf: Foreign, family: str, **fields: Any) -> Config:
    """:func:`dense` for families in which rope turns whole heads, whatever the configuration says of fractions."""
    config = dense(hf, family, **fields)
    for layer in config.layers:
        if layer.rope is not None and layer.rope.width != config.H:
            raise ValueError(
                f"{hf.origin}: rope should turn all {config.H} elements of a head in family {family!r}, found "
                f"{layer.rope.width}"
            )
    return config


def dense(hf: Foreign, family: str, *, rope_interleaved: bool = False, **fields: Any) -> Config:
    """A configuration from the keys that most families share; ``fields`` say how this one differs from Llama."""
    N, D = hf.size("num_attention_heads"), hf.size("hidden_size")
    H = hf.size("head_dim", D // N)
    max_positions = hf.size("max_position_embeddings")
    if "layers" not in fields:
        settings = hf.need("rope_parameters", dict)
        rope = read_rope(settings, H, max_positions, hf.origin, interleaved=rope_interleaved)
        fields["layers"] = (Layer(rope),) * hf.size("num_hidden_layers")
    if "norm_eps" not in fields:
        fields["norm_eps"] = hf.need("rms_norm_eps", float)
    if "activation" not in fields:
        fields["activation"] = read_activation(hf)
    shared = {
        "V": hf.size("vocab_size"),
        "D": D,
        "F": hf.size("intermediate_size"),
        "N": N,
        "K": hf.size("num_key_value_heads", N),
        "H": H,
        "max_positions": max_positions,
        "tied": hf.get("tie_word_embeddings", False),
        "attn_scale": H**-0.5,
    }
    return Config(family=family, **{**shared, **fields})


def windowed(hf: Foreign, ropes: Mapping[str, Rope | None]) -> tuple[Layer, ...]:
    """Layers by ``layer_types``, where there is one: the rope of its kind, and a window where it slides."""
    kinds = hf.get("layer_types", ["full_attention"] * hf.size("num_hidden_layers"))
    if len(kinds) != hf.size("num_hidden_layers") or not set(ropes).issuperset(kinds):
        raise ValueError(
            f"{hf.origin}: 'layer_types' should give each of {hf.size('num_hidden_layers')} layers one of "
            f"{', '.join(ropes)}; found {kinds}"
        )
    window = hf.size("sliding_window") if "sliding_attention" in kinds else None
    return tuple(Layer(ropes[kind], window if kind == "sliding_attention" else None) for kind in kinds)


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


def no_mixture(config: Config, layer: Layer | None) -> bool:
    return layer is None or layer.experts is None


def feed_forward(
    block: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    path: str = "layers.{i}.mlp",
    gguf: str = "",
    width: str = "f",
    when: When = no_mixture,
) -> tuple[Parameter, Parameter]:
    """A gated feed-forward layer: the packed projections of gate and up [D, 2 F], and the one back to the width.

    ``gate``, ``up`` and ``down`` name the projections of the Hugging Face module ``block``; ``gguf`` ends llama.cpp's
    names for them.  ``width`` is the letter of F.
    """

    def projection(part: str, name: str, layout: str) -> Parameter:
        return row(f"{path}.{part}", f"{block}.{name}.weight", f"blk.{{i}}.ffn_{part}{gguf}.weight", layout, when=when)

    into, back = f"{width} d -> d {width}", f"d {width} -> {width} d"
    gate_up = pack(f"{path}.gate_up", projection("gate", gate, into), projection("up", up, into))
    return gate_up, projection("down", down, back)


MLP = feed_forward("model.layers.{i}.mlp")
DOWN = MLP[1]
MLP_BIASES = tuple(
    bias(weight, when=lambda config, layer: config.mlp_bias and no_mixture(config, layer)) for weight in MLP
)
# Where the checkpoint has gate and up in one tensor.
PACKED_MLP = (
    row(
        "layers.{i}.mlp.gate_up",
        "model.layers.{i}.mlp.gate_up_proj.weight",
        "blk.{i}.ffn_up.weight",
        "(two f) d -> d (two f)",
    ),
    DOWN,
)


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


ATTN_NORM = row("layers.{i}.attn_norm", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "d -> d")
MLP_NORM = row(
    "layers.{i}.mlp_norm", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight", "d -> d"
)
FINAL_NORM = row("final_norm", "model.norm.weight", "output_norm.weight", "d -> d")


def qk_norms(q: str = "q_norm", k: str = "k_norm") -> tuple[Parameter, Parameter]:
    """The norms of query and key heads, by their Hugging Face names."""
    attn = "model.layers.{i}.self_attn"
    return (
        row("layers.{i}.attn.q_norm", f"{attn}.{q}.weight", "blk.{i}.attn_q_norm.weight", "h -> h"),
        row("layers.{i}.attn.k_norm", f"{attn}.{k}.weight", "blk.{i}.attn_k_norm.weight", "h -> h"),
    )


def table(
    *,
    interleaved: bool = False,
    norms: tuple[Parameter, ...] = (),
    mlp_norm: Parameter = MLP_NORM,
    mixture: tuple[Parameter, ...] = (),
) -> tuple[Parameter, ...]:
    """The table of a relative, with norms of its heads and a mixture; ``interleaved``: GGUF reordered q and k."""
    attn = (ATTN_NORM, qkv(interleaved=interleaved), qkv_bias(interleaved=interleaved), *norms, OUT, OUT_BIAS)
    return (EMBED, *attn, mlp_norm, *MLP, *MLP_BIASES, *mixture, FINAL_NORM, HEAD)


TABLE = table(interleaved=True)
SEED_OSS_TABLE = table(
    mlp_norm=row(
        "layers.{i}.mlp_norm",
        "model.layers.{i}.post_attention_layernorm.weight",
        "blk.{i}.post_attention_norm.weight",
        "d -> d",
    ),
)
ERNIE4_5_TABLE = table()
