"""Mixtures of experts: their configuration, and rows for the router, the stacked experts and the shared one."""

from __future__ import annotations

from typing import Any

from diptych.jax_model.config import Config, Experts, Layer
from diptych.jax_model.families.foreign import Foreign
from diptych.jax_model.families.table import Parameter, join, row

__all__ = ["SHARED", "mixture", "read_experts"]


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
        row("layers.{i}.mlp.router", f"{block}.gate.weight", "blk.{i}.ffn_gate_inp.weight", "e d -> d e", when=_mixed),
        join(
            "layers.{i}.mlp.experts.gate_up",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            "(e two) m d -> e (m two) d",
            ("blk.{i}.ffn_gate_exps.weight", "blk.{i}.ffn_up_exps.weight"),
            "two e m d -> e (m two) d",
            when=_mixed,
        ),
        join(
            "layers.{i}.mlp.experts.down",
            (f"{expert}.{down}.weight",),
            "e d m -> e d m",
            ("blk.{i}.ffn_down_exps.weight",),
            "() e d m -> e d m",
            when=_mixed,
        ),
    )


def _shared(part: str, layout: str) -> Parameter:
    hf, gguf = f"model.layers.{{i}}.mlp.shared_expert.{part}_proj.weight", f"blk.{{i}}.ffn_{part}_shexp.weight"
    return row(f"layers.{{i}}.mlp.shared.{part}", hf, gguf, layout, when=_mixed)


def _mixed(config: Config, layer: Layer | None) -> bool:
    return layer is not None and layer.experts is not None


SHARED = (
    _shared("gate", "s d -> d s"),
    _shared("up", "s d -> d s"),
    _shared("down", "d s -> s d"),
    row(
        "layers.{i}.mlp.shared_gate",
        "model.layers.{i}.mlp.shared_expert_gate.weight",
        "blk.{i}.ffn_gate_inp_shexp.weight",
        "() d -> d ()",
        gguf_layout="d -> d ()",
        when=_mixed,
    ),
)
