"""Decoder families as data: for each a function from foreign configuration to ours, and a table of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.jax_model.config import Config
from diptych.jax_model.families import cohere, gemma, llama
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.table import Parameter

__all__ = ["FAMILIES", "Family", "Foreign", "Parameter"]


@dataclass(frozen=True)
class Family:
    """``configure`` reads a configuration with Hugging Face's keys; ``table`` says where each parameter comes from.

    ``ignored`` are patterns (:mod:`fnmatch`) of stored tensors that are left out knowingly: what they hold follows from
    the configuration.
    """

    configure: Callable[[Foreign], Config]
    table: tuple[Parameter, ...]
    ignored: tuple[str, ...] = ()


_ROPE_BUFFERS = ("*.rotary_emb.inv_freq",)  # old exports of transformers stored rope's frequencies


# Keyed by Hugging Face's ``model_type``.
FAMILIES: dict[str, Family] = {
    "cohere": Family(cohere.configure, cohere.TABLE, _ROPE_BUFFERS),
    "cohere2": Family(cohere.configure_cohere2, cohere.TABLE, _ROPE_BUFFERS),
    "llama": Family(llama.configure, llama.TABLE, _ROPE_BUFFERS),
    "gemma3_text": Family(gemma.configure_gemma3, gemma.GEMMA3_TABLE, _ROPE_BUFFERS),
}
