"""Small configurations and random parameters for them, for questions where no checkpoint is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.jax_model.config import Config, Layer
from diptych.jax_model.params import abstract
from diptych.jax_model.rope import Rope

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
CONFIGS = {"llama": LLAMA, "gemma3": GEMMA, "small_heads": SMALL_HEADS}


def random_params(config: Config, seed: int = 0) -> Any:
    """Parameters that keep activations near one: matrices scaled by their input size, norms around one."""
    random = np.random.default_rng(seed)

    def fill(leaf: Any) -> jax.Array:
        values = random.standard_normal(leaf.shape)
        return jnp.asarray(values * leaf.shape[0] ** -0.5 if len(leaf.shape) > 1 else 1 + values / 4, leaf.dtype)

    return jax.tree.map(fill, abstract(config))
