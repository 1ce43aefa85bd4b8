"""Every pointwise operation of the score language, each alone in the score of an attention, through the whole backend:
output and gradients, in float32 and bfloat16, against eager in float64.

The cases are those of the table itself (`pointwise.BUILDERS`); an entry without a call here fails a test. Attentions of
one range of scores are compiled together, which is all that they share.
"""

import functools
import math

import pytest
import torch

import fusion
from fusion.passes.pullback import pointwise
from tests.numerics import assert_as_exact_as_eager

INF, NAN = math.inf, math.nan

# How an operation is called on scores s and a captured tensor t, both of the same range.
CALLS = {
    "add": lambda op, s, t: op(s, t, alpha=0.5), "sub": lambda op, s, t: op(s, t, alpha=2), "threshold": lambda
    op, s, t: op(s, 0.1, -2.0), "pow": lambda op, s, t: op(s, 1.5), "lerp": lambda op, s, t: op(s, t, 0.3),
    "addcmul": lambda op, s, t: op(s, s, t, value=0.5), "addcdiv": lambda op, s, t: op(s, s, t, value=0.5),
    "where": lambda op, s, t: op(t > 0, s, t), "masked_fill": lambda op, s, t: op(s, t > 0, -2.0),
    "clamp": lambda op, s, t: op(s, -1.0, 2.0), "clamp_min": lambda op, s, t: op(s, -1.0),
    "clamp_max": lambda op, s, t: op(s, 2.0), "hardtanh": lambda op, s, t: op(s, -1.0, 2.0),
    "leaky_relu": lambda op, s, t: op(s, 0.1), "elu": lambda op, s, t: op(s, 0.7), "celu": lambda op, s, t: op(s, 0.7),
    "remainder": lambda op, s, t: op(s, 2.0), "floor_divide": lambda op, s, t: s + op(torch.arange(13), 3),
    "nan_to_num": lambda op, s, t: op(s.masked_fill(t > 1, NAN).masked_fill(t < -1, INF), 0.5, 1.5, -2.0),
}  # fmt: skip
BINARY = """rsub mul div true_divide divide multiply subtract minimum maximum max min logaddexp ldexp
_prelu_kernel""".split()
CALLS |= dict.fromkeys(BINARY, lambda op, s, t: op(s, t))
CALLS["clip"] = CALLS["clamp"]
COMPARISONS = "eq ne lt le gt ge less less_equal not_equal greater greater_equal".split()
CALLS |= dict.fromkeys(COMPARISONS, lambda op, s, t: s.masked_fill(op(s, t), 0.25))
LOGICAL = "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__".split()
CALLS |= dict.fromkeys(LOGICAL, lambda op, s, t: s.masked_fill(op(s > 0, t > 0), 0.25))
CALLS |= dict.fromkeys(("logical_not", "bitwise_not"), lambda op, s, t: s.masked_fill(op(t > 0), 0.25))
SHIFTS = "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__".split()
CALLS |= dict.fromkeys(SHIFTS, lambda op, s, t: s + op(torch.arange(13) - 6, 2))


def of_special_values(op, s, t):
    """What asks for infinities and NaN sees some of each."""
    special = s.masked_fill(t > 1, INF).masked_fill(t < -1, -INF).masked_fill((t > 0) & (t < 0.5), NAN)
    return torch.where(op(special), 0.25, s)


CALLS |= dict.fromkeys("isnan isinf isposinf isneginf isfinite".split(), of_special_values)

# Ranges of the scores: with poles, domains, and jumps, at which scores must be the same numbers in every dtype.
UNIT = set("atanh arctanh tan erfc".split())
POSITIVE = set("log log2 log10 log1p sqrt rsqrt reciprocal pow div true_divide divide addcdiv".split())
STEPS = set("floor ceil trunc fix round special_round sign sgn frac remainder floor_divide".split())
STEPS |= set("hardshrink softshrink threshold".split()) | {*COMPARISONS}
KINKS = set("relu relu6 leaky_relu elu celu selu hardtanh hardsigmoid hardswish clamp clip clamp_min clamp_max".split())
STEPS |= KINKS | {"abs", "absolute", "maximum", "minimum", "max", "min", "_prelu_kernel"}
"""Kinks too: a gradient is another on the other side. There torch splits it or takes a side, and so must we."""

PACKETS = {str(packet).removeprefix("aten."): packet for packet in pointwise.BUILDERS}
TOGETHER = 12
"""Attentions in one graph."""


def range_of(name):
    return "unit" if name in UNIT else "positive" if name in POSITIVE else "steps" if name in STEPS else "plain"


def groups():
    """Names of operations that are compiled together, by any of them."""
    found = {}
    for kind in ("unit", "positive", "steps", "plain"):
        names = sorted(name for name in PACKETS if range_of(name) == kind)
        for first in range(0, len(names), TOGETHER):
            group = tuple(names[first : first + TOGETHER])
            found |= dict.fromkeys(group, group)
    return found


