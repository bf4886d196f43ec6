"""Small configurations and random parameters for them, for questions where no checkpoint is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.jax_model.config import CacheDtype, Config, Experts, LatentLayer, Layer
from diptych.jax_model.params import abstract, cache_scales, flatten, unflatten
from diptych.jax_model.rope import LongRope, Rope, Yarn

LLAMA = Config(
    family="llama", V=97, D=64, F=128, N=8, K=2, H=16, layers=(Layer(Rope(1e4, 16)),) * 2, max_positions=256,
    norm_eps=1e-5, tied=False, attn_scale=16**-0.5,
)  # fmt: skip
GEMMA = Config(
    family="gemma3_text", V=97, D=64, F=128, N=4, K=1, H=16,
    layers=(Layer(Rope(1e4, 16), window=8), Layer(Rope(1e6, 16))),
    max_positions=256, norm_eps=1e-6, tied=True, attn_scale=24**-0.5, activation="gelu_tanh", qk_norm="head",
    norm_placement="around", embed_scale=8.0, norm_scale_first=True,
)  # fmt: skip
SMALL_HEADS = replace(LLAMA, H=8, layers=(Layer(Rope(1e4, 8)), Layer(Rope(1e4, 8), window=5)))  # no rotary in GQA
COHERE = Config(
    family="cohere2", V=97, D=64, F=128, N=6, K=2, H=16,
    layers=(Layer(Rope(1e4, 16, interleaved=True), window=8), Layer(None)), max_positions=256, norm_eps=1e-5, tied=True,
    attn_scale=0.25, norm="layer", norm_placement="parallel", qk_norm="head", qkv_bias=True, out_bias=True,
    logit_scale=0.5,
)  # fmt: skip
GPT2 = Config(
    family="gpt2", V=97, D=64, F=96, N=4, K=4, H=16, layers=(Layer(None),) * 2, max_positions=256, norm_eps=1e-5,
    tied=True, attn_scale=0.25, activation="gelu_tanh", gated=False, norm="layer", qkv_bias=True, out_bias=True,
    mlp_bias=True, learned_positions=True,
)  # fmt: skip
NEOX = replace(  # rope turns half of each head
    GPT2, family="gpt_neox", N=2, K=2, H=32, layers=(Layer(Rope(1e4, 16)),) * 2, tied=False, activation="gelu",
    norm_placement="parallel", learned_positions=False,
)  # fmt: skip
MIXTURE = replace(  # and one layer that has none
    LLAMA, family="qwen2_moe", qkv_bias=True,
    layers=(
        Layer(Rope(1e4, 16)),
        Layer(Rope(1e4, 16), experts=Experts(6, 2, 24, normalised=False, shared_F=40, shared_gate=True)),
    ),
)  # fmt: skip
SINKS = replace(  # and a mixture whose experts have biases and a clipped gate
    LLAMA, family="gpt_oss", norm_scale_first=True, qkv_bias=True, out_bias=True,
    layers=tuple(
        Layer(Rope(1e4, 16), window, Experts(6, 4, 24, normalised=True, alpha=1.702, beta=1.0, limit=1.0))
        for window in (8, None)
    ),
)  # fmt: skip
LATENT = replace(  # and a router that chooses groups first
    LLAMA, family="deepseek_v3", N=4, K=1, H=48,
    layers=tuple(
        LatentLayer(Rope(1e4, 16, interleaved=True), experts=experts, rank=32, key=12, value=20, query_rank=24)
        for experts in (
            None,
            Experts(8, 3, 24, normalised=True, shared_F=48, scoring="sigmoid", corrected=True, groups=4, top_groups=2,
                    group_top=2, scale=1.75),
        )
    ),
)  # fmt: skip
OLMO = replace(  # norms without weights; with every scalar switch there is
    LLAMA, family="olmo", norm="layer", qkv_clip=0.8, attn_softcap=1.0, logit_softcap=2.0, embed_scale=3.0,
    residual_scale=0.5, logit_scale=0.7,
)  # fmt: skip
OLMO3 = replace(  # norms behind, and over all heads
    LLAMA, family="olmo3", N=6, qk_norm="width", norm_placement="after", norm_scale_first=True,
    layers=(Layer(Rope(1e4, 16, Yarn(4.0, 16, 1.1))), Layer(Rope(1e4, 16), window=8)),
)  # fmt: skip
PHI = replace(GPT2, family="phi", K=2, layers=(Layer(Rope(1e4, 8)),) * 2, norm_placement="parallel", qk_norm="head",
              tied=False, head_bias=True, learned_positions=False)  # fmt: skip
GLM4 = replace(  # rope turns pairs of neighbours in half of each head, by frequencies of a long list
    LLAMA, family="glm4", H=32, norm_placement="around", qkv_bias=True,
    layers=(Layer(Rope(1e4, 16, LongRope((1.0,) * 8, tuple(1.0 + i for i in range(8)), 64, 1.2), interleaved=True)),)
    * 2,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "gemma3": GEMMA,
    "small_heads": SMALL_HEADS,
    "cohere": COHERE,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "mixture": MIXTURE,
    "gpt_oss": SINKS,
    "deepseek": LATENT,
    "olmo": OLMO,
    "olmo3": OLMO3,
    "phi": PHI,
    "glm4": GLM4,
}


def random_params(config: Config, seed: int = 0, cache_dtype: CacheDtype = "float32") -> Any:
    """Parameters that keep activations near one: matrices scaled by their input size, norms around one.

    The scales of a cache of integers are such that keys and values use most of its range, and few are clipped.
    """
    random = np.random.default_rng(seed)

    def fill(leaf: Any) -> jax.Array:
        values = random.standard_normal(leaf.shape)
        return jnp.asarray(values * leaf.shape[0] ** -0.5 if len(leaf.shape) > 1 else 1 + values / 4, leaf.dtype)

    leaves = flatten(jax.tree.map(fill, abstract(config)))
    scales = {
        path: jnp.asarray(random.uniform(2.5, 3.5, (config.K, config.H)) / 127, jnp.float32)
        for path in cache_scales(config, cache_dtype)
    }
    return unflatten({**leaves, **scales})
