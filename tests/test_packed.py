"""Folders with packed weights load as the numbers that their formats define, here computed one element at a time."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

import tiny
from diptych.jax_model.params import flatten, load
from diptych.jax_model.readers import open_checkpoint

Tensors = dict[str, np.ndarray]
# One that a block of 128 does not divide; sizes that words and groups divide.
MODEL = tiny.llama(heads=(6, 2), head_size=16, width=96, layers=1, ffn=160)
RANDOM = np.random.default_rng(7)


@dataclass(frozen=True)
class Packing:
    """``pack`` makes random parts of a matrix [rows, columns] and the numbers that they mean."""

    settings: Mapping[str, Any]
    pack: Callable[[str, int, int], tuple[Tensors, np.ndarray]]
    stored_as: str


def field_of(word: int, i: int, bits: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> bits * i & (1 << bits) - 1


def gptq(bits: int, group: int, *, less_one: bool = True, shuffled: bool = False, index: bool = True) -> Any:
    def pack(name: str, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        per, size = 32 // bits, columns if group == -1 else group
        groups = -(-columns // size)
        words = np.iinfo(np.int32)
        parts = {
            "qweight": RANDOM.integers(words.min, words.max, (columns // per, rows), np.int32),
            "qzeros": RANDOM.integers(words.min, words.max, (groups, rows // per), np.int32),
            "scales": RANDOM.uniform(-0.01, 0.01, (groups, rows)).astype(np.float16),
        }
        g_idx = np.arange(columns, dtype=np.int32) // size
        if shuffled:
            RANDOM.shuffle(g_idx)
        if index:
            parts["g_idx"] = g_idx
        meant = np.empty((rows, columns), np.float32)
        for o in range(rows):
            for i in range(columns):
                g = g_idx[i]
                q = field_of(parts["qweight"][i // per, o], i % per, bits)
                zero = field_of(parts["qzeros"][g, o // per], o % per, bits) + less_one
                meant[o, i] = float(parts["scales"][g, o]) * (q - zero)
        return {f"{name}.{part}": value for part, value in parts.items()}, meant

    return pack


def awq(name: str, rows: int, columns: int, group: int = 32) -> tuple[Tensors, np.ndarray]:
    words = np.iinfo(np.int32)
    parts = {
        "qweight": RANDOM.integers(words.min, words.max, (columns, rows // 8), np.int32),
        "qzeros": RANDOM.integers(words.min, words.max, (columns // group, rows // 8), np.int32),
        "scales": RANDOM.uniform(-0.01, 0.01, (columns // group, rows)).astype(np.float16),
    }
    place = {column: i for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}
    meant = np.empty((rows, columns), np.float32)
    for o in range(rows):
        for i in range(columns):
            q, zero = (
                field_of(parts[part][row, o // 8], place[o % 8], 4)
                for part, row in (("qweight", i), ("qzeros", i // group))
            )
            meant[o, i] = float(parts["scales"][i // group, o]) * (q - zero)
    return {f"{name}.{part}": value for part, value in parts.items()}, meant


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent, three of mantissa; no infinities."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte >> 7 else size


def float8(shape_of: Callable[[int, int], tuple[int, ...]], scale: str, dtype: Any = np.float32) -> Any:
    """``shape_of`` says how many scales there are: blocks, rows or one."""

    def pack(name: str, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes = RANDOM.integers(0, 256, (rows, columns)).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        scales = np.asarray(
            2.0 ** RANDOM.integers(-6, 2, shape_of(rows, columns)) * (1.25 if dtype == np.float32 else 1), dtype
        )
        grid = scales.astype(np.float64).reshape(scales.shape if scales.ndim == 2 else (-1, 1))
        block = [
            -(-size // count) if count == 1 else (1 if count == size else 128)
            for size, count in zip((rows, columns), grid.shape, strict=True)
        ]
        meant = np.empty((rows, columns), np.float32)
        for o in range(rows):
            for i in range(columns):
                meant[o, i] = e4m3(int(codes[o, i])) * grid[o // block[0], i // block[1]]
        return {f"{name}.weight": codes.view(ml_dtypes.float8_e4m3fn), f"{name}.{scale}": scales}, meant

    return pack


def blocks(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 128), -(-columns // 128)


def gptq_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "damp_percent": 0.1, **more}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
PACKINGS = {
    "gptq-4": Packing(gptq_settings(4, 32), gptq(4, 32), "INT4"),
    "gptq-8": Packing(gptq_settings(8, 32, checkpoint_format="gptq"), gptq(8, 32), "INT8"),
    "gptq-2": Packing(gptq_settings(2, 32), gptq(2, 32), "INT2"),
    "gptq-desc_act": Packing(gptq_settings(4, 32, desc_act=True), gptq(4, 32, shuffled=True), "INT4"),
    "gptq-one-group": Packing(gptq_settings(4, -1), gptq(4, -1), "INT4"),
    "gptq-no-index": Packing(gptq_settings(4, 32), gptq(4, 32, index=False), "INT4"),
    "gptq-v2": Packing(
        gptq_settings(4, 32, checkpoint_format="gptq_v2", dynamic={}), gptq(4, 32, less_one=False), "INT4"
    ),
    "awq": Packing(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq, "INT4"
    ),
    "float8-blocks": Packing(FP8 | {"weight_block_size": [128, 128]}, float8(blocks, "weight_scale_inv"), "F8_E4M3"),
    "float8-exponents": Packing(
        FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        float8(blocks, "weight_scale_inv", ml_dtypes.float8_e8m0fnu), "F8_E4M3",
    ),
    "float8-one": Packing(FP8, float8(lambda rows, columns: (), "weight_scale"), "F8_E4M3"),
    "float8-bfloat16-scale": Packing(
        FP8, float8(lambda rows, columns: (1,), "weight_scale", ml_dtypes.bfloat16), "F8_E4M3"
    ),
    "float8-rows": Packing(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        float8(lambda rows, columns: (rows, 1), "weight_scale"), "F8_E4M3",
    ),
}  # fmt: skip


def write(folder: Path, tensors: Tensors, settings: Mapping[str, Any] | None) -> Path:
    tiny.write_huggingface(MODEL, folder)
    (folder / "model.safetensors").write_bytes(save(tensors))
    if settings is not None:
        config = {**MODEL.config, "quantization_config": dict(settings)}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def packed(name: str) -> tuple[Tensors, Tensors]:
    """A model's tensors with all projections packed, and the same in float32."""
    packing = PACKINGS[name]
    parts: Tensors = {}
    plain: Tensors = {}
    for tensor, value in MODEL.tensors().items():
        if "_proj" in tensor:
            stored, meant = packing.pack(tensor.removesuffix(".weight"), *value.shape)
            parts |= stored
            plain[tensor] = meant
        else:
            parts[tensor] = plain[tensor] = value
    return parts, plain


