"""Writing a tree of parameters as an Orbax checkpoint. No optimiser is ever imported."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from diptych.jax_model.params import Params
from diptych.jax_model.readers.orbax import CONFIG

__all__ = ["CONFIG", "ITEM", "write_tree"]

ITEM = "default"  # what Orbax's own manager calls a checkpoint's only item


def write_tree(folder: Path, params: Params) -> Path:
    """Save ``params`` as the item of the checkpoint ``folder``, and return the item's folder.

    Raises whatever Orbax raises about a folder that is there already or cannot be written to.
    """
    import orbax.checkpoint as ocp

    item = (folder / ITEM).resolve()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(item, jax.tree.map(np.ascontiguousarray, params))
    return item
