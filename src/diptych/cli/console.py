"""What the commands print: JSON or text on stdout; progress and remarks on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

ProgressReport = Callable[[str, int, int], None]


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object and a line break on stdout."""
    print(json.dumps(data, indent=2))


@contextmanager
def progress_bars() -> Iterator[ProgressReport | None]:
    """A ``progress(stage, done, total)`` that draws one bar for each stage; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        stages: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield report


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; columns whose name ends in ">" are numbers, aligned to the right."""
    grid = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE, pad_edge=False)
    for column in columns:
        grid.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return grid


def show(*renderables: Any) -> None:
    """Tables and lines on stdout; a name with brackets or colons in it stays as it is."""
    Console(markup=False, emoji=False, highlight=False).print(*renderables, sep="\n")


def size(count: float) -> str:
    """Bytes for people: ``539.4 MB`` (powers of ten, as disks are sold)."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
