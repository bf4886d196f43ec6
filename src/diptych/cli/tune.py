"""``diptych tune``: find the fastest settings for an artifact on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from diptych.cli.console import print_json, progress_bars, show, table
from diptych.cli.options import Artifact, Json

if TYPE_CHECKING:
    from diptych.runtime.tuning import Trial


def tune(
    artifact: Artifact,
    forget: Annotated[bool, typer.Option("--forget", help="Back to the defaults, without measuring.")] = False,
    as_json: Json = False,
) -> None:
    """Measure with which settings an artifact is fastest here; later runs on this machine start with those."""
    from diptych.runtime import tuning

    if forget:
        was = tuning.forget(artifact)
        print_json({"forgotten": was}) if as_json else print("Forgotten." if was else "Nothing was remembered.")
        return
    with progress_bars() as progress:
        trials = tuning.tune(artifact, progress)
    if as_json:
        print_json({"trials": [trial.to_json() for trial in trials]})
    else:
        show(_trials_table(trials), "Later runs on this machine take the chosen line where no option says otherwise.")


def _trials_table(trials: list[Trial]) -> Table:
    from diptych.runtime.tuning import ANSWER

    prompt = trials[0].prompt_tokens
    columns = f"prefill of {prompt}>", "a decode step>", f"and {ANSWER} steps>"
    grid = table("sessions", "spins", "prefill", "threads>", *columns, "")
    for trial in trials:
        how = trial.settings
        grid.add_row(
            how.sessions,
            "yes" if how.spinning else "no",
            "float32" if how.float32_prefill else "exported",
            str(how.threads),
            f"{trial.prefill_s * 1e3:.0f} ms",
            f"{trial.decode_s * 1e3:.2f} ms",
            f"{trial.request_s:.3f} s",
            "chosen" if trial.chosen else "",
        )
    return grid
