"""Mistral (arXiv:2310.06825) and Mixtral (arXiv:2401.04088): Llama with a window, and with experts."""

from __future__ import annotations

from dataclasses import replace

from diptych.jax_model.config import Config
from diptych.jax_model.families.experts import mixture, read_experts
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import relative, table


def configure_mistral(hf: Foreign) -> Config:
    """A Mistral configuration (transformers ``MistralConfig``)."""
    return one_window(hf, relative(hf, "mistral"))


def configure_mixtral(hf: Foreign) -> Config:
    """A Mixtral configuration (transformers ``MixtralConfig``)."""
    config = one_window(hf, relative(hf, "mixtral"))
    experts = read_experts(hf, "num_local_experts", config.F, normalised=True)
    return replace(config, layers=tuple(replace(layer, experts=experts) for layer in config.layers))


def one_window(hf: Foreign, config: Config) -> Config:
    """The same window for all layers, if there is one."""
    hf.expect("layer_types")
    window = None if hf.find("sliding_window") is None else hf.size("sliding_window")
    return replace(config, layers=tuple(replace(layer, window=window) for layer in config.layers))


MIXTRAL_TABLE = table(
    interleaved=True, mixture=mixture("model.layers.{i}.block_sparse_moe", gate="w1", up="w3", down="w2")
)
