"""Gradients of a backward, as expressions of the gradient that arrives at a score.

The gradient of a load is a sum over all scores that read the same element. `summed_over` says which these are: a load
that is free of the key is read by all scores of its row, and so on. The form of the sum (in registers, by atomic
additions, in a buffer per thread) is left to the emitter.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from fusion.ir.derivative import UPSTREAM, WEIGHT_UPSTREAM, adjoints, reached
from fusion.ir.expr import ROW_MAX, ROW_SUM, SCORE, WEIGHT, ZERO, Expr, Kind, const, contains, coordinates, loads, walk
from fusion.ir.primitives import ROUNDED, is_bounded, is_tame
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import score_programs

FILL = 512.0
"""From here on a constant in a score program is a fill, and not a factor or a bias."""


class Axes(enum.Enum):
    """The axes of the matrix of scores over which the gradient of a load is summed."""

    NEITHER = frozenset[str]()
    KEYS = frozenset("j")
    QUERIES = frozenset("i")
    BOTH = frozenset("ij")


def summed_over(load: Expr) -> Axes:
    """The axes on which a load does not depend."""
    return Axes(frozenset("ij") - coordinates(load))


def wanted_loads(needs: Sequence[bool], *exprs: Expr) -> list[Expr]:
    """The loads below the expressions whose operands `needs` marks, each once."""
    return [load for load in loads(*exprs) if load.kind is Kind.FLOAT and needs[load.operand]]


def of_score(program: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """Gradients of the raw score and of loads through a score program, in UPSTREAM."""
    return adjoints(program, UPSTREAM, [SCORE, *targets])


def of_weight(program: Expr, targets: Iterable[Expr]) -> dict[Expr, Expr]:
    """Gradients of loads through a weight program, in WEIGHT_UPSTREAM."""
    return adjoints(program, WEIGHT_UPSTREAM, list(targets))


@functools.lru_cache(maxsize=1024)
def adds_up_to_zero(spec: AttentionSpec) -> bool:
    """Whether the gradients of a row's raw scores add up to zero in exact arithmetic. Those of its weights' exponents
    do, where the weights add up to one. A score's is that times a number of the row, or 0 where its weight is 0
    whatever the others are: a fill of any other value than -inf may have one."""
    if spec.normalizer is Normalizer.NONE or spec.sinks or spec.aux_outputs or spec.mixing is not None:
        return False
    programs = score_programs(spec, folded=True)
    variants = [program for program in (programs.masked, programs.full) if program is not None]
    return spec.row_scale is None and all(_passes_on(x, of_score(x, [])[SCORE]) for x in variants)


def _passes_on(program: Expr, slope: Expr) -> bool:
    """Whether the score's gradient is that of the program times a number of the row, wherever this is above -inf."""
    if slope.op == "where" and program.op == "where" and slope.args[0] is program.args[0]:
        cases = list(zip(program.args[1:], slope.args[1:], strict=True))
        live = [case for case in cases if case != (const(-math.inf), ZERO)]
        return len(live) == 1 and _passes_on(*live[0])
    while slope.op == "fmul":
        of_keys = [arg for arg in slope.args if "j" in coordinates(arg) or not {SCORE, UPSTREAM}.isdisjoint(walk(arg))]
        if len(of_keys) != 1:
            return False
        slope = of_keys[0]
    return slope is UPSTREAM


@functools.lru_cache(maxsize=256)
def rounds(spec: AttentionSpec) -> bool:
    """Whether a gradient is rounded in a cast to a coarser dtype than that of the products. Kernels compute it in other
    units and in parts, which round to other numbers."""
    wide = torch.finfo(getattr(torch, spec.dtype)).eps
    coarser = {name for dtype, name in ROUNDED.items() if torch.finfo(dtype).eps > wide}
    programs = (spec.score, spec.weight, *spec.sinks)
    inside = (f.value.args[0] if f.value.op in coarser and not f.over else f.value for f in spec.aux_outputs)
    rounded = (part for part in reached(*programs, *inside) if part.op in coarser)
    return any(inner in (SCORE, WEIGHT, ROW_MAX, ROW_SUM) for part in rounded for inner in walk(part))


def left_to_reference(spec: AttentionSpec) -> str | None:
    """Reason why no kernel has gradients of a spec, whichever operand needs one and wherever they arrive, or None."""
    if any(value is not None for value in spec.values):
        return "K or V is converted from a stored form"
    if spec.normalizer is Normalizer.ZERO_SOFTMAX:
        return "rows of NaN are set to zero, in which the weights are NaN when they are computed again"
    if contains(spec.weight, SCORE):
        return "the weight program reads the score"
    return None


def hides_nan(spec: AttentionSpec, needs: Sequence[bool]) -> bool:
    """Whether a gradient that `needs` marks is 0 * inf at keys that are skipped: `where(keep, s, -inf) * factor`."""
    if spec.mask is None or not spec.mask.skips:
        return False
    gradients = of_score(spec.score, wanted_loads(needs, spec.score))
    wanted = (gradient for target, gradient in gradients.items() if target is not SCORE or any(needs[:2]))
    return any(_multiplies_by(gradient, math.isinf) for gradient in wanted)


def magnifies_rounding(spec: AttentionSpec, needs: Sequence[bool]) -> bool:
    """Whether a gradient that `needs` marks, and that is no sum over keys, is the score's gradient times a fill, as
    that of `t` in `where(keep, s, -1e4) * t`. The score's gradient must then be as exact as in eager mode, where it is
    0 in rows with a weight of 1."""
    targets = [load for load in wanted_loads(needs, spec.score) if summed_over(load) in (Axes.NEITHER, Axes.QUERIES)]
    result = of_score(spec.score, targets)
    return any(_multiplies_by(result[load], lambda value: FILL <= abs(value) < math.inf) for load in targets)


def _multiplies_by(gradient: Expr, is_such: Callable[[float], bool]) -> bool:
    """Whether a factor of a product is such a constant, or may be."""
    products = (part for part in walk(gradient) if part.op == "fmul")
    return any(_may_be(arg, is_such) for part in products for arg in part.args)


@functools.lru_cache(maxsize=4096)
def _may_be(expr: Expr, is_such: Callable[[float], bool]) -> bool:
    """Whether such a constant may be the value, or a part of it that makes it such a number."""
    if expr.is_const:
        return is_such(expr.value)
    if expr.op == "where":
        return any(_may_be(arg, is_such) for arg in expr.args[1:])
    if expr.op == "div":
        return _may_be(expr.args[0], is_such)
    passes_on = is_tame(expr.op) and not is_bounded(expr.op)
    return passes_on and any(arg.kind is Kind.FLOAT and _may_be(arg, is_such) for arg in expr.args)
