"""Tables of parity, of quantisation and of the cache, from what a manifest or a certificate says."""

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
    line = f"weights: {quantization['scheme']} ({quantization['recipe']}); accuracy level {level}"
    named = {_COMPARISONS.get(comparison, comparison): scores for comparison, scores in quantization["quality"].items()}
    return _scores(line, named)


def cache_table(cache: Mapping[str, Any]) -> RenderableType:
    """What the cache's type costs on our texts, from a manifest's ``cache``."""
    named = {f"{cache['dtype']}, not float32": cache["quality"]} if "quality" in cache else {}
    return _scores(f"cache: {cache['dtype']}", named)


def _scores(title: str, named: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Scores by what changed, then by text."""
    line = Text(title, "bold")
    grid = table("what changes", "text", "tokens>", "KL>", "same top 1>", "perplexity>", "before>")
    for comparison, scores in named.items():
        for text, score in scores.items():
            grid.add_row(
                comparison,
                text,
                str(score["positions"]),
                f"{score['kl']:.2g}",
                f"{score['top1']:.1%}",
                f"{score['perplexity']:.3g}",
                f"{score['expected_perplexity']:.3g}",
            )
    return Group(line, grid) if named else line


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"
