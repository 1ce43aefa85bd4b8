"""From the bits of a float8 to float32, exactly: subnormal numbers, infinities and NaN included.

Both formats are the upper bits of a float16 whose conversion processors have: those of e5m2 as they are, those of
e4m3fn with an exponent that is smaller by 8.
"""

from __future__ import annotations

from .builder import Builder, Value

FORMATS = ("float8_e4m3fn", "float8_e5m2")


def widen_float8(b: Builder, bits: Value, dtype: str) -> Value:
    """bits: i8, or a vector of them, which hold numbers of this format of FORMATS."""
    if dtype == "float8_e5m2":
        return _from_half(b, b.binary("arith.shli", b.convert("arith.extui", bits, "i16", "bits"), 8))
    # A copy of the sign lands on the exponent's upper bit, which these numbers do not have.
    half = b.binary("arith.shli", b.convert("arith.extsi", bits, "i16", "bits"), 7)
    number = b.mul(_from_half(b, b.and_(half, ~0x4000)), 256.0, "x")
    nan = b.compare("eq", b.and_(bits, 0x7F), 0x7F, "nan")
    return b.select(nan, float("nan"), number, "x")


def _from_half(b: Builder, bits: Value) -> Value:
    return b.convert("arith.extf", b.bitcast(bits, bits.type.replace("i16", "f16")), "f32", "x")
