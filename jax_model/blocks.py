"""Matrices stored in blocks of small integers, as GGUF files and integer kernels hold them.

A matrix that is applied as ``x @ w`` with w [in, out] lies output-first: each output's inputs are cut into blocks, and
a block has one scale, and one zero point or one shift where its values are not centred::

    w[i, o] = scale[o, i // block] * (q[o, i] - zero[o, i // block]) + shift[i // block, o] / block

The zero point is an integer, ``2 ** (bits - 1)`` where none is stored; the shift is a real number, 0 where none is
stored.  This is the form of ONNX Runtime's ``MatMulNBits``, plus the shift, which multiplies the mean of a block of
inputs.  Every format of GGUF that has a scale per block goes into it with nothing lost: its integers fit in 2, 4 or 8
bits, and its minimum, which is a real number, becomes the shift.  (Blocks are powers of two, so the division is exact.)
What we quantise ourselves takes zero points: they cost four bits a block and no node, a shift 32 bits and three nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from numpy.typing import NDArray

__all__ = ["FORMATS", "Blocks", "concatenate", "dequantize", "from_gguf", "pack", "unpack"]

Leaf: TypeAlias = Any  # a JAX or NumPy array, or the shape of one
_U8 = NDArray[Any]  # uint8, which NumPy's types turn into signed integers at every step
_F32 = NDArray[Any]  # float32


@struct.dataclass
class Blocks:
    """A matrix of ``outputs`` rows over ``inputs`` columns in blocks; a pytree whose leaves are its arrays.

    ``packed`` uint8 [out, in / block, block * bits / 8], the first integer of a byte in its low bits; ``scale`` float32
    [out, in / block]; ``shift`` float32 [in / block, out] or None; ``zero`` uint8 [out, bytes of a row of zero points],
    packed like the integers and padded to a whole byte, or None.
    """

    packed: Leaf
    scale: Leaf
    shift: Leaf | None
    bits: int = struct.field(pytree_node=False)  # type: ignore[no-untyped-call]
    block: int = struct.field(pytree_node=False)  # type: ignore[no-untyped-call]
    zero: Leaf | None = None

    @property
    def outputs(self) -> int:
        return int(self.packed.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.packed.shape[1]) * self.block


def pack(q: _U8, bits: int, block: int) -> _U8:
    """Integers [out, in] below ``2 ** bits`` into bytes [out, in / block, block * bits / 8].

    Inverse of :func:`unpack`.
    """
    per_byte = 8 // bits
    digits = q.reshape(*q.shape[:-1], -1, per_byte)
    packed = digits[..., 0].copy()
    for i in range(1, per_byte):
        packed |= digits[..., i] << np.uint8(bits * i)
    return packed.reshape(q.shape[0], -1, block // per_byte)


def unpack(packed: Array, bits: int) -> Array:
    """Bytes [out, blocks, bytes] into integers [out, blocks, block], uint8."""
    if bits == 8:
        return packed
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    digits: Array = (packed[..., None] >> shifts) & jnp.uint8((1 << bits) - 1)
    return digits.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def dequantize(packed: Array, scale: Array, shift: Array | None, zero: Array | None, *, bits: int) -> Array:
    """The matrix that the blocks mean, float32 [out, in]."""
    middle: Any = jnp.float32(1 << (bits - 1))
    if zero is not None:
        points = unpack(zero[:, None, :], bits)[:, 0, : packed.shape[1]]
        middle = points.astype(jnp.float32)[..., None]
    centred = unpack(packed, bits).astype(jnp.float32) - middle
    values: Array = centred * scale[..., None]
    if shift is not None:
        values = values + (shift.T / jnp.float32(packed.shape[-1] * 8 // bits))[..., None]
    return values.reshape(packed.shape[0], -1)


# --------------------------------------------------------------------------------------------------------------- GGUF


@dataclass(frozen=True)
class Format:
    """A block format of GGUF: bytes of a stored block and how many values it holds; what ``read`` makes of them.

    ``read`` takes bytes [n, size] and returns integers [n, values], scales and minima [n, values / block], so that a
    value is ``scale * (q - zero) + minimum``; ``bits``, ``block`` and ``shifted`` are of the form that carries it.
    """

    size: int
    values: int
    bits: int
    block: int
    zero: int
    shifted: bool
    read: Callable[[_U8], tuple[_U8, _F32, _F32 | None]]


def _half(raw: _U8) -> _F32:
    """Bytes [n, 2 k] as k float16 numbers each."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: _U8) -> _U8:
    """Bytes [n, b] as integers [n, 2 b]: all low halves, then all high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: _U8) -> _U8:
    """Four bytes as 32 bits, each worth 16."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _q4_0(raw: _U8) -> tuple[_U8, _F32, None]:
    return _nibbles(raw[:, 2:]), _half(raw[:, :2]), None


def _q4_1(raw: _U8) -> tuple[_U8, _F32, _F32]:
    return _nibbles(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: _U8) -> tuple[_U8, _F32, None]:
    return _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), _half(raw[:, :2]), None


def _q5_1(raw: _U8) -> tuple[_U8, _F32, _F32]:
    return _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: _U8) -> tuple[_U8, _F32, None]:
    return raw[:, 2:] ^ 128, _half(raw[:, :2]), None  # from two's complement to an offset of 128


