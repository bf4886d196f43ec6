"""Tables of parity and of quantisation, from what a manifest or a certificate says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from diptych.cli.console import table


def parity_table(verification: Mapping[str, Any]) -> RenderableType:
    """``{"status", "checks": [{"name", "what", "max_abs_error", "tolerance", "passed"}]}`` for people."""
    grid = table("check", "what", "max |Δ|>", "tolerance>", "")
    for check in verification["checks"]:
        grid.add_row(
            check["name"],
            check["what"],
            _number(check["max_abs_error"]),
            _number(check["tolerance"]),
            Text("passed", "green") if check["passed"] else Text("FAILED", "bold red"),
        )
    failed = [check["name"] for check in verification["checks"] if not check["passed"]]
    passed_or_skipped = f"parity, ONNX Runtime against JAX: {verification['status']}"
    line = Text(f"verification failed: {', '.join(failed)}" if failed else passed_or_skipped, "bold")
    return Group(line, grid) if verification["checks"] else line


_COMPARISONS = {"against_float": "integers, not floats", "level_4_against_1": "activations in 8 bits"}


def quantization_table(quantization: Mapping[str, Any]) -> RenderableType:
    """What integers cost on our texts, from a manifest's ``quantization``."""
    level = quantization["accuracy_level"]
    line = Text(f"weights: {quantization['scheme']} ({quantization['recipe']}); accuracy level {level}", "bold")
    grid = table("what changes", "text", "tokens>", "KL>", "same top 1>", "perplexity>", "before>")
    for comparison, scores in quantization["quality"].items():
        for text, score in scores.items():
            grid.add_row(
                _COMPARISONS.get(comparison, comparison),
                text,
                str(score["positions"]),
                f"{score['kl']:.2g}",
                f"{score['top1']:.1%}",
                f"{score['perplexity']:.3g}",
                f"{score['expected_perplexity']:.3g}",
            )
    return Group(line, grid) if quantization["quality"] else line


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"
