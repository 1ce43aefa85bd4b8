"""Elementary functions on float32 scalars and vectors, written as polynomials so that they cost a few instructions a
vector.

Accuracies are relative, over the whole range, unless said otherwise. Infinities and NaN come out as in libm.

Also operations on square blocks in registers: transposition, and sums of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fusion.ir.primitives import HASH_MULTIPLIERS, HASH_SPREAD
from fusion.lowering import elementary

from .builder import Builder, Value, shape_of, vector_of
from .x86 import Avx512

LIBM = {"expm1": "expm1f", "erf": "erff", "atan": "atanf"}  # rare functions that are left to libm
_ROUNDED = {"round_bfloat16": "bf16", "round_float16": "f16"}  # primitives that round to a narrower type
_LIFT = 24  # of exponents whose power of 2 would be denormal


def horner(b: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """The polynomial with these coefficients (lowest first) at x."""
    value: Value = b.constant(coefficients[-1], x.type)
    for c in reversed(coefficients[:-1]):
        value = b.fma(value, x, c, "poly")
    return value


class VectorMath:
    """Writes functions for one builder.

    avx512: whether 512-bit vectors have instructions of their own
    bfloat16: whether the processor has an instruction that rounds to bfloat16
    degree: of the exponential's polynomial: 5 gives 1e-7, 4 gives 3e-6, 3 gives 1e-4
    flushes: the processor makes results below 2**-126 zero
    denormals: powers of 2 below 2**-126 are wanted; else they are 0, as each takes the processor some hundred cycles
    unit: a power of two that those of the usual degree, weights, are multiplied by
    """

    unit: float = 1

    def __init__(
        self,
        b: Builder,
        avx512: bool,
        degree: int = 5,
        flushes: bool = False,
        bfloat16: bool = False,
        denormals: bool = False,
    ):
        self.b, self.degree, self.flushes, self.bfloat16, self.denormals = b, degree, flushes, bfloat16, denormals
        self.wide = Avx512(b) if avx512 else None

    def exp2(self, x: Value, degree: int | None = None) -> Value:
        """2**x, of the usual degree times `unit`; 0 for x below -126, or with `denormals` below -150."""
        b, unit = self.b, self.unit if degree is None else 1
        coefficients = tuple(unit * c for c in elementary.exp2_polynomial(degree or self.degree))
        if self.wide is not None and self.wide.takes(x):
            clears = not (self.flushes or self.denormals)
            return self.wide.exp2(x, lambda f: horner(b, f, coefficients), clears)
        # NaN stays in the polynomial and its product. From 128 on and below -126 p is finite, the power infinite or 0.
        clamped = b.select(b.compare("ogt", x, 128.0), 128.0, x)
        lowest = -127.0 - _LIFT * self.denormals
        clamped = b.select(b.compare("olt", clamped, lowest), lowest, clamped, "clamped")
        whole = b.unary("math.floor", clamped, "whole")
        p = horner(b, b.sub(clamped, whole, "frac"), coefficients)
        if self.denormals:  # their power is no float: p takes a part of it
            low = b.compare("olt", whole, -126.0)
            p = b.select(low, b.mul(p, 2.0**-_LIFT), p)
            whole = b.select(low, b.add(whole, float(_LIFT)), whole, "whole")
        integer = vector_of("i32", shape_of(x.type)[0])
        # The last bits of 2**23 + n are those of n: here of the exponent of a float.
        bits = b.bitcast(b.add(whole, 2.0**23 + 127.0), integer)
        power = b.bitcast(b.binary("arith.shli", bits, 23), x.type)
        return b.mul(p, power, "exp")

    def exp(self, x: Value) -> Value:
        """e**x. The product with log2(e) is kept in two parts, so that large arguments keep their accuracy."""
        b = self.b
        high = b.mul(x, elementary.LOG2E_HIGH)
        low = b.fma(x, elementary.LOG2E_LOW, b.fma(x, elementary.LOG2E_HIGH, b.unary("arith.negf", high)))
        e = self.exp2(high, 6 if self.degree >= 5 else 5)
        # Where the result is infinite, or the argument is, the correction is not a number.
        regular = b.and_(b.compare("olt", e, math.inf), b.compare("ogt", x, -200.0))
        return b.select(regular, b.fma(e, b.mul(low, elementary.LN2), e), e, "exp")

    def tanh(self, x: Value) -> Value:
        """tanh: x P(x**2) / Q(x**2), 2e-8 and rounding; 7e-5 where the exponential is of low degree too. At most 1 in
        magnitude, as a program may take the root of 1 - tanh(x)**2."""
        b, exact = self.b, self.degree >= 5
        p, q = elementary.TANH if exact else elementary.TANH_SHORT
        clamped = self._within(x, 9.0)  # from there on tanh is 1 in float32
        square = b.mul(clamped, clamped, "square")
        numerator = b.mul(horner(b, square, p), clamped)
        return self._within(b.mul(numerator, self.reciprocal(horner(b, square, q), exact), "tanh"), 1.0)

    def _within(self, x: Value, bound: float) -> Value:
        """x clamped to [-bound, bound]; NaN stays."""
        b = self.b
        below = b.select(b.compare("ogt", x, bound), bound, x)
        return b.select(b.compare("olt", below, -bound), -bound, below, "clamped")

    def reciprocal(self, x: Value, exact: bool = True) -> Value:
        """1 / x for x that is neither 0 nor infinite; to 6e-5 where `exact` is not asked for and that is cheaper."""
        b = self.b
        if self.wide is None or not self.wide.takes(x):
            return b.div(1.0, x)
        estimate = self.wide.reciprocal(x)
        if not exact:
            return estimate
        error = b.fma(b.unary("arith.negf", x), estimate, 1.0)
        return b.fma(error, estimate, estimate, "recip")  # one step of Newton's method

    def log(self, x: Value, ordinary: bool = False) -> Value:
        """Natural logarithm, 1e-7. ordinary: x is positive, neither denormal nor infinite, or NaN."""
        b = self.b
        if ordinary:
            return b.fma(x, 0.0, self._normal_log(x), "log")  # NaN stays
        denormal = b.compare("olt", x, 1.17549435e-38)
        shift = b.select(denormal, b.constant(-23.0, x.type), 0.0)
        value = self._normal_log(b.select(denormal, b.mul(x, 2.0**23), x), shift)
        value = b.select(b.compare("oeq", x, math.inf), math.inf, value)
        value = b.select(b.compare("oeq", x, 0.0), -math.inf, value)
        return b.select(b.compare("olt", x, 0.0), math.nan, b.select(b.compare("uno", x, x), x, value), "log")

    def _normal_log(self, x: Value, shift: Value | None = None) -> Value:
        """Logarithm of positive numbers: exponent (plus `shift`) and mantissa in [sqrt(1/2), sqrt(2)), log(m) by a
        polynomial in m - 1."""
        b, lanes = self.b, shape_of(x.type)[0]
        integer = vector_of("i32", lanes)
        bits = b.bitcast(x, integer)
        # Subtracting the bits of sqrt(1/2) makes the exponent field count from there.
        offset = b.sub(bits, 0x3F3504F3)
        exponent = b.binary("arith.shrsi", offset, 23)
        mantissa = b.bitcast(b.add(b.and_(offset, 0x7FFFFF), 0x3F3504F3), x.type)
        e = b.convert("arith.sitofp", exponent, "f32", "e")
        e = e if shift is None else b.add(e, shift)
        f = b.sub(mantissa, 1.0, "f")
        square = b.mul(f, f)
        tail = b.mul(b.mul(horner(b, f, elementary.LOG_TAIL), f), square)
        low = b.fma(e, elementary.LN2_LOW, b.fma(square, -0.5, tail))
        return b.fma(e, elementary.LN2_HIGH, b.add(f, low))

    def log1p(self, x: Value) -> Value:
        """log(1 + x), also near 0: the rounding of 1 + x is made good to first order."""
        b = self.b
        u = b.add(x, 1.0)
        lost = b.sub(x, b.sub(u, 1.0))
        small = b.compare("olt", b.unary("math.absf", x), 1e8)
        corrected = b.add(self.log(u), b.div(lost, u))
        # From 1e8 on 1 + x is x; at -1 the quotient has no meaning.
        usable = b.and_(small, b.compare("une", u, 0.0))
        return b.select(usable, corrected, self.log(u), "log1p")

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + e**-x)."""
        b = self.b
        return b.div(1.0, b.add(self.exp(b.unary("arith.negf", x)), 1.0), "sigmoid")

    def by_lane(self, function: str, x: Value) -> Value:
        """A libm function (declared in the kernel's header), lane by lane."""
        b, lanes = self.b, shape_of(x.type)[0]
        if not lanes:
            return b.op(f"llvm.call @{function}({x}) : (f32) -> f32", "f32", function)
        result = x
        for lane in range(lanes):
            element = b.extract(x, lane, "lane")
            element = b.op(f"llvm.call @{function}({element}) : (f32) -> f32", "f32", function)
            result = b.op(f"vector.insert {element}, {result}[{lane}] : f32 into {x.type}", x.type, function)
        return result

    def narrow(self, x: Value, scalar: str) -> Value:
        """Float32 rounded to nearest even in a narrower type. Where no instruction rounds to bfloat16, LLVM calls a
        function for each element that this process does not have."""
        b = self.b
        if scalar != "bf16" or self.bfloat16:
            return b.convert("arith.truncf", x, scalar)
        lanes = shape_of(x.type)[0]
        bits = b.bitcast(x, vector_of("i32", lanes))
        upper = b.binary("arith.shrui", bits, 16, "upper")
        even = b.and_(upper, 1, "even")
        nearest = b.binary("arith.shrui", b.add(b.add(bits, 0x7FFF), even), 16, "nearest")
        quiet = b.or_(upper, 0x40, "quiet")
        word = b.select(b.compare("uno", x, x), quiet, nearest)
        return b.bitcast(b.convert("arith.trunci", word, "i16"), vector_of("bf16", lanes), "narrow")

    def unary(self, name: str) -> Callable[[Value], Value]:
        """The function of a float primitive of the score language, by its name."""
        b = self.b
        own = {"exp": self.exp, "tanh": self.tanh, "sigmoid": self.sigmoid, "log": self.log, "log1p": self.log1p}
        if name in own:
            return own[name]
        dialect = {
            "neg": "arith.negf", "abs": "math.absf", "floor": "math.floor", "ceil": "math.ceil", "trunc": "math.trunc",
            "round": "math.roundeven", "sqrt": "math.sqrt", "sin": "math.sin", "cos": "math.cos",
        }  # fmt: skip
        if name in _ROUNDED:
            return lambda x: b.convert("arith.extf", self.narrow(x, _ROUNDED[name]), "f32", name)
        if name in ("detach", "detach_nan"):
            return lambda x: x
        if name in LIBM:
            return lambda x: self.by_lane(LIBM[name], x)
        if name == "rsqrt":
            return lambda x: b.div(1.0, b.unary("math.sqrt", x), "rsqrt")
        return lambda x: b.unary(dialect[name], x, name)


