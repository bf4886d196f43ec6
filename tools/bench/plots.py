"""The summary of a bench run as plots: prefill, decode and the distance to the roofline, never in one figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diptych.bench.plan import Case
from diptych.bench.report import setting

MARKERS = "os^DvP*X"


class Plot(NamedTuple):
    """A line for each engine: what it shows of which phase, and of what ceiling its values are shares."""

    file: str
    title: str
    phase: str
    along: str
    value: Callable[[Mapping[str, Any]], float | None]
    ceiling: str | None = None


ACROSS = {"prefill": "tokens of the prompt", "decode": "tokens of context"}
PLOTS = (
    Plot("ttft", "Time to first token", "prefill", "seconds", lambda case: case["seconds"]),
    Plot("decode", "Decode, one row", "decode", "tokens/s", lambda case: case["tokens_per_s"]),
    Plot(
        "prefill-roofline",
        "Prefill: share of a float32 matrix product's speed",
        "prefill",
        "share of {:.0f} GFLOP/s",
        lambda case: case["share_of_roofline"],
        "arithmetic",
    ),
    Plot(
        "decode-roofline",
        "Decode, one row: share of what reading all weights once a step allows",
        "decode",
        "share of {:.1f} GB/s",
        lambda case: case["share_of_roofline"],
        "bandwidth",
    ),
)


def points(plot: Plot, cases: Mapping[str, Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Where a line goes through: by tokens, of one row."""
    measured = ((Case.parse(name), figures) for name, figures in cases.items())
    shown = ((case, figures) for case, figures in measured if case.phase == plot.phase and case.rows == 1)
    line = ((case.tokens, plot.value(figures)) for case, figures in shown)
    return sorted((tokens, value) for tokens, value in line if value is not None)


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """One PNG for each plot that has lines. Raises ModuleNotFoundError without matplotlib (extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for plot in PLOTS:
        lines = {name: points(plot, engine["cases"]) for name, engine in found["engines"].items()}
        if any(lines.values()):
            figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
            _draw(axes, plot, lines, found)
            files.append(folder / f"{plot.file}.png")
            figure.savefig(files[-1], dpi=150)
            pyplot.close(figure)
    return files


def _draw(axes: Any, plot: Plot, lines: Mapping[str, list[tuple[int, float]]], found: Mapping[str, Any]) -> None:
    """An engine has one colour and one marker in all plots, drawn there or not."""
    for i, (name, line) in enumerate(lines.items()):
        if line:
            axes.plot(*zip(*line, strict=True), color=f"C{i}", marker=MARKERS[i % len(MARKERS)], label=name)
    ceiling = found["ceilings"][plot.ceiling] if plot.ceiling else None
    axes.set(xlabel=ACROSS[plot.phase], ylabel=plot.along.format((ceiling or 0) / 1e9))
    axes.set_title(plot.title, loc="left", fontsize="large", fontweight="bold", pad=22)
    axes.text(
        0, 1.02, f"{found['model']} on {setting(found)}", transform=axes.transAxes, fontsize="small", color="0.35"
    )
    axes.set_xscale("log", base=2)
    ticks = sorted({tokens for line in lines.values() for tokens, _ in line})
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.minorticks_off()
    if plot.ceiling:
        axes.axhline(1, color="0.6", linestyle="--", linewidth=1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if plot.file == "ttft":  # whose values grow as the prompts do
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
