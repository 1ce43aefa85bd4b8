"""The `hash` primitive (`fusion.ir.primitives.hashed`) in 32-bit arithmetic, on vectors or scalars of i32."""

from __future__ import annotations

from fusion.codegen.mlir.builder import Builder, Value
from fusion.ir.primitives import HASH_MULTIPLIERS, HASH_SPREAD


def signed(value: int) -> int:
    """The i32 constant with the bits of an unsigned 32-bit integer."""
    return value - (1 << 32) if value >= 1 << 31 else value


def hash_bits(b: Builder, key: Value, counter: Value) -> Value:
    """hash(key, counter), in [0, 2**31); both i32, of which all 32 bits count."""
    x = b.binary("arith.xori", key, b.mul(counter, signed(HASH_SPREAD)), "mixed")
    for shift, multiplier in HASH_MULTIPLIERS:
        x = b.binary("arith.xori", x, b.binary("arith.shrui", x, shift), "mixed")
        x = b.mul(x, signed(multiplier), "mixed")
    x = b.binary("arith.xori", x, b.binary("arith.shrui", x, 16), "mixed")
    return b.binary("arith.shrui", x, 1, "hash")