@pytest.mark.parametrize("name", PACKINGS)
def test_numbers_are_exact(name: str, tmp_path: Path) -> None:
    packing = PACKINGS[name]
    parts, plain = packed(name)
    one = open_checkpoint(write(tmp_path / "packed", parts, packing.settings))
    other = open_checkpoint(write(tmp_path / "plain", plain, None))
    assert {name: info.shape for name, info in one.tensors.items()} == MODEL.shapes
    assert {one.tensors[name].dtype for name in plain if "_proj" in name} == {packing.stored_as}
    first, second = flatten(load(one)), flatten(load(other))
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


@pytest.mark.parametrize("name", PACKINGS)
def test_some_rows_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read few at a time, and from where no word begins."""
    monkeypatch.setattr("diptych.jax_model.readers.tensor_parts._CHUNK", 5 * 96)
    packing = PACKINGS[name]
    parts, plain = packed(name)
    one = open_checkpoint(write(tmp_path, parts, packing.settings))
    for tensor in (name for name in plain if "_proj" in name):
        np.testing.assert_array_equal(one.read(tensor), plain[tensor])
        np.testing.assert_array_equal(one.read(tensor, slice(3, 29)), plain[tensor][3:29])


@dataclass(frozen=True)
class Refused:
    """A packing with other settings (None: left out), and tensors that are changed or, if None, left out."""

    packing: str
    problem: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray | None] = field(default_factory=dict)


Q = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "another method": Refused("awq", r"config\.json: these weights .* already \(hqq\)", {"quant_method": "hqq"}),
    "no method": Refused("awq", r"by an unnamed method", {"quant_method": None}),
    "another packing": Refused("awq", r"'version' is 'gemv'", {"version": "gemv"}),
    "symmetric": Refused("awq", r"'zero_point' is False", {"zero_point": False}),
    "three bits": Refused("gptq-4", r"'bits' is 3; this version supports 2, 4, 8", {"bits": 3}),
    "no bits": Refused("gptq-4", r"there is no 'bits'", {"bits": None}),
    "bits by module": Refused("gptq-4", r"'dynamic' is", {"dynamic": {"lm_head": {"bits": 8}}}),
    "a key nobody knows": Refused("gptq-4", r"'rotation' in 'quantization_config' is not known", {"rotation": "x"}),
    "for other kernels": Refused("gptq-4", r"'is_marlin_format' is True", {"is_marlin_format": True}),
    "another group": Refused("gptq-4", r"qzeros' is I32 .*, expected .* in groups of 16", {"group_size": 16}),
    "other bits": Refused("gptq-4", r"expected I32", {"bits": 8}),
    "no zeros": Refused("gptq-4", r"there is '.*qweight' but no '.*q_proj\.qzeros'", {}, {f"{Q}.qzeros": None}),
    "scales of another kind": Refused("gptq-4", r"scales' is I32", {}, {f"{Q}.scales": np.zeros((3, 96), np.int32)}),
    "twice": Refused("gptq-4", r"stored both packed and as it is", {}, {f"{Q}.weight": np.zeros((96, 96), np.float32)}),
    "no scale": Refused("float8-one", r"F8_E4M3 without '.*weight_scale'", {}, {f"{Q}.weight_scale": None}),
    "too few scales": Refused(
        "float8-rows", r"has the scales \(95, 1\), expected \(96, 1\)", {},
        {f"{Q}.weight_scale": np.zeros((95, 1), np.float32)},
    ),
    "other blocks": Refused(
        "float8-blocks", r"has the scales \(1, 2\), expected \(2, 3\)", {"weight_block_size": [64, 64]}
    ),
    "no blocks": Refused("float8-blocks", r"'weight_block_size' should be two sizes", {"weight_block_size": [128]}),
    "not float8": Refused("float8-blocks", r"'fmt' is 'int8'", {"fmt": "int8"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    parts, _ = packed(case.packing)
    tensors = {key: value for key, value in {**parts, **case.tensors}.items() if value is not None}
    settings = {**PACKINGS[case.packing].settings, **case.settings}
    with pytest.raises(ValueError, match=case.problem):
        open_checkpoint(write(tmp_path, tensors, {key: value for key, value in settings.items() if value is not None}))


def test_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    parts, _ = packed("gptq-4")
    wrong = {**parts, f"{Q}.g_idx": np.full(96, -1, np.int32)}
    one = open_checkpoint(write(tmp_path, wrong, PACKINGS["gptq-4"].settings))
    with pytest.raises(ValueError, match=r"q_proj\.g_idx' names groups that are not there; there are 3"):
        one.read(f"{Q}.weight")


def test_scales_for_activations_are_left_out(tmp_path: Path) -> None:
    parts, plain = packed("float8-one")
    settings = {**PACKINGS["float8-one"].settings, "activation_scheme": "static"}
    scales = {name.replace("weight", "input_scale"): np.ones((), np.float32) for name in plain if "_proj" in name}
    assert {
        name: info.shape for name, info in open_checkpoint(write(tmp_path, parts | scales, settings)).tensors.items()
    } == MODEL.shapes


def test_float8_without_settings_is_refused(tmp_path: Path) -> None:
    parts, _ = packed("float8-one")
    with pytest.raises(ValueError, match="weight_scale"):
        load(open_checkpoint(write(tmp_path, parts, None)))
