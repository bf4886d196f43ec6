"""The summary of a bench run as plots: prefill, decode and the distance to the roofline, never in one figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diptych.bench.plan import Case


class Plot(NamedTuple):
    """A line for each engine: what it shows of which phase."""

    file: str
    title: str
    phase: str
    across: str
    along: str
    value: Callable[[Mapping[str, Any]], float | None]


PLOTS = (
    Plot("ttft", "Time to first token", "prefill", "tokens of the prompt", "seconds", lambda case: case["seconds"]),
    Plot("decode", "Decode", "decode", "tokens of context", "tokens/s", lambda case: case["tokens_per_s"]),
    Plot(
        "prefill-roofline",
        "Prefill: share of a matrix product's speed",
        "prefill",
        "tokens of the prompt",
        "share",
        lambda case: case["share_of_roofline"],
    ),
    Plot(
        "decode-roofline",
        "Decode: share of what reading the weights allows",
        "decode",
        "tokens of context",
        "share",
        lambda case: case["share_of_roofline"],
    ),
)


def points(plot: Plot, cases: Mapping[str, Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Where a line goes through: by tokens, of one row."""
    measured = ((Case.parse(name), figures) for name, figures in cases.items())
    shown = ((case, figures) for case, figures in measured if case.phase == plot.phase and case.rows == 1)
    line = ((case.tokens, plot.value(figures)) for case, figures in shown)
    return sorted((tokens, value) for tokens, value in line if value is not None)


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """One picture for each plot that has lines. Raises ModuleNotFoundError without matplotlib (extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for plot in PLOTS:
        lines = {name: points(plot, engine["cases"]) for name, engine in found["engines"].items()}
        if not any(lines.values()):
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for name, line in lines.items():
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.set(title=plot.title, xlabel=plot.across, ylabel=plot.along)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        files.append(folder / f"{plot.file}.svg")
        figure.savefig(files[-1], metadata={"Date": None})
        pyplot.close(figure)
    return files
