"""Opcodes of arithmetic, comparisons and bits, each as the PTX manual defines it."""

from __future__ import annotations

import numpy as np

from tests.ptx.block import UNSIGNED
from tests.ptx.program import OPCODES, list_of, opcode
from tests.ptx.values import DTYPES, flushed, quotient


def _binary(compute, needs=None):
    def make(parts, args, line):
        dt = DTYPES[parts[-1]]
        ftz = "ftz" in parts

        def run(block, mask):
            a, b = block.get(args[1], dt), block.get(args[2], dt)
            if ftz:
                a, b = flushed(a), flushed(b)
            out = compute(a, b, parts)
            block.put(args[0], flushed(out) if ftz else out, mask)

        return run

    return make


def _unary(compute):
    def make(parts, args, line):
        dt = DTYPES[parts[-1]]
        ftz = "ftz" in parts

        def run(block, mask):
            a = block.get(args[1], dt)
            out = compute(flushed(a) if ftz else a, parts)
            block.put(args[0], flushed(out) if ftz else out, mask)

        return run

    return make


def _shift(left):
    def make(parts, args, line):
        dt = DTYPES[parts[-1]]
        bits = 8 * np.dtype(dt).itemsize

        def run(block, mask):
            a, n = block.get(args[1], dt), np.minimum(block.get(args[2], np.uint32), bits).astype(dt)
            big = n >= bits
            safe = np.where(big, 0, n).astype(dt)
            out = a << safe if left else a >> safe
            fill = np.zeros_like(a) if left or np.dtype(dt).kind == "u" else np.where(a < 0, -1, 0).astype(dt)
            block.put(args[0], np.where(big, fill, out), mask)

        return run

    return make


def _extremum(largest):
    def compute(a, b, parts):
        if a.dtype.kind == "f":
            nan = np.isnan(a) | np.isnan(b)
            pick = (np.fmax if largest else np.fmin)(a, b)
            return np.where(nan, np.float32(np.nan), pick) if "NaN" in parts else pick
        out = np.maximum(a, b) if largest else np.minimum(a, b)
        return np.maximum(out, 0) if "relu" in parts else out

    return compute


COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


OPCODES["add"] = _binary(lambda a, b, p: a + b)
OPCODES["sub"] = _binary(lambda a, b, p: a - b)
OPCODES["and"] = _binary(lambda a, b, p: a & b)
OPCODES["or"] = _binary(lambda a, b, p: a | b)
OPCODES["xor"] = _binary(lambda a, b, p: a ^ b)
OPCODES["max"] = _binary(_extremum(True))
OPCODES["min"] = _binary(_extremum(False))
OPCODES["rem"] = _binary(
    lambda a, b, p: (a - quotient(a, b).astype(a.dtype) * b) if a.dtype.kind == "i" else a % np.where(b == 0, 1, b)
)
OPCODES["shl"] = _shift(True)
OPCODES["shr"] = _shift(False)
OPCODES["abs"] = _unary(lambda a, p: np.abs(a))
OPCODES["neg"] = _unary(lambda a, p: -a if a.dtype.kind != "u" else (0 - a))
OPCODES["not"] = _unary(lambda a, p: ~a)
OPCODES["sqrt"] = _unary(lambda a, p: np.sqrt(a))
OPCODES["rsqrt"] = _unary(lambda a, p: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32))
OPCODES["rcp"] = _unary(lambda a, p: (1 / a.astype(np.float64)).astype(a.dtype))
OPCODES["lg2"] = _unary(lambda a, p: np.log2(flushed(a).astype(np.float64)).astype(np.float32))
OPCODES["sin"] = _unary(lambda a, p: np.sin(a.astype(np.float64)).astype(np.float32))
OPCODES["cos"] = _unary(lambda a, p: np.cos(a.astype(np.float64)).astype(np.float32))


@opcode("ex2")
def _ex2(parts, args, line):
    def compute(a, p):
        return flushed(np.exp2(a.astype(np.float64)).astype(np.float32))

    return _unary(compute)(parts, args, line)


