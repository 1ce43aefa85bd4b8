"""Epilogue of a row: its maximum and sum with the sinks, and the factor of its output.

A kernel leaves its loop over the keys with `KEY_MAX`, the largest score of a row, `KEY_SUM`, the sum of exp(score -
KEY_MAX), and the output for these weights. `row_epilogue` lists the remaining computations, in order.

The weights of a softmax are the same whatever is subtracted in their exponents. So where the program reads nothing else
of a row, KEY_MAX may be any number near its largest score, and ignore NaN. Where it reads the maximum or the sum
(`fusion.ir.results.keeps_ends`) KEY_MAX is the largest score, NaN where one is.

Rows without a live key, whose KEY_MAX is -inf and KEY_SUM is 0: a softmax is NaN there, as exp(-inf - -inf) is. With
the default factor that is 0 * (1 / 0), and needs no rule. A safe softmax is 0. A row of `Normalizer.ZERO_SOFTMAX` is 0
wherever the factor is NaN, which emitters have to handle: their output may be NaN as well.

Gradient of rows with another scale than one over their sum.

With m and l the maximum and the sum of a row and u(m, l) one over its scale, the weights are w = exp(x - m) / u. Where
the quotient depends on m only through exp(x - m) and l, as that of `exp(x) / (exp(x).sum() + eps)` does,

    dx_j = w_j (dP_j - slope * sum over e of dO * O)          slope = du / dl, which is 1 for a softmax

which is a softmax's gradient but for the slope: kernels need no more than that, once per row. Where it does depend on
m, as that of `exp(x - m) / (exp(x - m).sum() + eps)` does, the key of the maximum has a further term, (l du/dl - u -
du/dm) / u times the sum of dO * O. Kernels do not know which key that is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from fusion.ir.derivative import adjoints
from fusion.ir.expr import ONE, ROW_MAX, ROW_SUM, ZERO, Expr, Kind, const, loads, node, substitute
from fusion.ir.ops import apply, evaluate, where
from fusion.ir.results import keeps_ends
from fusion.ir.spec import AttentionSpec, Normalizer

KEY_MAX = node("row_max", (), Kind.FLOAT, "keys")
KEY_SUM = node("row_sum", (), Kind.FLOAT, "keys")
BASE = node("row_max", (), Kind.FLOAT, "base")
SHRINK = node("row_sum", (), Kind.FLOAT, "shrink")
"""Factor that takes sums relative to KEY_MAX to sums relative to BASE: a sink may have raised the maximum."""
FACTOR = node("row_sum", (), Kind.FLOAT, "factor")
"""Factor of a row's output."""


def concentrated(spec: AttentionSpec) -> float:
    """Largest weight of a row from which on its delta is summed over the keys. In rows with a large weight dx = P (dP -
    delta) nearly cancels, and eager, whose delta is the sum of the very P dP, is more exact than a delta from dO and O
    can be. Errors of delta go into the gradients times weights, and average out where these are small. Narrow results
    are off by more than most of them."""
    return 1 / 4 if spec.out_dtype == "float32" else 3 / 4


def row_epilogue(spec: AttentionSpec) -> Iterator[tuple[str, Expr, Expr]]:
    """(name for people, leaf, value in terms of the leaves before it): of ROW_MAX, ROW_SUM and at last FACTOR, too."""
    yield "highest", ROW_MAX, functools.reduce(lambda m, x: where(apply("flt", m, x), x, m), spec.sinks, KEY_MAX)
    dead, total = apply("feq", ROW_MAX, const(-math.inf)), KEY_SUM
    if spec.sinks:
        yield "base", BASE, where(dead, ZERO, ROW_MAX)
        yield "shrink", SHRINK, apply("exp", KEY_MAX - BASE) * (ONE + _lost(KEY_MAX, BASE))
        total = sum((apply("exp", sink - BASE) for sink in spec.sinks), KEY_SUM * SHRINK)
    if spec.normalizer is Normalizer.ZERO_SOFTMAX or (spec.normalizer is Normalizer.SOFTMAX and keeps_ends(spec)):
        total = where(dead, const(math.nan), total)
    yield "row_sum", ROW_SUM, total
    yield "factor", FACTOR, _factor(spec, SHRINK if spec.sinks else ONE)


def _lost(a: Expr, b: Expr) -> Expr:
    """Rounding error of a - b (the sum of two numbers of Knuth, The Art of Computer Programming, volume 2, 4.2.2), 0
    where that is not finite. A sink of 80 rounds all weights of a row alike, which eager's sums of keys average."""
    difference = a - b
    rest = difference - a
    lost = (a - (difference - rest)) - (b + rest)
    return where(apply("flt", apply("abs", lost), const(math.inf)), lost, ZERO)


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
    result = apply("exp", spec.score - base) * _factor(spec, ONE)
    zero = spec.normalizer is Normalizer.ZERO_SOFTMAX
    return where(apply("feq", result, result), result, ZERO) if zero else result


