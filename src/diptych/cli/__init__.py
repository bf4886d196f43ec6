"""The command line. Importing it costs typer and rich; every command imports what it needs when it runs."""

from __future__ import annotations

from diptych.cli.app import main

__all__ = ["main"]
