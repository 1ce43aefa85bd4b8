"""From the bits of a float8 to float32, exactly: subnormal numbers, infinities and NaN included.

Both formats are the upper bits of a float16 whose conversion processors have: those of e5m2 as they are, those of
e4m3fn with an exponent that is smaller by 8.
"""

from __future__ import annotations

from fusion.codegen.mlir.builder import Builder, Value

FORMATS = ("float8_e4m3fn", "float8_e5m2")


def widen_float8(b: Builder, bits: Value, dtype: str) -> Value:
    """bits: i8, or a vector of them, which hold numbers of this format of FORMATS."""
    wide = b.convert("arith.extui", bits, "i16", "bits")
    if dtype == "float8_e5m2":
        return _from_half(b, b.binary("arith.shli", wide, 8))
    sign = b.binary("arith.shli", b.binary("arith.andi", wide, 0x80), 8)
    magnitude = b.binary("arith.andi", wide, 0x7F)
    half = b.binary("arith.ori", b.binary("arith.shli", magnitude, 7), sign)
    number = b.mul(_from_half(b, half), 256.0, "x")
    return b.select(b.compare("eq", magnitude, 0x7F), float("nan"), number, "x")


def _from_half(b: Builder, bits: Value) -> Value:
    lanes = bits.type.replace("i16", "f16")
    return b.convert("arith.extf", b.bitcast(bits, lanes), "f32", "x")
