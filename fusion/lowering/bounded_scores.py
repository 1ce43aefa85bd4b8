"""Scores whose range is known before they are computed: |q k^T| <= |q| |k| (the Cauchy-Schwarz inequality).

A row's softmax is the same whatever is subtracted in the exponents, as long as nothing over- or underflows. So where
the norms of an item's queries and keys show that all its live scores lie within `EXPONENTS` powers of two of a known
centre, that centre stands for every row's maximum. No pass over the scores looks for maxima then, nothing is rescaled,
and the score program is applied in the registers where the exponential follows. On such a range `tanh` is a short
polynomial, whose coefficients take up the factors around it.

The norms cost O((N_q + N_k) d), and the decision is made for each work item, from its queries and the keys that it
reads: it does not depend on what else a thread does. Where it fails the general kernel runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fusion.ir import ops
from fusion.ir.expr import SCORE, Expr, Kind, const
from fusion.ir.mask_facts import LARGEST
from fusion.ir.primitives import ROUNDED
from fusion.lowering.numbers import LOG2E

EXPONENTS = 48  # weights lie within 2**-48 .. 2**48 of the centre's
#: The largest of an item's values lies within 2**-50 .. 2**50, or is zero: its products with weights, and sums over
#: 2**25 keys, are normal numbers.
VALUE_EXPONENTS = 50
SLACK = 1.01  # relative to the computed product of norms: more than rounding can take from it
#: Natural exponents from here down have weight zero, however low the other scores of a row are within the range.
FILL = -1000.0
LARGEST_CENTRE = 2.0**13  # of a centre, in powers of two: 128 times as much is a number of float32 to 1/16
LARGEST_SCORE = 1e4  # of raw scores: powers of them, by which polynomials are evaluated, stay far from overflow
#: Largest argument of `tanh` that its polynomial takes, and the error that it may add to an exponent of 2: a quarter of
#: what the rounding of weights to bfloat16 does
TANH_NEAR = 1.0
TANH_ERROR = 2.0**-11


@dataclass(frozen=True, slots=True, kw_only=True)
class MagnitudeBound:
    """|x - centre| <= slope * B + offset, for scores of magnitude B at most, but for fills: constants that some keys
    have in place of x, or added to it. fill: the largest of them relative to the centre; None without. finite: one of
    them is finite, so that a row of fills alone has weights."""

    centre: float
    slope: float = 0.0
    offset: float = 0.0
    fill: float | None = None
    finite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedScores:
    """Bound under which the scores of a spec are near a centre, and its programs there. exponents: for each program (an
    exponent of 2 relative to the centre, plus a bias) times a unit."""

    centre: float  # in units of the programs' scale
    bound: float  # largest magnitude of a raw score for which they are
    exponents: dict[Expr, Expr]
    filled: frozenset[Expr]  # exponents that are fills for some keys
    finite: bool  # see `MagnitudeBound`


def bounded_scores(
    programs: Sequence[Expr], scale: float, unit: float = 1.0, bias: float = 0.0
) -> BoundedScores | None:
    """Bounded form of a spec; None where no range follows from that of the raw score. unit, bias: of the exponents."""
    factor, limit, reaches = scale * LOG2E, LARGEST_SCORE, []
    for program in programs:
        arguments: list[MagnitudeBound] = []
        reach = _Reach(scale, arguments).of(program)
        if reach is None or math.isinf(reach.centre) or (reach.fill is not None and reach.fill * scale > FILL):
            return None
        reaches.append(reach)
        radii = [(reach, EXPONENTS / factor), *((x, TANH_NEAR - abs(x.centre)) for x in arguments)]
        limit = min([limit, *(_largest(*pair) for pair in radii)])
    centre = reaches[0].centre
    if any(reach.centre != centre for reach in reaches) or limit <= 0 or abs(centre) * factor > LARGEST_CENTRE:
        return None
    exponents = {program: _times(program, factor * unit, 1 / unit) for program in programs}
    if shift := (bias - centre * factor) * unit:
        exponents = {key: ops.apply("fadd", x, const(shift)) for key, x in exponents.items()}
    filled = frozenset(x for x, reach in zip(exponents.values(), reaches, strict=True) if reach.fill is not None)
    finite = any(reach.finite for reach in reaches)
    return BoundedScores(centre=centre, bound=limit, exponents=exponents, filled=filled, finite=finite)


@functools.lru_cache(maxsize=256)
def tanh_polynomial(error: float) -> tuple[float, ...]:
    """Coefficients in x**2 of tanh(x) / x, of least degree with an absolute error of at most `error` for |x| <=
    TANH_NEAR. It meets the function at Chebyshev's nodes; each degree gains a factor of 12."""
    x = np.linspace(1e-3, TANH_NEAR, 1000)
    for degree in range(1, 12):
        roots = np.cos((2 * np.arange(degree + 1) + 1) * np.pi / (2 * (degree + 1)))
        nodes = np.sqrt((1 + roots) / 2) * TANH_NEAR
        coefficients = np.linalg.solve(np.vander(nodes**2, increasing=True), np.tanh(nodes) / nodes)
        if np.abs(x * np.polyval(coefficients[::-1], x * x) - np.tanh(x)).max() <= error:
            break
    return tuple(coefficients.tolist())


