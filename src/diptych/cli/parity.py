"""The parity table, from what a manifest or a certificate says."""

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
    line = Text(f"parity, ONNX Runtime against JAX: {verification['status']}", "bold")
    return Group(line, grid) if verification["checks"] else line


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"
