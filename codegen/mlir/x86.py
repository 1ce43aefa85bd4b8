"""Instructions that only x86 processors have: what a `Target` says exists is written here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

from fusion.lowering.elementary import excess_of_linear

from .builder import Builder, Value, shape_of
from .values import TILE

FLUSH_TO_ZERO = 1 << 15  # in the control register of the vector unit, MXCSR
LANES = 16  # float32 elements in the widest vectors
F32, WORDS, BF16 = f"vector<{LANES}xf32>", f"vector<{LANES}xi32>", f"vector<{2 * LANES}xbf16>"
HALVES, BYTES = f"vector<{2 * LANES}xi16>", f"vector<{4 * LANES}xi8>"
LARGE_BITS = (127 + 96) << 23
"""Magnitudes from here on (2**96), infinities and NaN among them, are not split into planes: the kernel raises a flag
instead. So it does where no magnitude of an operand is above a limit (`KernelFunction.least_exponent`): products take
denormal bfloat16 for 0, and with them the last planes of numbers below 2**-102."""


def flush_denormals(b: Builder, modes: Value) -> None:
    """Make results below 2**-126 zero from here on. modes: memory, which keeps the caller's mode, and after it ours."""
    ours = b.at(modes, 1, "i32")
    b.intrinsic("x86.sse.stmxcsr", modes)
    b.store(b.or_(b.load(modes, "i32", "mode"), FLUSH_TO_ZERO), ours)
    b.intrinsic("x86.sse.ldmxcsr", ours)


def restore_mode(b: Builder, modes: Value) -> None:
    """The caller's floating-point mode."""
    b.intrinsic("x86.sse.ldmxcsr", modes)


def magnitude(b: Builder, x: Value) -> Value:
    """|x| as bits: they are ordered as the numbers are, NaN above all."""
    return b.and_(b.bitcast(x, WORDS), 0x7FFFFFFF, "magnitude")


def split_pairs(
    b: Builder, first: Value, second: Value, planes: int, keeps_nan: bool = False, element: str = "bf16"
) -> list[Value]:
    """bf16 planes of two float32 vectors (or both in another `element`), in pairs as words, `first` in their lower
    halves. keeps_nan: the last plane is rounded to nearest even, and NaN stays; else half up, where a NaN may come out
    as a number."""
    results = []
    for plane in range(planes):
        if element != "bf16" or (keeps_nan and plane == planes - 1):
            return [*results, b.bitcast(Avx512(b).pairs(first, second, element), WORDS, "pair")]
        # The upper 16 bits of a float32 are a bf16: what is cut off goes to the next plane, exactly. Half of the last
        # place added first halves what remains, and with it the products that are left out.
        low, high = (b.and_(b.add(b.bitcast(x, WORDS), 0x8000, "near"), -0x10000, "upper") for x in (first, second))
        results.append(b.or_(b.binary("arith.shrui", low, 16), high, "pair"))
        if plane < planes - 1:
            first, second = (b.sub(x, b.bitcast(y, F32), "rest") for x, y in ((first, low), (second, high)))
    return results


def split_lines(b: Builder, low: Value, high: Value, planes: int, element: str = "bf16") -> list[Value]:
    """bf16 planes of two float32 vectors side by side (or both in another `element`), each rounded to nearest even:
    their sum is what is split."""
    results = [Avx512(b).narrow(low, high, element)]
    for _ in range(planes - 1):
        halves = [b.shuffle(results[-1], results[-1], range(n, n + LANES), "half") for n in (0, LANES)]
        pairs = zip((low, high), halves, strict=True)
        low, high = (b.sub(x, b.convert("arith.extf", half, "f32"), "rest") for x, half in pairs)
        results.append(Avx512(b).narrow(low, high))
    return results


