"""Mixtures of experts: their configuration, and rows for the router, the stacked experts and the shared one."""

from __future__ import annotations

from typing import Any

from diptych.jax_model.config import Config, Experts, Layer
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.llama import feed_forward, no_mixture
from diptych.jax_model.families.table import Parameter, join, row

__all__ = ["mixed", "mixture", "read_experts", "shared"]


def read_experts(hf: Foreign, count: str, F: int, **fields: Any) -> Experts:
    """Experts of width F, as many as the key ``count`` says. Raises ValueError unless they can be chosen from."""
    hf.expect("hidden_act", "silu")
    E, top_k = hf.size(count), hf.size("num_experts_per_tok")
    if top_k > E:
        raise ValueError(f"{hf.origin}: 'num_experts_per_tok' is {top_k}, but {count!r} is {E}")
    return Experts(E, top_k, F, **fields)


def mixture(block: str, gate: str, up: str, down: str) -> tuple[Parameter, ...]:
    """The router and the experts of a Hugging Face module ``block`` with one module per expert.

    ``gate``, ``up`` and ``down`` name an expert's projections.  llama.cpp stacks those of all experts.
    """
    expert = f"{block}.experts.{{e}}"
    return (
        row("layers.{i}.mlp.router", f"{block}.gate.weight", "blk.{i}.ffn_gate_inp.weight", "e d -> d e", when=mixed),
        join(
            "layers.{i}.mlp.experts.gate_up",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            "(e two) m d -> e (m two) d",
            ("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight"),
            "two e m d -> e (m two) d",
            when=mixed,
        ),
        join(
            "layers.{i}.mlp.experts.down",
            (f"{expert}.{down}.weight",),
            "e d m -> e d m",
            ("blk.{i}.ffn_down_exps.weight",),
            "() e d m -> e d m",
            when=mixed,
        ),
    )


def shared(block: str) -> tuple[Parameter, ...]:
    """The expert that every token passes through, a Hugging Face module ``block``."""
    return feed_forward(block, path="layers.{i}.mlp.shared", gguf="_shexp", width="s", when=mixed)


def mixed(config: Config, layer: Layer | None) -> bool:
    return not no_mixture(config, layer)