LOG_SUM = node("row_sum", (), Kind.FLOAT, "log")
"""The log-sum-exp of a row in the place of ROW_MAX + log(ROW_SUM): its gradient is exp(x - LOG_SUM), as eager computes
it, also where the logarithm is lost beside a huge fill."""
_LOG_SUM = ROW_MAX + apply("log", ROW_SUM)
INFINITE = apply("feq", apply("abs", ROW_MAX), const(math.inf))
LIVE_LOG_SUM = where(INFINITE, ZERO, _LOG_SUM)
"""The log-sum-exp of a row, or 0 where its maximum is infinite, through which no gradient flows there."""
_POINTS = 256


def row_scale(spec: AttentionSpec) -> Expr:
    """Scale of rows, in ROW_MAX, ROW_SUM and LOG_SUM."""
    assert spec.row_scale is not None
    return in_log_sums(spec.row_scale)


def in_log_sums(expr: Expr) -> Expr:
    """Expression with LOG_SUM in the place of its formula."""
    return substitute(expr, {_LOG_SUM: LOG_SUM})


def divisor(spec: AttentionSpec) -> Expr:
    """u: the divisor of rows."""
    scale = row_scale(spec)
    return scale.args[1] / scale.args[0] if scale.op == "div" else ONE / scale


def slope(spec: AttentionSpec) -> Expr:
    """du / dl, including the part through LOG_SUM."""
    result = adjoints(divisor(spec), ONE, [ROW_SUM, LOG_SUM])
    return result[ROW_SUM] + result[LOG_SUM] * apply("exp", ROW_MAX - LOG_SUM)


def lost_logarithms(row_max: torch.Tensor, row_sum: torch.Tensor) -> torch.Tensor:
    """Factor of the weights of rows that makes them exp(x - log-sum-exp), the gradient of which eager mode computes: 1,
    except where the logarithm of the sum is lost beside a huge maximum."""
    factor = row_sum * torch.exp(row_max - (row_max + row_sum.log()))
    return torch.where((factor - 1).abs() < 2.0**-6, 1.0, factor)


def unsupported(spec: AttentionSpec, needs: Sequence[bool] | None = None) -> str | None:
    """Reason why kernels have no gradient of the scale of rows for operands that `needs` marks (None: any), or None."""
    if spec.row_scale is None:
        return None
    if any(load.kind is Kind.FLOAT and (needs is None or needs[load.operand]) for load in loads(spec.row_scale)):
        return "a tensor that rows are scaled by needs a gradient"
    if depends_on_maximum(spec):
        return "the scale of rows depends on their maximum, through which a gradient flows to the largest score"
    return None


@functools.lru_cache(maxsize=256)
def depends_on_maximum(spec: AttentionSpec) -> bool:
    """Whether the term of the maximum's key is more than rounding, for any of a number of rows. l is at least 1."""
    u, draw = divisor(spec), torch.Generator().manual_seed(0)
    slopes = adjoints(u, ONE, [ROW_MAX, ROW_SUM])
    sizes = torch.tensor([0.1, 1.0, 10.0, 50.0], dtype=torch.float64).repeat(_POINTS // 4)
    m = torch.randn(_POINTS, generator=draw, dtype=torch.float64) * sizes
    total = 1.0 + torch.rand(_POINTS, generator=draw, dtype=torch.float64) * sizes.sort().values
    rows = {ROW_MAX: m, ROW_SUM: total, LOG_SUM: m + total.log()}

    def leaf(part: Expr):
        if part not in rows:
            rows[part] = {
                Kind.FLOAT: torch.randn(_POINTS, generator=draw, dtype=torch.float64),
                Kind.INT: torch.randint(1, 64, (_POINTS,), generator=draw),
                Kind.BOOL: torch.rand(_POINTS, generator=draw, dtype=torch.float64) < 0.5,
            }[part.kind]
        return (lambda *_: rows[part]) if part.op == "load" and part.args else rows[part]

    whole, by_max, by_sum = (evaluate(e, leaf, torch.float64) for e in (u, slopes[ROW_MAX], slopes[ROW_SUM]))
    eps = min(torch.finfo(o.torch_dtype).eps for o in spec.operands if o.torch_dtype.is_floating_point)
    return not bool(((whole + by_max - total * by_sum).abs() <= 0.5 * eps * whole.abs()).all())