class Avx512:
    """Functions of vectors of 16 float32."""

    def __init__(self, b: Builder):
        self.b = b

    def takes(self, x: Value) -> bool:
        return shape_of(x.type)[0] == LANES

    def exp2(self, x: Value, polynomial: Callable[[Value], Value], clears: bool) -> Value:
        """2**x; polynomial: 2**f for f in [0, 1]. clears: results below 2**-126 are made 0."""
        b = self.b
        mask, rounding = b.constant(-1, "i16"), b.constant(4, "i32")
        down = b.constant(0x09, "i32")  # round toward minus infinity, no exceptions
        f = b.intrinsic("x86.avx512.mask.reduce.ps.512", x, down, x, mask, rounding, type_=x.type, hint="frac")
        p = polynomial(f)
        power = b.intrinsic("x86.avx512.mask.scalef.ps.512", p, x, p, mask, rounding, type_=x.type, hint="exp")
        if not clears:
            return power
        # One instruction with the multiplication: a lane that is masked out takes no time for its denormal.
        return b.select(b.compare("olt", x, -126.0), 0.0, power, "exp")

    def reciprocal(self, x: Value) -> Value:
        """1 / x, to 6e-5."""
        return self.b.intrinsic("x86.avx512.rcp14.ps.512", x, x, self.b.constant(-1, "i16"), type_=x.type, hint="recip")

    def add_pair_products(self, total: Value, left: Value, right: Value) -> Value:
        """total + left[2 n] right[2 n] + left[2 n + 1] right[2 n + 1] in lane n, of bf16 left and right."""
        return self.b.intrinsic("x86.avx512bf16.dpbf16ps.512", total, left, right, type_=F32, hint="sum")

    def power_pairs(self, first: Value, second: Value, ordinary: bool) -> Value:
        """2**x as bfloat16 for the x of two vectors in turns, as words; 0 below 2**-126. The arguments are (x + BIAS) *
        MANTISSA, less than 2**15 and not NaN. ordinary: x is not less than -126. Rounded to an integer that is the bits
        of (1 + f) 2**n for x = n + f, and what 1 + f exceeds 2**f by is looked up (`vpermi2b`). x is so rounded to
        2**-8, and a weight to 0.64 % at most, 0.22 % in the mean (bfloat16 alone: 0.39 and 0.17 %), by half of a
        polynomial's instructions."""
        b, low, high = self.b, *(self._nearest_integer(x, ordinary) for x in (first, second))
        halves = [b.bitcast(x, HALVES) for x in (low, b.binary("arith.shli", high, 16))]
        linear = b.shuffle(*halves, [n + 2 * LANES * (n % 2) for n in range(2 * LANES)], "linear")
        size = 4 * LANES
        tables = [b.dense(excess_of_linear()[at : at + size], BYTES, "excess") for at in (0, size)]
        index = b.bitcast(linear, BYTES)
        result = b.intrinsic("x86.avx512.vpermi2var.qi.512", tables[0], index, tables[1], type_=BYTES, hint="found")
        excess = b.and_(b.bitcast(result, HALVES), 0xFF, "excess")
        return b.bitcast(b.sub(linear, excess), WORDS, "pair")

    def _nearest_integer(self, x: Value, ordinary: bool) -> Value:
        b, mask, rounding = self.b, self.b.constant(-1, "i16"), self.b.constant(4, "i32")
        if not ordinary:  # as integers, negative floats are less than 0
            x = b.bitcast(b.most(b.bitcast(x, WORDS), 0), F32)
        kept = b.constant(0, WORDS)
        return b.intrinsic("x86.avx512.mask.cvtps2dq.512", x, kept, mask, rounding, type_=WORDS, hint="nearest")

    def pairs(self, first: Value, second: Value, element: str = "bf16") -> Value:
        """Elements of two vectors in turns, rounded to nearest even."""
        both = self.narrow(first, second, element)
        return self.b.shuffle(both, both, [n + half for n in range(LANES) for half in (0, LANES)], "pairs")

    def narrow(self, low: Value, high: Value, element: str = "bf16") -> Value:
        """32 elements (bf16 or f16) from two vectors, rounded to nearest even."""
        if element == "f16":
            halves = [self.b.convert("arith.truncf", x, element, "half") for x in (low, high)]
            return self.b.shuffle(*halves, range(2 * LANES), "line")
        return self.b.intrinsic("x86.avx512bf16.cvtne2ps2bf16.512", high, low, type_=BF16, hint="line")


class TileUnit:
    """AMX: tiles of 16 rows of 64 bytes, and their products. `tdpbf16ps` adds to a 16 x 16 float32 tile the product of
    A, 16 rows of 32 bf16, and B, 16 rows of 16 pairs, where row k of B has elements 2k and 2k + 1 of the reduction;
    `tdpfp16ps` the same of f16, denormal ones included. stride: bytes from one row to the next."""

    def __init__(self, b: Builder, element: str = "bf16"):
        self.b, self.name = b, {"bf16": "x86.tdpbf16ps.internal", "f16": "x86.tdpfp16ps.internal"}[element]

    def _sizes(self, stride: Value | int = 64) -> tuple[Value, Value, Value]:
        return self.b.constant(16, "i16"), self.b.constant(64, "i16"), self.b.as_value(stride, "i64")

    def zero(self) -> Value:
        rows, columns, _ = self._sizes()
        return self.b.intrinsic("x86.tilezero.internal", rows, columns, type_=TILE, hint="zero")

    def load(self, address: Value, hint: str, stride: Value | int = 64) -> Value:
        rows, columns, step = self._sizes(stride)
        return self.b.intrinsic("x86.tileloadd64.internal", rows, columns, address, step, type_=TILE, hint=hint)

    def store(self, tile: Value, address: Value, stride: int = 64) -> None:
        rows, columns, step = self._sizes(stride)
        self.b.intrinsic("x86.tilestored64.internal", rows, columns, address, step, tile)

    def product(self, left: Value, right: Value, sum_: Value) -> Value:
        """sum + left right, of one tile each."""
        rows, columns = self.b.constant(16, "i16"), self.b.constant(64, "i16")
        return self.b.intrinsic(self.name, rows, columns, columns, sum_, left, right, type_=TILE, hint="sum")
