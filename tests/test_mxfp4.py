"""Experts in blocks of four-bit floats, as gpt-oss is published, load as the numbers that the format's text defines."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diptych.jax_model.params import flatten, load
from diptych.jax_model.readers import open_checkpoint
from test_family_twins import TWINS, WEIGHTS, checkpoint

KEYS = {**TWINS["gpt_oss"].keys, "hidden_size": 96, "intermediate_size": 64}


def number(code: int) -> float:
    """Sign, two bits of exponent, one of mantissa; without the leading one where the exponent is zero."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code >> 3 else size


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Of [rows, groups, 16] bytes and [rows, groups] scales: [rows, 32 groups], the lower half of a byte first."""
    each = [[number(byte & 15), number(byte >> 4)] for byte in range(256)]
    values = np.array(each)[blocks].reshape(*scales.shape, 32) * 2.0 ** (scales.astype(float) - 127)[..., None]
    return np.asarray(values.reshape(scales.shape[0], -1), np.float32)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same model with its experts in floats, and in blocks."""
    plain, _ = checkpoint(dataclasses.replace(TWINS["gpt_oss"], keys=KEYS), tmp_path)
    blocked = shutil.copytree(plain, tmp_path / "blocked")
    random, floats, parts = np.random.default_rng(0), load_file(plain / WEIGHTS), load_file(plain / WEIGHTS)
    for name, value in floats.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            E, columns, rows = value.shape
            blocks = random.integers(0, 256, (E, rows, columns // 32, 16), np.uint8)
            scales = random.integers(100, 130, (E, rows, columns // 32), np.uint8)
            floats[name] = np.ascontiguousarray(np.stack([numbers(*one).T for one in zip(blocks, scales, strict=True)]))
            parts |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del parts[name]
    save_file(floats, plain / WEIGHTS)
    save_file(parts, blocked / WEIGHTS)
    configure(blocked, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain, blocked


def configure(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_they_are_exact(folders: tuple[Path, Path]) -> None:
    first, second = (flatten(load(open_checkpoint(folder))) for folder in folders)
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


def test_some_experts_alone(folders: tuple[Path, Path]) -> None:
    one, name = open_checkpoint(folders[1]), "model.layers.1.mlp.experts.down_proj"
    np.testing.assert_array_equal(one.read(name, slice(1, 3)), one.read(name)[1:3])


def test_scales_that_do_not_fit_are_an_error(folders: tuple[Path, Path]) -> None:
    tensors = load_file(folders[1] / WEIGHTS)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :-1].copy()}, folders[1] / WEIGHTS)
    with pytest.raises(ValueError, match=r"down_proj' has blocks .* do not fit its scales"):
        open_checkpoint(folders[1])


def test_other_methods_are_refused_by_name(folders: tuple[Path, Path]) -> None:
    configure(folders[1], quantization_config={"quant_method": "hqq"})
    with pytest.raises(ValueError, match=r"config\.json: these weights are quantised already \(hqq\)"):
        open_checkpoint(folders[1])
