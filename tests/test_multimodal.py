"""Models for several kinds of input: the part for text loads as if it were stored by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny
from diptych.jax_model.params import configure, flatten, load
from diptych.jax_model.readers import open_checkpoint

VISION = {
    "vision_tower.embeddings.position_embedding.weight": np.ones((4, 8), np.float32),
    "multi_modal_projector.mm_soft_emb_norm.weight": np.ones(8, np.float32),
}


def write(folder: Path, text: tiny.Tiny, rename: Callable[[str], str], **extra: np.ndarray) -> Path:
    """A Gemma 3 with eyes, whose part for text has the configuration and the weights of ``text``."""
    tiny.write_huggingface(text, folder)
    whole = {"model_type": "gemma3", "text_config": text.config, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {rename(name): value for name, value in text.tensors().items()}
    save_file(
        {**tensors, **{rename(name): value for name, value in VISION.items()}, **extra}, folder / "model.safetensors"
    )
    return folder


def published(name: str) -> str:
    return name if name in VISION else f"language_model.{name}"


def saved_again(name: str) -> str:
    """As transformers 4.52 and later may write it."""
    return f"model.{name}" if name in VISION else name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("rename", [published, saved_again])
def test_the_part_for_text_is_read(rename: Callable[[str], str], tmp_path: Path) -> None:
    text = tiny.VARIANTS["gemma3-scaled"]
    alone = open_checkpoint(tiny.write_huggingface(text, tmp_path / "alone"))
    part = open_checkpoint(write(tmp_path / "whole", text, rename))
    assert configure(part) == configure(alone)
    first, second = flatten(load(part)), flatten(load(alone))
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


def test_a_tensor_of_no_part_is_refused(tmp_path: Path) -> None:
    extra = {"audio_tower.conv.weight": np.ones(3, np.float32)}
    whole = open_checkpoint(write(tmp_path, tiny.VARIANTS["gemma3"], published, **extra))
    with pytest.raises(ValueError, match=r"no parameter uses: 'audio_tower\.conv\.weight'"):
        load(whole)


def test_a_configuration_without_a_part_for_text_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny.VARIANTS["gemma3"], published)
    (folder / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(ValueError, match="'gemma3' should have a 'text_config', found None"):
        open_checkpoint(folder)
