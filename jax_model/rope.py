"""Rotary position embedding: the frequencies of a :class:`Rope`, in the arithmetic that models are trained with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.config import Rope

__all__ = ["inverse_frequencies", "tables"]


def inverse_frequencies(rope: Rope) -> NDArray[np.float32]:
    """Angle per position of each pair, float32 [width/2]: ``base ** (-2 i / width) / factor`` (arXiv:2104.09864)."""
    exponent = np.arange(0, rope.width, 2).astype(np.float32) / np.float32(rope.width)
    return (np.float32(1.0) / np.float32(rope.base) ** exponent / np.float32(rope.factor)).astype(np.float32)


def tables(inv_freq: NDArray[np.float32], positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine, float32 [positions, width/2] each.

    The angle is rounded to float32, as the model's own code does it in training; its cosine is taken in float64, whose
    last bits, which differ from one processor to another, do not survive the rounding.
    """
    angle = (np.arange(positions, dtype=np.float32)[:, None] * inv_freq[None, :]).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
