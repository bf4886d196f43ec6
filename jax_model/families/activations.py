"""Hugging Face's names of activations."""

from __future__ import annotations

from diptych.jax_model.config import Activation
from diptych.jax_model.families.foreign import Foreign

_NAMES: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}


def read_activation(hf: Foreign, key: str = "hidden_act") -> Activation:
    """The activation that ``key`` names. Raises ValueError when it is absent or not one of ours."""
    hf.expect(key, *_NAMES)
    return _NAMES[hf.need(key, str)]