def _quarters(raw: _U8) -> _U8:
    """Bytes [n, 32 k] as two-bit integers [n, 128 k]: for each 32 bytes their lowest bits first."""
    grouped = raw.reshape(len(raw), -1, 1, 32)
    return ((grouped >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(len(raw), -1)


def _q2_k(raw: _U8) -> tuple[_U8, _F32, _F32]:
    scales, factors = raw[:, :16], _half(raw[:, 80:84])
    return _quarters(raw[:, 16:80]), factors[:, :1] * (scales & 15), -(factors[:, 1:] * (scales >> 4))


def _q3_k(raw: _U8) -> tuple[_U8, _F32, None]:
    mask = np.unpackbits(raw[:, :32].reshape(len(raw), 32, 1), axis=-1, bitorder="little").transpose(0, 2, 1)
    q = _quarters(raw[:, 32:96]) | (mask.reshape(len(raw), 256) << 2)
    low = _nibbles(raw[:, 96:104])  # four bits of each of 16 scales, two more bits in the last four bytes
    high = ((raw[:, 104:108].reshape(len(raw), 1, 4) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(-1, 16)
    scales = (low | (high << 4)).astype(np.int8) - 32
    return q, _half(raw[:, 108:110]) * scales, None


def _six_bit_pairs(raw: _U8) -> tuple[_U8, _U8]:
    """Twelve bytes as eight six-bit scales and eight six-bit minima."""
    first, second, mixed = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (mixed >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minima


def _halves(raw: _U8) -> _U8:
    """Bytes [n, 128] as integers [n, 256]: for each 32 bytes their low halves, then their high ones."""
    return _nibbles(raw.reshape(-1, 32)).reshape(len(raw), -1)


def _q4_k(raw: _U8) -> tuple[_U8, _F32, _F32]:
    factors, (scales, minima) = _half(raw[:, :4]), _six_bit_pairs(raw[:, 4:16])
    return _halves(raw[:, 16:]), factors[:, :1] * scales, -(factors[:, 1:] * minima)


def _q5_k(raw: _U8) -> tuple[_U8, _F32, _F32]:
    factors, (scales, minima) = _half(raw[:, :4]), _six_bit_pairs(raw[:, 4:16])
    fifth = np.unpackbits(raw[:, 16:48].reshape(len(raw), 32, 1), axis=-1, bitorder="little").transpose(0, 2, 1)
    q = _halves(raw[:, 48:]) | (fifth.reshape(len(raw), 256) << 4)
    return q, factors[:, :1] * scales, -(factors[:, 1:] * minima)


def _q6_k(raw: _U8) -> tuple[_U8, _F32, None]:
    low = _nibbles(raw[:, :128].reshape(len(raw), 2, 64)).reshape(len(raw), 256)
    high = _quarters(raw[:, 128:192]) << 4
    scales = raw[:, 192:208].view(np.int8).astype(np.float32)
    return low | high, _half(raw[:, 208:210]) * scales, None


FORMATS = {
    "Q2_K": Format(84, 256, 2, 16, 0, True, _q2_k),
    "Q3_K": Format(110, 256, 4, 16, 4, False, _q3_k),
    "Q4_0": Format(18, 32, 4, 32, 8, False, _q4_0),
    "Q4_1": Format(20, 32, 4, 32, 0, True, _q4_1),
    "Q4_K": Format(144, 256, 4, 32, 0, True, _q4_k),
    "Q5_0": Format(22, 32, 8, 32, 16, False, _q5_0),
    "Q5_1": Format(24, 32, 8, 32, 0, True, _q5_1),
    "Q5_K": Format(176, 256, 8, 32, 0, True, _q5_k),
    "Q6_K": Format(210, 256, 8, 16, 32, False, _q6_k),
    "Q8_0": Format(34, 32, 8, 32, 128, False, _q8_0),
}


def from_gguf(raw: _U8, name: str) -> Blocks:
    """Blocks out of a tensor's bytes [out, bytes of a row] in one of :data:`FORMATS`, as NumPy arrays.

    Integers keep their distance from the format's zero; one that has a minimum has its zero moved to the middle of its
    range, which the shift takes back.
    """
    form = FORMATS[name]
    rows = len(raw)
    q, scale, minimum = form.read(raw.reshape(-1, form.size))
    middle = 1 << (form.bits - 1)
    scale = scale.astype(np.float32).reshape(rows, -1)
    shift = None
    if minimum is None:
        q = q + np.uint8(middle - form.zero)
    else:
        centre = {2: 2, 4: 8, 8: 16}[form.bits]  # five-bit integers in eight bits are centred too
        q = q + np.uint8(middle - centre)
        shift = ((minimum.reshape(rows, -1) + np.float32(centre) * scale) * np.float32(form.block)).T
    return Blocks(pack(q.reshape(rows, -1), form.bits, form.block), scale, shift, form.bits, form.block)


def concatenate(parts: list[Blocks]) -> Blocks:
    """Several matrices over the same inputs as one; of the same bits and block, none with zero points.

    Centred ones get a shift of zero.
    """
    shifted = any(part.shift is not None for part in parts)

    def joined(values: list[Any], axis: int) -> Any:
        return np.concatenate(values, axis=axis)

    shifts = [np.zeros_like(part.scale.T) if part.shift is None else part.shift for part in parts]
    return Blocks(
        joined([part.packed for part in parts], 0),
        joined([part.scale for part in parts], 0),
        joined(shifts, 1) if shifted else None,
        parts[0].bits,
        parts[0].block,
    )


def abstract(outputs: int, inputs: int, bits: int, block: int, *, shifted: bool, zero_points: bool = False) -> Blocks:
    """The shapes of a matrix in blocks, for tracing."""
    blocks = inputs // block
    packed, scale, shift, zero = (
        jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        for shape, dtype in (
            ((outputs, blocks, block * bits // 8), jnp.uint8),
            ((outputs, blocks), jnp.float32),
            ((blocks, outputs), jnp.float32),
            ((outputs, -(-blocks * bits // 8)), jnp.uint8),
        )
    )
    return Blocks(packed, scale, shift if shifted else None, bits, block, zero if zero_points else None)
