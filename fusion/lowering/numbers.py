"""Constants of the exponential, and bounds on integers."""

from __future__ import annotations

import math
import struct

from fusion.ir.expr import Expr, Kind

LOG2E = math.log2(math.e)

SIZE_LIMIT = 1 << 25
"""Run-time sizes must stay below this (launchers check), so that small multiples of coordinates fit in 32 bits."""


def in_float32(value: float) -> float:
    """The number of float32 that is nearest."""
    return struct.unpack("f", struct.pack("f", value))[0]


def magnitude(expr: Expr) -> float:
    """A bound on the absolute value of an INT expression for sizes below SIZE_LIMIT; infinite where nothing is
    known."""
    if expr.op == "const":
        return abs(expr.value)
    if expr.op in ("coord", "size"):
        return float(SIZE_LIMIT)
    if expr.op == "load":
        return math.inf
    if expr.op == "bool_to_int":
        return 1.0
    if expr.op == "hash":
        return 2.0**31 - 1
    parts = [magnitude(arg) for arg in expr.args if arg.kind is Kind.INT]
    if expr.op == "add":
        return sum(parts)
    if expr.op == "mul":
        return math.prod(parts)
    if expr.op == "mod":
        return parts[1]
    if expr.op == "floordiv":
        return parts[0]
    return max(parts, default=math.inf)
