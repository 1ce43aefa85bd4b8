"""Opcodes of arithmetic, comparisons and bits, each as the PTX manual defines it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.program import OPCODES, Maker, Run, list_of, opcode
from tests.ptx.values import DTYPES, PAIRS, flushed, from_bfloat16, quotient, to_bfloat16
from tests.ptx.wave import UNSIGNED, Mask, Wave

_WIDE: dict[Any, Any] = {np.int32: np.int64, np.uint32: np.uint64, np.int16: np.int32, np.uint16: np.uint32}
_COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _elementwise(compute: Callable[..., np.ndarray], dtype: Any = None) -> Maker:
    """Maker of an opcode whose result is a function of its operands. dtype: of the operands, if not the opcode's."""

    def make(parts: list[str], args: list[str], line: str) -> Run:
        operands, ftz, pairs = dtype or DTYPES[parts[-1]], "ftz" in parts, PAIRS.get(parts[-1])
        if parts[-1] in ("bf16", "bf16x2"):
            return _in_bfloat16(compute, operands, args)

        def run(wave: Wave, mask: Mask) -> None:
            values = [wave.get(arg, operands) for arg in args[1:]]
            if pairs:
                values = [np.ascontiguousarray(value).view(pairs) for value in values]
            result = compute(*map(flushed, values)) if ftz else compute(*values)
            result = flushed(result) if ftz else result
            wave.put(args[0], result.view(operands) if pairs else result, mask)

        return run

    return make


def _in_bfloat16(compute: Callable[..., np.ndarray], operands: Any, args: list[str]) -> Run:
    """A result of bfloat16, or of two of them in a register, rounded once."""

    def run(wave: Wave, mask: Mask) -> None:
        values = [np.ascontiguousarray(wave.get(arg, operands)).view(np.uint16) for arg in args[1:]]
        result = to_bfloat16(compute(*(from_bfloat16(value).astype(np.float64) for value in values)))
        wave.put(args[0], result.view(operands), mask)

    return run


def _in_float64(compute: Callable[[np.ndarray], np.ndarray]) -> Maker:
    """Maker of a function that is evaluated in float64 and rounded once."""
    return _elementwise(lambda a: compute(a.astype(np.float64)).astype(a.dtype))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - quotient(a, b).astype(a.dtype) * b) if a.dtype.kind == "i" else a % np.where(b == 0, 1, b)


def _division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    return quotient(a, b).astype(a.dtype) if a.dtype.kind == "i" else a // np.where(b == 0, 1, b)


def _tanh(a: np.ndarray) -> np.ndarray:
    """tanh.approx has a relative error of 2**-11: ten bits of the fraction remain."""
    return (np.tanh(a.astype(np.float64)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64 if a.dtype == np.float32 else np.longdouble) * b + c).astype(a.dtype)