def _signed(value: int) -> int:
    """The i32 constant with the bits of an unsigned 32-bit integer."""
    return value - (1 << 32) if value >= 1 << 31 else value


def hash_bits(b: Builder, key: Value, counter: Value) -> Value:
    """`fusion.ir.primitives.hashed` of scalars or vectors of i32, of which all 32 bits count: in [0, 2**31)."""
    x = b.binary("arith.xori", key, b.mul(counter, _signed(HASH_SPREAD)), "mixed")
    for shift, multiplier in HASH_MULTIPLIERS:
        x = b.binary("arith.xori", x, b.binary("arith.shrui", x, shift), "mixed")
        x = b.mul(x, _signed(multiplier), "mixed")
    x = b.binary("arith.xori", x, b.binary("arith.shrui", x, 16), "mixed")
    return b.binary("arith.shrui", x, 1, "hash")


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


def rounding_function(name: str) -> str:
    """A function that rounds float32 to bfloat16 by instructions that every processor has."""
    b = Builder()
    rounded = VectorMath(b, avx512=False).narrow(Value("%x", "f32"), "bf16")
    return f"func.func @{name}(%x: f32) -> bf16 {{\n{b.text()}\n  return {rounded} : bf16\n}}\n"


def transpose(b: Builder, rows: Sequence[Value], run: int = 1) -> list[Value]:
    """The columns of square blocks that lie beside each other: L vectors (L a power of two) of a multiple of L runs of
    elements, by log2(L) rounds of L two-operand shuffles. run: elements that stay together. In the round of distance h,
    rows r and r + h exchange the off-diagonal halves of every 2h x 2h block."""
    values = list(rows)
    lanes = shape_of(values[0].type)[0]
    if lanes % (len(values) * run):
        raise ValueError(f"{len(values)} rows of {lanes} elements are not square blocks")
    h = len(values) // 2
    while h:
        apart = h * run
        low = [lane if not lane & apart else lane - apart + lanes for lane in range(lanes)]
        high = [lane + apart if not lane & apart else lane + lanes for lane in range(lanes)]
        for r in range(len(values)):
            if not r & h:
                x, y = values[r], values[r + h]
                values[r], values[r + h] = b.shuffle(x, y, low, "tr"), b.shuffle(x, y, high, "tr")
        h //= 2
    return values


def sum_rows(b: Builder, rows: Sequence[Value]) -> Value:
    """The vector whose lane r is the sum of row r; with fewer rows than lanes, that for each of the square blocks side
    by side. Of two halves that are added, one stays in its place, which is cheaper than a shuffle."""
    values = list(rows)
    lanes = shape_of(values[0].type)[0]
    h = len(values) // 2
    while h:
        stay = [lane if not lane & h else lane + lanes for lane in range(lanes)]
        move = [lane + h if not lane & h else lane - h + lanes for lane in range(lanes)]
        values = [
            b.add(b.shuffle(x, y, stay, "stay"), b.shuffle(x, y, move, "move"), "sum")
            for x, y in zip(values[:h], values[h:], strict=True)
        ]
        h //= 2
    return values[0]
