"""What a text tells an export about the model: where errors count, and how large keys and values become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych.export.job import Job
from diptych.export.prompts import CALIBRATION, arbitrary, encode
from diptych.jax_model import params as parameters

__all__ = ["Calibration", "calibrate"]

CALIBRATION_TOKENS = 256  # arbitrary ones, where no tokenizer can read the text


@dataclass(frozen=True)
class Calibration:
    """What a text tells, by paths: how much errors count at each input of a matrix, and the scales of the cache."""

    importance: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    scales: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def calibrate(job: Job) -> tuple[Calibration, list[str]]:
    """Run the float model over a text; returns also what the user should know.

    Where no tokenizer can read it, no error counts more than another, and the cache's scales are made for arbitrary
    tokens.
    """
    from diptych.jax_model.calibrate import importance, scales_of_cache  # compiles and runs the model

    how, weights_of, scales, warnings = job.quantization, {}, {}, []
    try:
        ids = encode(job.checkpoint.tokenizer.files["tokenizer.json"], CALIBRATION, job.config.V)
    except FileNotFoundError:
        ids = []
    if not ids and job.cache_dtype != "int8":
        return Calibration(), []
    params = parameters.load(job.checkpoint, job.config)
    if ids and how.recipe is not None and how.recipe.calibrated:
        weights_of = importance(job.config, params, ids[: job.max_context], how.storage)
    if job.cache_dtype == "int8":
        if not ids:
            ids = arbitrary(job.config.V, CALIBRATION_TOKENS)
            warnings.append(
                "there is no tokenizer: the scales of the int8 cache were made for arbitrary tokens, not text"
            )
        scales = scales_of_cache(job.config, params, ids[: job.max_context])
    return Calibration(weights_of, scales), warnings
