"""Conversions between numbers (cvt)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.ptx.program import Run, opcode
from tests.ptx.values import DTYPES, flushed, from_bfloat16, to_bfloat16
from tests.ptx.wave import Mask, Wave

_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOAT8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def _narrow(x: np.ndarray, to: str) -> np.ndarray:
    return to_bfloat16(x) if to.startswith("bf16") else x.astype(np.float16).view(np.uint16)


def _to_integers(x: np.ndarray, dtype: Any, rounding: Any) -> np.ndarray:
    """Rounded to integers, those out of range to the nearest end; NaN to 0."""
    limits, x = np.iinfo(dtype), rounding(x.astype(np.float64))
    whole = np.clip(np.where(np.isnan(x), 0, x), -(2.0**62), 2.0**62).astype(np.int64)
    low = np.where(x <= float(limits.min), limits.min, whole.astype(dtype))
    return np.where(x >= float(limits.max), limits.max, low).astype(dtype)


@opcode("cvt")
def _cvt(parts: list[str], args: list[str], line: str) -> Run:
    to, source = parts[-2:]
    rounding = next((_ROUNDINGS[part] for part in parts if part in _ROUNDINGS), None)

    def pair(wave: Wave, mask: Mask) -> None:
        high, low = (_narrow(wave.get(arg, np.float32), to) for arg in args[1:3])
        wave.put(args[0], (high.astype(np.uint32) << 16) | low, mask)

    def widened(wave: Wave, mask: Mask) -> None:
        both = np.ascontiguousarray(wave.get(args[1], np.uint16)).view(np.uint8).copy()
        wide = torch.from_numpy(both).view(_FLOAT8[source]).to(torch.float16).numpy().view(np.uint16).reshape(-1, 2)
        wave.put(args[0], wide[:, 0].astype(np.uint32) | (wide[:, 1].astype(np.uint32) << 16), mask)

    def to_tf32(wave: Wave, mask: Mask) -> None:  # to the nearest, ties away from zero
        wave.put(args[0], (wave.get(args[1], np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000), mask)

    def plain(wave: Wave, mask: Mask) -> None:
        value, dtype = wave.get(args[1], DTYPES[source]), DTYPES[to]
        value = from_bfloat16(value) if source == "bf16" else value
        value = flushed(value) if "ftz" in parts and value.dtype == np.float32 else value
        if to == "bf16":
            value = to_bfloat16(value.astype(np.float32))
        elif value.dtype.kind == "f" and np.dtype(dtype).kind in "iu":
            value = _to_integers(value, dtype, rounding)
        else:
            value = (value if rounding is None else rounding(value)).astype(dtype)
        wave.put(args[0], value, mask)

    if to in ("bf16x2", "f16x2") and source == "f32":
        return pair
    if source in _FLOAT8:
        return widened
    return to_tf32 if to == "tf32" else plain
