"""Weights in small integers, as GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978) checkpoints pack them.

A matrix [I, O] in groups of I is ``NAME.qweight``, ``NAME.qzeros`` and ``NAME.scales`` [groups, O]; element (i, o) is
``(q - zero) * scale`` with the zero and scale of i's group.  Words of 32 bits hold 32 / bits integers:

* GPTQ packs q along I, lowest bits first, and zeros along O, less one (but not in the format ``gptq_v2``);
  ``NAME.g_idx`` [I] says which group each i belongs to.
* AWQ packs both along O in an order of its own, and has no ``g_idx``: groups follow one another.

Both are read as ``NAME.weight`` [O, I].  Products of a float16 and so small an integer are exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diptych.jax_model.families import Foreign
from diptych.jax_model.readers import TensorInfo
from diptych.jax_model.readers.tensor_parts import Packed, Raw, steps

__all__ = ["unpack_awq", "unpack_gptq"]

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word belong to, lowest bits first
_SCALES = ("F16", "BF16", "F32")

# What configurations say of how a model was quantised, of kernels and of other software: no number depends on it.
_IDLE = {
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "desc_act", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "lm_head",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "modules_to_not_convert",
    "mse", "pad_token_id", "quant_method", "quantizer", "static_groups", "sym", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "version",
}  # fmt: skip


@dataclass(frozen=True)
class _Layout:
    """``order`` [32 / bits] is the column of each field of a word; ``offset`` is added to zeros."""

    bits: int
    order: tuple[int, ...]
    offset: int
    along: Literal["inputs", "outputs"]  # what a word of q holds several of

    @property
    def per_word(self) -> int:
        return _WORD // self.bits


def unpack_gptq(settings: Foreign, stored: Mapping[str, TensorInfo]) -> dict[str, Packed]:
    """Every matrix of a GPTQ checkpoint. Raises ValueError."""
    _refuse_unknown(
        settings, {"bits", "group_size", "checkpoint_format", "format", "dynamic", "pack_dtype", "is_marlin_format"}
    )
    for key in ("checkpoint_format", "format"):
        settings.expect(key, "gptq", "gptq_v2")
    settings.expect("dynamic", {})
    settings.expect("is_marlin_format", False)
    settings.expect("pack_dtype", "int32")
    settings.expect("bits", 2, 4, 8)
    bits = settings.need("bits", int)
    second = "gptq_v2" in (settings.find("checkpoint_format"), settings.find("format"))
    layout = _Layout(bits, tuple(range(_WORD // bits)), 0 if second else 1, "inputs")
    return _unpack(settings, stored, layout)


def unpack_awq(settings: Foreign, stored: Mapping[str, TensorInfo]) -> dict[str, Packed]:
    """Every matrix of an AWQ checkpoint. Raises ValueError."""
    _refuse_unknown(settings, {"bits", "w_bit", "group_size", "q_group_size", "zero_point"})
    for key, allowed in (("bits", 4), ("w_bit", 4), ("version", "gemm"), ("zero_point", True)):
        settings.expect(key, *{allowed, allowed.upper()} if isinstance(allowed, str) else (allowed,))
    return _unpack(settings, stored, _Layout(4, _AWQ_ORDER, 0, "outputs"))


def _refuse_unknown(settings: Foreign, read: set[str]) -> None:
    if unknown := sorted(settings.keys() - read - _IDLE):
        raise ValueError(f"{settings.origin}: {unknown[0]!r} in 'quantization_config' is not known here")


def _unpack(settings: Foreign, stored: Mapping[str, TensorInfo], layout: _Layout) -> dict[str, Packed]:
    names = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    if not names:
        raise ValueError(f"{settings.origin}: says that weights are quantised, but no tensor is named '….qweight'")
    size = settings.find("group_size", int) or settings.find("q_group_size", int) or -1
    return {f"{name}.weight": _tensor(name, stored, layout, size, settings.origin) for name in names}


def _tensor(name: str, stored: Mapping[str, TensorInfo], layout: _Layout, group: int, origin: str) -> Packed:
    qweight, qzeros, scales, g_idx = (f"{name}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    for part in (qzeros, scales):
        if part not in stored:
            raise ValueError(f"{origin}: there is {qweight!r} but no {part!r}")
    rows, columns = _matrix(qweight, stored[qweight], origin)
    per = layout.per_word
    inputs, outputs = (rows * per, columns) if layout.along == "inputs" else (rows, columns * per)
    size = inputs if group == -1 else group
    groups = -(-inputs // size)
    has_index = layout.along == "inputs" and g_idx in stored
    expected = {
        qzeros: ((groups, -(-outputs // per)), ("I32",)),
        scales: ((groups, outputs), _SCALES),
        qweight: ((rows, columns), ("I32",)),
        **({g_idx: ((inputs,), ("I32", "I64"))} if has_index else {}),
    }
    for part, (shape, dtypes) in expected.items():
        if stored[part].shape != shape or stored[part].dtype not in dtypes:
            found = stored[part]
            raise ValueError(
                f"{origin}: {part!r} is {found.dtype} {found.shape}, expected {dtypes[0]} {shape} for {layout.bits} "
                f"bits in groups of {size}"
            )

    def read(raw: Raw, rows: slice) -> NDArray[np.float32]:
        index = np.asarray(raw(g_idx), np.int64) if has_index else np.arange(inputs) // size
        if index.min() < 0 or index.max() >= groups:
            raise ValueError(f"{origin}: {g_idx!r} names groups that are not there; there are {groups}")
        zeros = integers(raw(qzeros), layout.bits, layout.order)[:, :outputs] + layout.offset
        factors, words = np.asarray(raw(scales), np.float32), raw(qweight)
        out = np.empty((len(range(*rows.indices(outputs))), inputs), np.float32)
        for here, there in steps(rows, (outputs, inputs)):
            codes = _codes(words, here, layout)
            out[there] = (codes - zeros[index, here].T) * factors[index, here].T
        return out

    return Packed(TensorInfo((outputs, inputs), f"INT{layout.bits}"), tuple(expected), read)


def _matrix(name: str, info: TensorInfo, origin: str) -> tuple[int, int]:
    if len(info.shape) != 2:
        raise ValueError(f"{origin}: {name!r} should be a matrix, found the shape {info.shape}")
    return info.shape[0], info.shape[1]


def _codes(words: NDArray[Any], outputs: slice, layout: _Layout) -> NDArray[np.int32]:
    """The integers of some outputs [o, I]."""
    if layout.along == "inputs":
        return integers(words[:, outputs].T, layout.bits, layout.order)
    per = layout.per_word
    low = outputs.start // per
    wide = integers(words[:, low : -(-outputs.stop // per)], layout.bits, layout.order)
    return wide[:, outputs.start - low * per : outputs.stop - low * per].T


def integers(words: NDArray[Any], bits: int, order: Sequence[int]) -> NDArray[np.int32]:
    """[R, W] words of 32 bits as [R, W * 32 / bits] integers; ``order`` [32 / bits] is the column of each field."""
    shifts = np.empty(len(order), np.uint32)
    shifts[list(order)] = np.arange(len(order), dtype=np.uint32) * np.uint32(bits)
    fields = words.astype(np.int32).view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return fields.reshape(len(words), -1).astype(np.int32)
