"""Errors that a person can mend, as one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

# The class behind everything that is wrong with a command line itself; typer names only this heir of it in public.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# The import names that the extra `export` brings.
EXPORT_EXTRA = frozenset(
    (
        "jax",
        "flax",
        "orbax",
        "onnx_ir",
        "transformers",
        "huggingface_hub",
        "sentencepiece",
        "safetensors",
        "gguf",
        "einops",
        "ml_dtypes",
    )
)


def explain(error: Exception, arguments: Sequence[str] = ()) -> str | None:
    """What to tell the user about ``error``, on one line; None when it is a fault of ours.

    The Python API's names of options become those that the user typed among the command's ``arguments``.
    """
    if isinstance(error, UsageError):
        return _one_line(_usage(error))
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package not in EXPORT_EXTRA:
            return None
        return f"this needs the package {package!r}, which is not installed; run: pip install 'diptych[export]'"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return _one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, ValueError | OSError):
        return _as_typed(_one_line(str(error)), arguments) or type(error).__name__
    return None


def _as_typed(message: str, arguments: Sequence[str]) -> str:
    """``max_context`` as ``--max-context`` where that was typed; a plain word only where the message begins with it."""
    for option in {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}:
        name = re.escape(option[2:].replace("-", "_"))
        where = rf"(?<![\w./-]){name}(?![\w./-])" if "_" in name else rf"^{name}\b"
        message = re.sub(where, option, message) if option[2:] else message
    return message


def _usage(error: Exception) -> str:
    message: str = error.format_message().replace("Value error, ", "")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    return f"{message.rstrip('.')}. See: {context.command_path} --help" if context else message


def _one_line(text: str) -> str:
    return " ".join(text.split())
