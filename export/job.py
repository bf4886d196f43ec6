"""What is to be exported, and how: options and defaults, checked against the checkpoint before anything is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.export.lowering import TARGETS
from diptych.jax_model import params as parameters
from diptych.jax_model.config import CacheDtype, Config
from diptych.jax_model.quantize import Quantization, Recipe
from diptych.jax_model.quantize import plan as plan_quantization
from diptych.jax_model.readers import Checkpoint, open_checkpoint
from diptych.jax_model.rope import LongRope

__all__ = ["DTYPES", "KV_DTYPES", "Job", "check_options", "default_context", "slug"]

DTYPES = {"fp32": "float32"}
# What other tools offer under this option, and why it is not here.
REFUSED_DTYPES = {
    "bf16": "ONNX Runtime has no bfloat16 matrix product on the CPU",
    "fp16": "float16 graphs are slower than float32 ones on the CPU, and activations overflow",
}
KV_DTYPES: dict[str, CacheDtype] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
SHORTEST, LONGEST = 16, 8192  # of max_context: the least that parity can fill, and the default for long models
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32)$")  # what file names add to a model's name


@dataclass(frozen=True)
class Job:
    """What is to be exported, checked."""

    checkpoint: Checkpoint
    config: Config
    target: str
    dtype: str
    quantization: Quantization
    accuracy_level: int | None
    cache_dtype: CacheDtype
    max_context: int
    name: str

    @property
    def calibrated(self) -> bool:
        """Whether something about the artifact depends on what a text makes of the model."""
        recipe = self.quantization.recipe
        return self.cache_dtype == "int8" or (recipe is not None and recipe.calibrated)

    @classmethod
    def open(
        cls,
        source: str | Path,
        adapters: Sequence[tuple[str | Path, float]],
        target: str,
        dtype: str,
        quantize: str | Recipe | None,
        accuracy_level: int | None,
        kv_dtype: str,
        max_context: int | None,
        name: str | None,
    ) -> Job:
        checkpoint = open_checkpoint(source, adapters)
        config = parameters.configure(checkpoint)
        longest = config.max_positions
        if max_context is not None and not SHORTEST <= max_context <= longest:
            raise ValueError(f"max_context must be between {SHORTEST} and the model's own {longest}, not {max_context}")
        name = slug(Path(source)) if name is None else name
        quantization = plan_quantization(checkpoint, config, quantize)
        if accuracy_level == 4 and not quantization.storage:
            raise ValueError("accuracy_level 4 is about products with integer weights, and this artifact has none")
        max_context = max_context or default_context(config)
        config = parameters.configure(checkpoint, max_context)
        cache_dtype = KV_DTYPES[kv_dtype]
        return cls(
            checkpoint, config, target, DTYPES[dtype], quantization, accuracy_level, cache_dtype, max_context, name
        )


def default_context(config: Config) -> int:
    """The model's own limit, at most :data:`LONGEST`; for LongRoPE the length up to which it computes as first trained.

    Its two lists of divisors make two models: one serves sequences up to ``original`` tokens exactly, the other all
    lengths.  Which one is made, ``max_context`` decides.
    """
    scalings = (layer.rope.scaling for layer in config.layers if layer.rope is not None)
    twofold = [scaling for scaling in scalings if isinstance(scaling, LongRope) and scaling.short != scaling.long]
    return min(config.max_positions, LONGEST, *(scaling.original for scaling in twofold))


def check_options(target: str, dtype: str, accuracy_level: int | None, kv_dtype: str) -> None:
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known targets: {', '.join(TARGETS)}")
    if dtype not in DTYPES:
        reason = REFUSED_DTYPES.get(dtype, "there is no such dtype")
        raise ValueError(f"dtype {dtype!r} is not available for device cpu: {reason}. Use {', '.join(DTYPES)}")
    if accuracy_level not in (None, 1, 4):
        raise ValueError(f"accuracy_level must be 1 (float32) or 4 (activations in 8 bits), not {accuracy_level!r}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"unknown kv_dtype {kv_dtype!r}; known: {', '.join(KV_DTYPES)}")


def slug(path: Path) -> str:
    """A model's name out of a file's: ``SmolLM2-135M-Instruct.Q4_1.gguf`` is ``smollm2-135m-instruct``."""
    name = _QUANTISATION.sub("", _PART.sub("", path.resolve().name.lower().removesuffix(".gguf")))
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
