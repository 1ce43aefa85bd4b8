"""Values of MLIR text and their types."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion.ir.integers import in_64_bits

if TYPE_CHECKING:
    from .builder import Builder

PTR = "!llvm.ptr"
TILE = "!llvm.x86_amx"

#: bytes of one element of a scalar type
SIZE = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 1}


@dataclass(frozen=True, slots=True)
class Value:
    """An SSA value: its name (with the percent sign) and its type as MLIR writes it."""

    name: str
    type: str

    def __str__(self) -> str:
        return self.name


Operand = Value | int | float


def vector_of(scalar: str, lanes: int) -> str:
    """The vector type of `lanes` elements; the scalar type itself for 0."""
    return f"vector<{lanes}x{scalar}>" if lanes else scalar


def shape_of(type_: str) -> tuple[int, str]:
    """(lanes, scalar type); 0 lanes for a scalar."""
    if not type_.startswith("vector<"):
        return 0, type_
    lanes, scalar = type_[7:-1].split("x", 1)
    return int(lanes), scalar


def is_float(type_: str) -> bool:
    return shape_of(type_)[1] in ("f64", "f32", "f16", "bf16")


def literal(value: float, scalar: str) -> str:
    """A constant as MLIR reads it back exactly: numbers that are not finite by their bits."""
    if scalar == "i1":
        return "true" if value else "false"
    if scalar.startswith("i"):
        return str(in_64_bits(int(value)))
    if value != value or value in (float("inf"), float("-inf")):
        if scalar == "bf16":
            return literal(value, "f32")[: len("0x7F80")]
        packed, bits, digits = {"f64": ("d", "Q", 16), "f32": ("f", "I", 8), "f16": ("e", "H", 4)}[scalar]
        return f"0x{struct.unpack(f'<{bits}', struct.pack(f'<{packed}', value))[0]:0{digits}X}"
    return f"{value:.17e}" if scalar == "f64" else f"{value:.9e}"


_NAME = re.compile(r"%\w+")


def interleave(streams: list[list[str]]) -> list[str]:
    """Lines that do not depend on each other, put side by side: a line of each stream in turns, where it uses no value
    that is still to come. Streams with regions follow each other."""
    if any(line.endswith("{") for lines in streams for line in lines):
        return [line for lines in streams for line in lines]
    waiting = {_NAME.findall(line)[0] for lines in streams for line in lines if " = " in line}
    rest, merged = [list(reversed(lines)) for lines in streams], []
    while any(rest):
        for lines in rest:
            if not lines:
                continue
            names = _NAME.findall(lines[-1])
            defined = names[:1] if " = " in lines[-1] else []
            if waiting.isdisjoint(names[len(defined) :]):
                waiting.difference_update(defined)
                merged.append(lines.pop())
    return merged


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Array:
    """Memory of equal parts, one behind the other: `array[n]` is the address of one. size: its elements of a scalar
    type, bytes by default."""

    b: Builder
    first: Value
    size: Operand
    scalar: str = "i8"

    def __getitem__(self, number: Operand) -> Value:
        return self.b.row(self.first, number, self.size, self.scalar)

    def behind(self, number: Operand) -> Array:
        """Those from a number on."""
        return replace(self, first=self[number])
