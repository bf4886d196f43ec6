"""Diptych: a pretrained decoder-only language model as two compiled programs, prefill and decode.

``diptych.load(path)`` opens an artifact with the runtime; ``diptych.export(source, path)`` makes one. Both are imported
on first use, so that an application that only runs artifacts never loads JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from diptych.export.pipeline import export as export
    from diptych.runtime import load as load

__all__ = ["__version__", "export", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        return importlib.import_module("diptych.runtime").load
    if name == "export":
        return importlib.import_module("diptych.export")  # a callable package
    raise AttributeError(f"module 'diptych' has no attribute {name!r}")