def _insertion(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`length` bits of a, from bit `start` of b on."""
    a, b, start, length = (value.astype(np.int64) for value in (a, b, start, length))
    field = ((1 << length) - 1) << start
    return ((b & ~field) | ((a << start) & field)).astype(np.uint32)


def _permutation(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of a and b; where a digit of the selector is at least 8, copies of the byte's sign."""
    both = np.stack([a, b], 1).view(np.uint8)
    digits = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 0xF
    chosen = np.take_along_axis(both, (digits & 7).astype(np.int64), 1)
    signs = np.where(chosen & 0x80, 0xFF, 0)
    return np.where(digits & 8, signs, chosen).astype(np.uint8).view(np.uint32)[:, 0]


OPCODES |= {
    "add": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "xor": _elementwise(np.bitwise_xor),
    "not": _elementwise(np.invert),
    "rem": _elementwise(_remainder),
    "div": _elementwise(_division),
    "fma": _elementwise(_fma),
    "abs": _elementwise(np.abs),
    "neg": _elementwise(lambda a: 0 - a if a.dtype.kind == "u" else -a),
    "sqrt": _elementwise(np.sqrt),
    "rsqrt": _in_float64(lambda a: 1 / np.sqrt(a)),
    "rcp": _in_float64(lambda a: 1 / a),
    "sin": _in_float64(np.sin),
    "cos": _in_float64(np.cos),
    "lg2": _elementwise(lambda a: np.log2(flushed(a).astype(np.float64)).astype(np.float32)),
    "ex2": _elementwise(lambda a: flushed(np.exp2(a.astype(np.float64)).astype(np.float32))),
    "tanh": _elementwise(_tanh),
    "popc": _elementwise(lambda a: np.array([int(x).bit_count() for x in a], np.uint32)),
    "clz": _elementwise(lambda a: np.array([32 - int(x).bit_length() for x in a], np.uint32), np.uint32),
    "bfi": _elementwise(_insertion, np.uint32),
}


@opcode("prmt")
def _prmt(parts: list[str], args: list[str], line: str) -> Run:
    """Bytes of two registers. Compilers move bytes that nothing has written, and drop them later: here all their bits
    are set, so that a number made of them is NaN."""
    compute = functools.partial(_elementwise(_permutation, np.uint32), parts)
    plain = compute(args, line)

    def run(wave: Wave, mask: Mask) -> None:
        given = [arg if not arg.startswith("%") or arg in wave.registers else "0xFFFFFFFF" for arg in args[1:]]
        (plain if given == args[1:] else compute([args[0], *given], line))(wave, mask)

    return run


@opcode("min", "max")
def _extremum(parts: list[str], args: list[str], line: str) -> Run:
    """The larger or smaller of two operands, on sm_100 also of three. Of a number and NaN it is the number; with `.NaN`
    it is NaN."""
    largest = parts[0] == "max"
    between = (np.maximum if largest else np.minimum) if "NaN" in parts else (np.fmax if largest else np.fmin)

    def compute(*values: np.ndarray) -> np.ndarray:
        result = functools.reduce(between, values)
        if "NaN" in parts:
            return np.where(np.isnan(result), np.float32(np.nan), result)
        return np.maximum(result, 0) if "relu" in parts else result

    return _elementwise(compute)(parts, args, line)


@opcode("shl", "shr")
def _shift(parts: list[str], args: list[str], line: str) -> Run:
    """A shift by the width or more leaves zeros, or copies of the sign."""
    dtype, left = DTYPES[parts[-1]], parts[0] == "shl"
    bits = 8 * np.dtype(dtype).itemsize

    def run(wave: Wave, mask: Mask) -> None:
        a, by = wave.get(args[1], dtype), wave.get(args[2], np.uint32)
        within = np.where(by >= bits, 0, by).astype(dtype)
        beyond = np.zeros_like(a) if left or np.dtype(dtype).kind == "u" else np.where(a < 0, -1, 0).astype(dtype)
        wave.put(args[0], np.where(by >= bits, beyond, a << within if left else a >> within), mask)

    return run


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of a product of 128 bits."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    cross, other = (a >> half) * (b & low), (a & low) * (b >> half)
    carried = ((a & low) * (b & low) >> half) + (cross & low) + (other & low) >> half
    return (a >> half) * (b >> half) + (cross >> half) + (other >> half) + carried


def _signed_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of a product of 128 bits with signs: a negative factor counts 2**64 too many times the other."""
    left, right = a.view(np.uint64), b.view(np.uint64)
    return _high(left, right) - np.where(a < 0, right, 0) - np.where(b < 0, left, 0)


@opcode("mul")
def _mul(parts: list[str], args: list[str], line: str) -> Run:
    dtype = DTYPES[parts[-1]]
    wide = _WIDE.get(dtype)
    if "wide" in parts:
        return _elementwise(lambda a, b: a.astype(wide) * b.astype(wide))(parts, args, line)
    if "hi" in parts and wide is None:
        return _elementwise(_high if dtype is np.uint64 else _signed_high)(parts, args, line)
    if "hi" in parts:
        bits = 8 * np.dtype(dtype).itemsize
        return _elementwise(lambda a, b: (a.astype(wide) * b.astype(wide) >> bits).astype(dtype))(parts, args, line)
    return _elementwise(np.multiply)(parts, args, line)


@opcode("mad", "madc")
def _mad(parts: list[str], args: list[str], line: str) -> Run:
    """A product and a sum; `.cc` keeps the sum's carry, which `madc` adds."""
    dtype = DTYPES[parts[-1]]
    if parts[0] == "madc" or "cc" in parts:
        return _mad_with_carry(parts, args, line)
    assert "hi" not in parts, line
    result = _WIDE[dtype] if "wide" in parts else dtype

    def run(wave: Wave, mask: Mask) -> None:
        a, b = (wave.get(arg, dtype).astype(result) for arg in args[1:3])
        wave.put(args[0], a * b + wave.get(args[3], result), mask)

    return run


def _mad_with_carry(parts: list[str], args: list[str], line: str) -> Run:
    assert parts[-1] == "u32", line

    def run(wave: Wave, mask: Mask) -> None:
        a, b, c = (wave.get(arg, np.uint32).astype(np.uint64) for arg in args[1:4])
        product = a * b
        part = product >> np.uint64(32) if "hi" in parts else product & np.uint64(0xFFFFFFFF)
        total = part + c + (wave.get("%carry", np.uint32) if parts[0] == "madc" else 0)
        wave.put(args[0], total.astype(np.uint32), mask)
        if "cc" in parts:
            wave.put("%carry", (total >> np.uint64(32)).astype(np.uint32), mask)

    return run


@opcode("mov")
def _mov(parts: list[str], args: list[str], line: str) -> Run:
    """A copy, or a register's parts in several, the lowest first, or the reverse. Of a pair of float32 one may be
    unwritten, which is NaN then: its sums and products are not read (sm_100's `f32x2`)."""
    dtype, size = DTYPES[parts[-1]], np.dtype(DTYPES[parts[-1]]).itemsize

    def unpack(wave: Wave, mask: Mask) -> None:
        names = list_of(args[0])
        pieces = wave.get(args[1], dtype).copy().view(UNSIGNED[size // len(names)]).reshape(wave.threads, -1)
        for piece, name in enumerate(names):
            wave.put(name, pieces[:, piece], mask)

    def pack(wave: Wave, mask: Mask) -> None:
        names = list_of(args[1])
        known = [name if size < 8 or name in wave.registers else "0fFFFFFFFF" for name in names]
        pieces = [wave.get(name, UNSIGNED[size // len(names)]) for name in known]
        wave.put(args[0], np.stack(pieces, 1).view(dtype)[:, 0], mask)

    def copy(wave: Wave, mask: Mask) -> None:
        wave.put(args[0], wave.get(args[1], dtype).copy(), mask)

    return unpack if args[0].startswith("{") else pack if args[1].startswith("{") else copy


@opcode("selp")
def _selp(parts: list[str], args: list[str], line: str) -> Run:
    dtype = DTYPES[parts[-1]]

    def run(wave: Wave, mask: Mask) -> None:
        first, second = (wave.get(arg, dtype) for arg in args[1:3])
        wave.put(args[0], np.where(wave.get(args[3], np.bool_), first, second), mask)

    return run


def _compared(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Comparison by PTX's name: with `u` at the end (for floats) also true where an operand is NaN."""
    if a.dtype.kind != "f":
        return _COMPARISONS[how](a, b)
    nan = np.isnan(a) | np.isnan(b)
    if how in ("num", "nan"):
        return nan if how == "nan" else ~nan
    return _COMPARISONS[how](a, b) & ~nan if how in _COMPARISONS else _COMPARISONS[how[:-1]](a, b) | nan


@opcode("setp")
def _setp(parts: list[str], args: list[str], line: str) -> Run:
    dtype, combine = DTYPES[parts[-1]], {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    join = next((combine[part] for part in parts[2:] if part in combine), None)

    def run(wave: Wave, mask: Mask) -> None:
        result = _compared(parts[1], wave.get(args[1], dtype), wave.get(args[2], dtype))
        if join:
            other = wave.get(args[3].lstrip("!"), np.bool_)
            result = join(result, ~other if args[3].startswith("!") else other)
        wave.put(args[0], result, mask)

    return run


@opcode("bfe")
def _bfe(parts: list[str], args: list[str], line: str) -> Run:
    """Extraction of bits; a signed one copies the field's highest bit upwards."""
    dtype = DTYPES[parts[-1]]

    def run(wave: Wave, mask: Mask) -> None:
        a, start, length = (wave.get(arg, np.uint32).astype(np.int64) for arg in args[1:4])
        value = (a >> start) & ((1 << length) - 1)
        if dtype is np.int32:
            negative = (length > 0) & (value >> np.maximum(length - 1, 0) & 1 == 1)
            value = np.where(negative, value - (1 << length), value)
        wave.put(args[0], value.astype(np.int32), mask)

    return run


@opcode("shf")
def _shf(parts: list[str], args: list[str], line: str) -> Run:
    """The high word of a pair that is shifted left, or the low word of one that is shifted right."""

    def compute(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        by = (by & 31 if "wrap" in parts else np.minimum(by, 32)).astype(np.uint64)
        pair = (high.astype(np.uint64) << np.uint64(32)) | low
        return ((pair << by) >> np.uint64(32) if "l" in parts else pair >> by).astype(np.uint32)

    return _elementwise(compute, np.uint32)(parts, args, line)


@opcode("lop3")
def _lop3(parts: list[str], args: list[str], line: str) -> Run:
    """Any function of three bits, by its table."""
    table = int(args[4].rstrip("U"), 0)

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return _elementwise(compute, np.uint32)(parts, args[:4], line)
