"""What an artifact lost on the way: its integers against floats, its cache against one of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.export import quality
from diptych.export.artifact import WEIGHTS
from diptych.export.certificate import Progress
from diptych.export.job import Job
from diptych.jax_model import params as parameters

__all__ = ["against_float", "against_float32_cache"]

QUALITY_TOKENS = 512  # of each text


def against_float(folder: Path, job: Job, progress: Progress) -> dict[str, Any]:
    """What quantising cost: the artifact's prefill against the JAX model with the checkpoint's own values."""
    progress("quality", 0, 1)
    expected = quality.JaxReader(job.config, parameters.load(job.checkpoint, job.config))
    return _scores(
        folder, job, expected, quality.OrtReader(job.config, folder / "prefill.onnx", job.cache_dtype), progress
    )


def against_float32_cache(folder: Path, job: Job, progress: Progress) -> dict[str, Any]:
    """What the cache's type costs: the JAX model with the artifact's weights, with either cache."""
    progress("quality", 0, 1)
    file = folder / WEIGHTS
    exact = parameters.dense(parameters.read_safetensors(file, job.config, job.quantization.storage))
    rounded = parameters.with_cache_scales(file, job.config, exact, job.cache_dtype)
    found = quality.JaxReader(job.config, rounded, job.cache_dtype)
    return _scores(folder, job, quality.JaxReader(job.config, exact), found, progress)


def _scores(
    folder: Path, job: Job, expected: quality.Reader, found: quality.Reader, progress: Progress
) -> dict[str, Any]:
    texts = quality.texts(folder, job.config.V, min(job.max_context, QUALITY_TOKENS))
    scores = quality.score_json(quality.compare(expected, found, texts))
    progress("quality", 1, 1)
    return scores
