"""Decoder families as data: for each a function from foreign configuration to ours, and a table of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.jax_model.config import Config
from diptych.jax_model.families import (
    cohere,
    deepseek,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    internlm2,
    llama,
    mistral,
    nemotron,
    olmo,
    phi,
    qwen,
    stablelm,
    starcoder2,
)
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.table import Parameter

__all__ = ["FAMILIES", "MULTIMODAL", "Family", "Foreign", "Multimodal", "Parameter"]


@dataclass(frozen=True)
class Family:
    """``configure`` reads a configuration with Hugging Face's keys; ``table`` says where each parameter comes from.

    ``ignored`` are patterns (:mod:`fnmatch`) of stored tensors that are left out knowingly: what they hold follows from
    the configuration.  ``prefix`` begins the Hugging Face names, unless a model was stored without its head.
    """

    configure: Callable[[Foreign], Config]
    table: tuple[Parameter, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""


@dataclass(frozen=True)
class Multimodal:
    """A model for several kinds of input, of which the part for text is read; it is of a ``family`` of ours.

    The part's configuration is nested under ``text_config``.  Its tensors are named as in a model for text alone, but
    for ``infix``; ``ignored`` are patterns of the other parts' tensors.
    """

    family: str
    infix: str
    ignored: tuple[str, ...]


# Old exports of transformers stored rope's frequencies; GGUF files what divides them, which their configuration has.
_ROPE_BUFFERS = ("*.rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_*.weight")
_MASK_BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias")  # triangles


# Keyed by Hugging Face's ``model_type``.
FAMILIES: dict[str, Family] = {
    "cohere": Family(cohere.configure, cohere.TABLE, _ROPE_BUFFERS),
    "cohere2": Family(cohere.configure_cohere2, cohere.TABLE, _ROPE_BUFFERS),
    "deepseek_v2": Family(deepseek.configure_v2, deepseek.TABLE, _ROPE_BUFFERS),
    "deepseek_v3": Family(deepseek.configure_v3, deepseek.TABLE, (*_ROPE_BUFFERS, "model.layers.61.*")),
    "gpt2": Family(gpt.configure_gpt2, gpt.GPT2_TABLE, _MASK_BUFFERS, prefix="transformer."),
    "gpt_oss": Family(gpt_oss.configure, gpt_oss.TABLE, _ROPE_BUFFERS),
    "gpt_neox": Family(gpt.configure_neox, gpt.NEOX_TABLE, _ROPE_BUFFERS + _MASK_BUFFERS),
    "llama": Family(llama.configure, llama.TABLE, _ROPE_BUFFERS),
    "ernie4_5": Family(llama.configure_ernie4_5, llama.ERNIE4_5_TABLE, _ROPE_BUFFERS),
    "hunyuan_v1_dense": Family(hunyuan.configure, hunyuan.TABLE, _ROPE_BUFFERS),
    "internlm2": Family(internlm2.configure, internlm2.TABLE, _ROPE_BUFFERS),
    "mistral": Family(mistral.configure_mistral, llama.TABLE, _ROPE_BUFFERS),
    "mixtral": Family(mistral.configure_mixtral, mistral.MIXTRAL_TABLE, _ROPE_BUFFERS),
    "qwen2": Family(qwen.configure_qwen2, qwen.QWEN2_TABLE, _ROPE_BUFFERS),
    "qwen2_moe": Family(qwen.configure_qwen2_moe, qwen.QWEN2_MOE_TABLE, _ROPE_BUFFERS),
    "qwen3": Family(qwen.configure_qwen3, qwen.QWEN3_TABLE, _ROPE_BUFFERS),
    "qwen3_moe": Family(qwen.configure_qwen3_moe, qwen.QWEN3_MOE_TABLE, _ROPE_BUFFERS),
    "seed_oss": Family(llama.configure_seed_oss, llama.SEED_OSS_TABLE, _ROPE_BUFFERS),
    "smollm3": Family(llama.configure_smollm3, llama.TABLE, _ROPE_BUFFERS),
    "exaone4": Family(olmo.configure_exaone4, olmo.EXAONE4_TABLE, _ROPE_BUFFERS),
    "gemma": Family(gemma.configure_gemma, gemma.GEMMA_TABLE, _ROPE_BUFFERS),
    "gemma2": Family(gemma.configure_gemma2, gemma.GEMMA2_TABLE, _ROPE_BUFFERS),
    "glm": Family(glm.configure, glm.TABLE, _ROPE_BUFFERS),
    "glm4": Family(glm.configure_glm4, glm.GLM4_TABLE, _ROPE_BUFFERS),
    "granite": Family(granite.configure, granite.TABLE, _ROPE_BUFFERS),
    "granitemoe": Family(granite.configure_moe, granite.MOE_TABLE, _ROPE_BUFFERS),
    "olmo": Family(olmo.configure_olmo, olmo.OLMO_TABLE, _ROPE_BUFFERS),
    "olmo2": Family(olmo.configure_olmo2, olmo.OLMO2_TABLE, _ROPE_BUFFERS),
    "olmo3": Family(olmo.configure_olmo3, olmo.OLMO2_TABLE, _ROPE_BUFFERS),
    "phi": Family(phi.configure_phi, phi.PHI_TABLE, _ROPE_BUFFERS),
    "phi3": Family(phi.configure_phi3, phi.PHI3_TABLE, _ROPE_BUFFERS),
    "stablelm": Family(stablelm.configure, stablelm.TABLE, _ROPE_BUFFERS),
    "starcoder2": Family(starcoder2.configure, starcoder2.TABLE, _ROPE_BUFFERS),
    "gemma3_text": Family(gemma.configure_gemma3, gemma.GEMMA3_TABLE, _ROPE_BUFFERS),
    "nemotron": Family(nemotron.configure, nemotron.TABLE, _ROPE_BUFFERS),
}

# Keyed by the ``model_type`` of the whole.
MULTIMODAL = {
    "gemma3": Multimodal("gemma3_text", "language_model.", ("*vision_tower.*", "*multi_modal_projector.*")),
}