def cases():
    """Every operation in both dtypes, those of a group in the same one by default."""
    order = {group: number for number, group in enumerate(dict.fromkeys(groups().values()))}
    for name in sorted(PACKETS):
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            usual = (order[groups()[name]] + number) % 2 == 0
            yield pytest.param(name, dtype, marks=[] if usual else [pytest.mark.long])


def inputs(kind):
    """Q, K, V and t, whose scores lie within -8 .. 8, -1 .. 1 or 0 .. 2, or are multiples of 1/4."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (11, 13, 13))
    t = torch.randn(2, 11, 13)
    if kind == "steps":
        q, k, t = (torch.randint(-3, 4, x.shape) / n for x, n in ((q, 2), (k, 2), (t, 4)))
    if kind in ("unit", "positive"):
        q, k = (torch.nn.functional.normalize(x, dim=-1) * 0.95 for x in (q, k))
    if kind == "positive":
        q, k, t = q.abs() + 0.1, k.abs() + 0.1, t.abs() + 0.5
    return [q, k, v, t]


def called(name, s, t):
    return CALLS.get(name, lambda op, s, t: op(s))(PACKETS[name], s, t)


def outputs_and_gradients(function, tensors, upstream, names):
    """By operation: the output, and gradients of Q, K, V and, where it is read, t."""
    found = {}
    for name, out in zip(names, function(*tensors), strict=True):
        gradients = torch.autograd.grad(out, tensors, upstream.to(out.dtype), retain_graph=True, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, gradients, strict=True)]
        found[name] = [out.detach(), *gradients]
    return found


@functools.cache
def computed(names, dtype, emitter):
    """(ours, eager, float64) of some operations, by name, and which builders made something."""
    built = set()

    def attend(q, k, v, t):
        return [torch.softmax(called(name, q @ k.mT, t), -1) @ v for name in names]

    torch.manual_seed(0)
    given = [x.to(dtype) for x in inputs(range_of(names[0]))]
    upstream = torch.randn(1, 2, 11, 8)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(pointwise.BUILDERS, PACKETS[name], recorded(pointwise.BUILDERS[PACKETS[name]], name, built))
        with fusion.collect_reports() as reports:
            options = {"inner": "eager", "emitter": emitter}
            ours = torch.compile(attend, backend="fusion", options=options, fullgraph=True)
            results = [
                outputs_and_gradients(run, [x.to(to).requires_grad_() for x in given], upstream, names)
                for run, to in ((ours, dtype), (attend, dtype), (attend, torch.float64))
            ]
    reasons = [site.reason for report in reports for site in report.sites]
    assert reasons == [None] * len(names), dict(zip(names, reasons, strict=False))
    return *results, built


def recorded(builder, name, built):
    def build(call):
        found = builder(call)
        return found if found is None else built.add(name) or found

    return build


def test_every_entry_has_a_call():
    """An operation with arguments is called with them; one that needs none, and is called with one, would fail."""
    assert set(CALLS) <= set(PACKETS), f"no longer in the table: {sorted(set(CALLS) - set(PACKETS))}"
    for name in set(PACKETS) - set(CALLS):
        PACKETS[name](torch.ones(2))


@pytest.mark.parametrize(("name", "dtype"), cases(), ids=str)
def test_an_operation_of_the_score(name, dtype):
    ours, eager, exact, built = computed(groups()[name], dtype, "reference")
    assert name in built, "the operation reached no builder: nothing was tested"
    assert_as_exact_as_eager(ours[name], eager[name], exact[name], name=name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PACKETS))
def test_an_operation_in_kernels(name):
    ours, eager, exact, _ = computed(groups()[name], torch.float32, "auto")
    assert_as_exact_as_eager(ours[name], eager[name], exact[name], name=name)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_bits_of_integers(dtype):
    """Masks of bits and shifts of numbers that wrap in their dtype, negative ones among them."""
    numbers = (torch.arange(13) * 39 - (0 if dtype is torch.uint8 else 200)).to(dtype)
    ways = [lambda x: x & 7, lambda x: x & 1, lambda x: x & -8, lambda x: x & 0x70, lambda x: x << 1, lambda x: x << 3,
            lambda x: x >> 1, lambda x: x >> 5, lambda x: (x << 4) >> 4]  # fmt: skip

    def attend(q, k, v, x):
        return [torch.softmax(q @ k.mT + way(x) * 0.01, -1) @ v for way in ways]

    given = [torch.randn(2, 5, 8), torch.randn(2, 13, 8), torch.randn(2, 13, 8), numbers]
    found = torch.compile(attend, backend="fusion", options={"inner": "eager"})(*given)
    exact = attend(*(x.double() if x.is_floating_point() else x for x in given))
    for ours, eager, wide in zip(found, attend(*given), exact, strict=True):
        assert_as_exact_as_eager(ours, eager, wide)