@functools.lru_cache(maxsize=4096)
def _times(expr: Expr, factor: float, gain: float = 1.0) -> Expr:
    """factor * expr for the operations that `_reach` knows, with constants folded and `tanh` as a polynomial. gain: the
    growth of the result's errors on the way to the exponent."""
    inner, factor = _peel(expr, factor)
    if inner.op == "const":
        value = inner.value * factor
        return const(max(-LARGEST, min(LARGEST, value)) if math.isfinite(inner.value) else value)
    if inner.op == "where":
        return ops.where(inner.args[0], *(_times(arg, factor, gain) for arg in inner.args[1:]))
    if inner.op in ("fadd", "fsub"):
        return ops.apply(inner.op, *(_times(arg, factor, gain) for arg in inner.args))
    if inner.op != "tanh":
        return ops.apply("fmul", inner, const(factor))
    argument, slope = _peel(inner.args[0], 1.0)
    gain *= abs(factor)
    if argument is not SCORE:
        argument = _times(argument, 1.0, gain * abs(slope))
    square = ops.apply("fmul", argument, argument)
    terms = [c * slope ** (2 * k + 1) * factor for k, c in enumerate(tanh_polynomial(TANH_ERROR / gain))]
    value = const(terms[-1])
    for c in reversed(terms[:-1]):
        value = ops.apply("fadd", ops.apply("fmul", value, square), const(c))
    return ops.apply("fmul", argument, value)


def _peel(expr: Expr, factor: float) -> tuple[Expr, float]:
    """(x, c) with c x = factor * expr, without constant factors around x."""
    while True:
        if expr.op == "neg":
            expr, factor = expr.args[0], -factor
        elif expr.op == "fmul" and (constants := [arg for arg in expr.args if arg.op == "const"]):
            expr = expr.args[1] if constants[0] is expr.args[0] else expr.args[0]
            factor *= constants[0].value
        elif expr.op == "div" and expr.args[1].op == "const":
            expr, factor = expr.args[0], factor / expr.args[1].value
        else:
            return expr, factor


def _largest(reach: MagnitudeBound, radius: float) -> float:
    """The largest B with slope * B + offset <= radius; at most 0 where there is none."""
    if reach.slope == 0.0:
        return math.inf if reach.offset <= radius else 0.0
    return (radius - reach.offset) / reach.slope


