"""Checkpoints in other formats: the parameters and the configuration of ours, saved for other JAX programs to read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diptych.export.artifact import assemble, write_text
from diptych.export.certificate import Progress, quiet
from diptych.jax_model import params as parameters
from diptych.jax_model.orbax_writer import CONFIG, write_tree
from diptych.jax_model.readers import open_checkpoint

__all__ = ["FORMATS", "convert"]

FORMATS = ("orbax",)


def convert(
    source: str | Path,
    output: str | Path,
    *,
    to: str = "orbax",
    adapters: Sequence[tuple[str | Path, float]] = (),
    progress: Progress | None = None,
) -> Path:
    """Write the checkpoint ``source`` to the folder ``output`` as an Orbax checkpoint, and return its path.

    It holds the tree of parameters in the item ``default``, our configuration in ``config.json``, and the tokenizer's
    files where there are any.  Parameters are read one by one, but Orbax wants the whole tree to save it.

    Whatever is raised, nothing is left behind: FileExistsError and other OSErrors about ``output``, FileNotFoundError
    and ValueError about ``source`` and ``to``.
    """
    if to not in FORMATS:
        raise ValueError(f"cannot convert to {to!r}; known formats: {', '.join(FORMATS)}")
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists already: name another folder, or remove it yourself")
    report = progress or quiet
    with assemble(output) as folder:
        checkpoint = open_checkpoint(source, adapters)
        config = parameters.configure(checkpoint)
        count = len(parameters.flatten(parameters.abstract(config)))
        leaves = {}
        for path, value, _ in parameters.stream(checkpoint, config):
            leaves[path] = np.ascontiguousarray(value)  # what it was a view of can go
            report("read", len(leaves), count)
        write_tree(folder, parameters.unflatten(leaves))
        write_text(folder, CONFIG, json.dumps(config.to_json(), indent=2, allow_nan=False) + "\n")
        try:
            files = checkpoint.tokenizer.files
        except FileNotFoundError:
            files = {}
        for name, text in files.items():
            write_text(folder, name, text)
    return Path(output)
