"""Epilogue of a row: its maximum and sum with the sinks, and the factor of its output.

A kernel leaves its loop over the keys with `KEY_MAX`, the largest score of a row, `KEY_SUM`, the sum of exp(score -
KEY_MAX), and the output for these weights. `row_epilogue` lists the remaining computations, in order.

The weights of a softmax are the same whatever is subtracted in their exponents. So where the program reads nothing else
of a row, KEY_MAX may be any number near its largest score, and ignore NaN. Where it reads the maximum or the sum
(`fusion.ir.results.keeps_ends`) KEY_MAX is the largest score, NaN where one is.

Rows without a live key, whose KEY_MAX is -inf and KEY_SUM is 0: a softmax is NaN there, as exp(-inf - -inf) is. With
the default factor that is 0 * (1 / 0), and needs no rule. A safe softmax is 0. A row of `Normalizer.ZERO_SOFTMAX` is 0
wherever the factor is NaN, which emitters have to handle: their output may be NaN as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from fusion.ir.expr import ONE, ROW_MAX, ROW_SUM, ZERO, Expr, Kind, const, node
from fusion.ir.ops import apply, where
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec, Normalizer

KEY_MAX = node("row_max", (), Kind.FLOAT, "keys")
KEY_SUM = node("row_sum", (), Kind.FLOAT, "keys")
BASE = node("row_max", (), Kind.FLOAT, "base")
SHRINK = node("row_sum", (), Kind.FLOAT, "shrink")
"""What sums relative to KEY_MAX are multiplied by to be relative to BASE: a sink may have raised the maximum."""
FACTOR = node("row_sum", (), Kind.FLOAT, "factor")
"""What the output of a row is multiplied by."""


def row_epilogue(spec: AttentionSpec) -> Iterator[tuple[str, Expr, Expr]]:
    """(name for people, leaf, value in terms of the leaves before it): of ROW_MAX, ROW_SUM and at last FACTOR, too."""
    yield "highest", ROW_MAX, functools.reduce(lambda m, x: where(apply("flt", m, x), x, m), spec.sinks, KEY_MAX)
    dead, total = apply("feq", ROW_MAX, const(-math.inf)), KEY_SUM
    if spec.sinks:
        yield "base", BASE, where(dead, ZERO, ROW_MAX)
        yield "shrink", SHRINK, apply("exp", KEY_MAX - BASE)
        total = sum((apply("exp", sink - BASE) for sink in spec.sinks), KEY_SUM * SHRINK)
    if spec.normalizer is Normalizer.ZERO_SOFTMAX or (spec.normalizer is Normalizer.SOFTMAX and keeps_ends(spec)):
        total = where(dead, const(math.nan), total)
    yield "row_sum", ROW_SUM, total
    yield "factor", FACTOR, _factor(spec, SHRINK if spec.sinks else ONE)


def _factor(spec: AttentionSpec, shrink: Expr) -> Expr:
    factor = (spec.row_scale or ONE / ROW_SUM) * shrink
    if spec.normalizer is not Normalizer.SAFE_SOFTMAX:
        return factor
    dead = apply("feq", ROW_MAX, const(-math.inf))
    return where(apply("and", dead, apply("feq", ROW_SUM, ZERO)), ZERO, factor)


def log_weight(x: Expr) -> Expr:
    """LOG_WEIGHT of a score program's value."""
    return (x - ROW_MAX) - apply("log", ROW_SUM)


def weight(spec: AttentionSpec) -> Expr:
    """A weight before the weight program, in SCORE, ROW_MAX and ROW_SUM: for kernels that compute scores once more."""
    if spec.normalizer is Normalizer.NONE:
        return spec.score
    base = ROW_MAX
    if spec.normalizer is Normalizer.SAFE_SOFTMAX:
        base = where(apply("feq", ROW_MAX, const(-math.inf)), ZERO, ROW_MAX)
    found = apply("exp", spec.score - base) * _factor(spec, ONE)
    zero = spec.normalizer is Normalizer.ZERO_SOFTMAX
    return where(apply("feq", found, found), found, ZERO) if zero else found