@dataclass(frozen=True, slots=True)
class _Reach:
    """Bounds of FLOAT expressions. arguments: collects the bounds of the arguments of `tanh`. known: of parts."""

    scale: float
    arguments: list[MagnitudeBound]
    known: dict[Expr, MagnitudeBound | None] = field(default_factory=dict)

    def of(self, expr: Expr) -> MagnitudeBound | None:
        if expr not in self.known:
            self.known[expr] = self._of(expr)
        return self.known[expr]

    def _of(self, expr: Expr) -> MagnitudeBound | None:
        if expr is SCORE:
            return MagnitudeBound(centre=0.0, slope=1.0)
        if expr.op == "const":
            return MagnitudeBound(centre=expr.value) if expr.value < math.inf else None
        parts = [self.of(arg) for arg in expr.args if arg.kind is Kind.FLOAT]
        known = [part for part in parts if part is not None]
        if expr.op not in _RULES or len(known) < len(parts):
            return None
        if expr.op == "tanh":
            self.arguments.append(known[0])
        return self._either(*known) if expr.op == "where" else _RULES[expr.op](*known)

    def _either(self, first: MagnitudeBound, second: MagnitudeBound) -> MagnitudeBound | None:
        slope, apart = max(first.slope, second.slope), second.centre - first.centre
        for part, other in ((first, second), (second, first)):
            fill = part.centre + part.offset - other.centre
            if fill * self.scale <= FILL:
                finite = other.finite or math.isfinite(fill)
                return replace(other, slope=slope, fill=_highest(fill, other.fill), finite=finite)
        if not math.isfinite(apart):
            return None
        return MagnitudeBound(
            centre=first.centre, slope=slope, offset=max(first.offset, second.offset + abs(apart)),
            fill=_highest(first.fill, None if second.fill is None else second.fill + apart),
            finite=first.finite or second.finite,
        )  # fmt: skip


def _highest(*fills: float | None) -> float | None:
    return max((fill for fill in fills if fill is not None), default=None)


def _sum(x: MagnitudeBound, y: MagnitudeBound) -> MagnitudeBound:
    return MagnitudeBound(
        centre=x.centre + y.centre, slope=x.slope + y.slope, offset=x.offset + y.offset,
        fill=_highest(x.fill, y.fill), finite=x.finite or y.finite,
    )  # fmt: skip


def _difference(x: MagnitudeBound, y: MagnitudeBound) -> MagnitudeBound | None:
    negated = _product(MagnitudeBound(centre=-1.0), y)
    return None if negated is None else _sum(x, negated)


def _is_constant(x: MagnitudeBound) -> bool:
    return not (x.slope or x.offset) and x.fill is None and math.isfinite(x.centre)


def _product(x: MagnitudeBound, y: MagnitudeBound) -> MagnitudeBound | None:
    """Bound of a product with a constant. A fill stays one only if its sign does."""
    if not _is_constant(x):
        x, y = y, x
    factor = x.centre
    if not _is_constant(x) or math.isinf(y.centre) or (y.fill is not None and factor <= 0):
        return None
    return MagnitudeBound(
        centre=factor * y.centre, slope=abs(factor) * y.slope, offset=abs(factor) * y.offset,
        fill=None if y.fill is None else factor * y.fill, finite=y.finite,
    )  # fmt: skip


def _quotient(x: MagnitudeBound, y: MagnitudeBound) -> MagnitudeBound | None:
    return None if not _is_constant(y) or y.centre == 0.0 else _product(x, MagnitudeBound(centre=1.0 / y.centre))


def _tanh(x: MagnitudeBound) -> MagnitudeBound | None:
    """Bound of tanh: |tanh x| <= |x|."""
    if x.fill is not None or math.isinf(x.centre):
        return None
    return MagnitudeBound(centre=0.0, slope=x.slope, offset=x.offset + abs(x.centre))


def _rounded(x: MagnitudeBound) -> MagnitudeBound:
    """Bound after rounding to a narrower type, which changes a number by less than a part in 100."""
    offset = x.offset + (0.01 * abs(x.centre) if math.isfinite(x.centre) else 0.0)
    return replace(x, slope=1.01 * x.slope, offset=1.01 * offset)


#: What is known of the result of an operation from its arguments; that of `where` needs the scale
_RULES: dict[str, Callable[..., MagnitudeBound | None]] = {
    **dict.fromkeys((*ROUNDED.values(), "where"), _rounded),
    "neg": functools.partial(_product, MagnitudeBound(centre=-1.0)),
    "fadd": _sum,
    "fsub": _difference,
    "fmul": _product,
    "div": _quotient,
    "tanh": _tanh,
}
