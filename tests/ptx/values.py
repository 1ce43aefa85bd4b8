"""Numbers of PTX in numpy: types, bfloat16, flushed denormals, division of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "bf16": np.uint16, "bf16x2": np.uint32, "f32": np.float32, "f64": np.float64, "pred": np.bool_,
    "f32x2": np.uint64, "f16x2": np.uint32,
}  # fmt: skip
"""By PTX's names; numpy has no bfloat16, whose bits are integers here, as are those of pairs."""
PAIRS: dict[str, Any] = {"f32x2": np.float32, "f16x2": np.float16}
LEAST_NORMAL = np.float32(2.0**-126)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, the even one of two."""
    single = x.astype(np.float32)
    bits = np.ascontiguousarray(single).view(np.uint32)
    if x.dtype == np.float64:  # towards zero, and odd where it is not exact: then the second rounding is the only one
        bits = bits - (np.abs(single) > np.abs(x)) | (single != x)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def flushed(x: np.ndarray) -> np.ndarray:
    """Values with zeros in the place of denormals."""
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient of integers, towards zero."""
    a, b = a.astype(np.int64), b.astype(np.int64)
    divisor = np.where(b == 0, 1, b)
    return np.sign(a) * np.sign(divisor) * (np.abs(a) // np.abs(divisor))