@opcode("tanh")
def _tanh(parts, args, line):
    def compute(a, p):  # 2**-11 of relative error: cut off after 11 bits
        out = np.tanh(a.astype(np.float64)).astype(np.float32)
        return (out.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    return _unary(compute)(parts, args, line)


@opcode("popc")
def _popc(parts, args, line):
    def run(block, mask):
        a = block.get(args[1], DTYPES[parts[-1]])
        block.put(args[0], np.array([bin(int(x)).count("1") for x in a], np.uint32), mask)

    return run


@opcode("clz")
def _clz(parts, args, line):
    def run(block, mask):
        a = block.get(args[1], np.uint32)
        block.put(args[0], np.array([32 - int(x).bit_length() for x in a], np.uint32), mask)

    return run


@opcode("div")
def _div(parts, args, line):
    def compute(a, b, p):
        if a.dtype.kind == "f":
            return a / b
        if a.dtype.kind == "i":
            return quotient(a, b).astype(a.dtype)
        return a // np.where(b == 0, 1, b)

    return _binary(compute)(parts, args, line)


@opcode("mul")
def _mul(parts, args, line):
    dt = DTYPES[parts[-1]]
    if "wide" in parts:
        wide = {np.int32: np.int64, np.uint32: np.uint64, np.int16: np.int32, np.uint16: np.uint32}[dt]
        return lambda block, mask: block.put(
            args[0], block.get(args[1], dt).astype(wide) * block.get(args[2], dt).astype(wide), mask
        )
    if "hi" in parts:
        wide = {np.int32: np.int64, np.uint32: np.uint64}[dt]
        return lambda block, mask: block.put(
            args[0],
            ((block.get(args[1], dt).astype(wide) * block.get(args[2], dt).astype(wide)) >> 32).astype(np.uint32),
            mask,
        )
    return _binary(lambda a, b, p: a * b)(parts, args, line)


@opcode("mad")
def _mad(parts, args, line):
    dt = DTYPES[parts[-1]]
    if "wide" in parts:
        wide = {np.int32: np.int64, np.uint32: np.uint64}[dt]
        return lambda block, mask: block.put(
            args[0],
            block.get(args[1], dt).astype(wide) * block.get(args[2], dt).astype(wide) + block.get(args[3], wide),
            mask,
        )
    return lambda block, mask: block.put(
        args[0], block.get(args[1], dt) * block.get(args[2], dt) + block.get(args[3], dt), mask
    )


@opcode("fma")
def _fma(parts, args, line):
    dt = DTYPES[parts[-1]]
    ftz = "ftz" in parts

    def run(block, mask):
        a, b, c = (block.get(x, dt) for x in args[1:])
        if dt is np.float32:
            if ftz:
                a, b, c = flushed(a), flushed(b), flushed(c)
            out = (a.astype(np.float64) * b + c).astype(np.float32)
            out = flushed(out) if ftz else out
        else:
            out = (a.astype(np.longdouble) * b + c).astype(dt)
        block.put(args[0], out, mask)

    return run


@opcode("mov")
def _mov(parts, args, line):
    dt = DTYPES[parts[-1]]
    if args[0].startswith("{"):
        names = list_of(args[0])

        def unpack(block, mask):
            a = block.get(args[1], dt)
            width = 8 * np.dtype(dt).itemsize // len(names)
            for k, name in enumerate(names):
                block.put(name, ((a >> dt(width * k)) & dt((1 << width) - 1)).astype(UNSIGNED[width // 8]), mask)

        return unpack
    if args[1].startswith("{"):
        names = list_of(args[1])
        width = 8 * np.dtype(dt).itemsize // len(names)

        def pack(block, mask):
            out = np.zeros(block.threads, dt)
            for k, name in enumerate(names):
                out |= block.get(name, UNSIGNED[width // 8]).astype(dt) << dt(width * k)
            block.put(args[0], out, mask)

        return pack
    return lambda block, mask: block.put(args[0], block.get(args[1], dt).copy(), mask)


@opcode("selp")
def _selp(parts, args, line):
    dt = DTYPES[parts[-1]]
    return lambda block, mask: block.put(
        args[0], np.where(block.get(args[3], np.bool_), block.get(args[1], dt), block.get(args[2], dt)), mask
    )


@opcode("setp")
def _setp(parts, args, line):
    dt, how = DTYPES[parts[-1]], parts[1]
    unordered = how.endswith("u") and how[:-1] in COMPARE and how not in COMPARE
    joined = next((p for p in parts[2:] if p in ("and", "or", "xor")), None)

    def run(block, mask):
        a, b = block.get(args[1], dt), block.get(args[2], dt)
        if how in ("num", "nan"):
            nan = np.isnan(a) | np.isnan(b)
            out = nan if how == "nan" else ~nan
        elif dt in (np.float32, np.float64):
            nan = np.isnan(a) | np.isnan(b)
            out = COMPARE[how[:-1] if unordered else how](a, b)
            out = out | nan if unordered else out & ~nan
        else:
            out = COMPARE[how](a, b)
        if joined:
            c = block.get(args[3].lstrip("!"), np.bool_)
            c = ~c if args[3].startswith("!") else c
            out = {"and": out & c, "or": out | c, "xor": out ^ c}[joined]
        block.put(args[0], out, mask)

    return run


@opcode("bfe")
def _bfe(parts, args, line):
    dt = DTYPES[parts[-1]]

    def run(block, mask):
        a, at, n = (
            block.get(args[1], dt),
            block.get(args[2], np.uint32).astype(np.int64),
            block.get(args[3], np.uint32).astype(np.int64),
        )
        value = (a.view(np.uint32).astype(np.int64) >> at) & ((1 << n) - 1)
        if dt is np.int32:
            value = np.where((n > 0) & ((value >> np.maximum(n - 1, 0)) & 1 == 1), value - (1 << n), value)
        block.put(args[0], value.astype(np.int32), mask)

    return run


@opcode("bfi")
def _bfi(parts, args, line):
    def run(block, mask):
        a, b = block.get(args[1], np.uint32).astype(np.int64), block.get(args[2], np.uint32).astype(np.int64)
        at, n = block.get(args[3], np.uint32).astype(np.int64), block.get(args[4], np.uint32).astype(np.int64)
        field = ((1 << n) - 1) << at
        block.put(args[0], ((b & ~field) | ((a << at) & field)).astype(np.uint32), mask)

    return run


@opcode("prmt")
def _prmt(parts, args, line):
    def run(block, mask):
        a, b, sel = (block.get(x, np.uint32) for x in args[1:4])
        both = np.concatenate([a[:, None].view(np.uint8).reshape(-1, 4), b[:, None].view(np.uint8).reshape(-1, 4)], 1)
        out = np.zeros((block.threads, 4), np.uint8)
        for k in range(4):
            s = (sel >> (4 * k)) & 0xF
            byte = both[np.arange(block.threads), s & 7]
            out[:, k] = np.where(s & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        block.put(args[0], out.view(np.uint32)[:, 0], mask)

    return run


@opcode("shf")
def _shf(parts, args, line):
    def run(block, mask):
        lo, hi, n = (block.get(x, np.uint32).astype(np.uint64) for x in args[1:4])
        n = n & 31 if "wrap" in parts else np.minimum(n, 32)
        both = (hi << np.uint64(32)) | lo
        out = ((both << n) >> np.uint64(32)) if "l" in parts else (both >> n)
        block.put(args[0], out.astype(np.uint32), mask)

    return run


@opcode("lop3")
def _lop3(parts, args, line):
    table = int(args[4], 0)

    def run(block, mask):
        a, b, c = (block.get(x, np.uint32) for x in args[1:4])
        out = np.zeros(block.threads, np.uint32)
        for k in range(8):
            if table >> k & 1:
                out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        block.put(args[0], out, mask)

    return run
