"""Validation sees where a derivative at a tie is that of another version of torch: each convention put in by hand."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.caching import BoundedCache
from fusion.ir.expr import Expr, const
from fusion.ir.ops import apply, where
from fusion.passes.pullback import pointwise
from fusion.validation import sites
from tests.fusion.validation import faults

aten = torch.ops.aten
HALF = 0.5

POINTS = {
    "relu": (torch.relu, {0: (1, HALF)}),
    "abs": (torch.abs, {0: (1, -1)}),
    "leaky_relu": (F.leaky_relu, {0: (1,)}),
    "elu": (lambda s: F.elu(s, 0.5), {0: (1,)}),
    "selu": (F.selu, {0: (1.0507,)}),
    "hardtanh": (F.hardtanh, {-1: (1, HALF), 1: (1, HALF)}),
    "relu6": (F.relu6, {0: (1, HALF), 6: (1,)}),
    "hardsigmoid": (F.hardsigmoid, {-3: (1 / 6,), 3: (1 / 6,)}),
    "hardswish": (F.hardswish, {-3: (-0.5,), 3: (1.5,)}),
    "softshrink": (F.softshrink, {-0.5: (1,), 0.5: (1,)}),
    "hardshrink": (F.hardshrink, {-0.5: (1,), 0.5: (1,)}),
    "threshold": (lambda s: F.threshold(s, 0.5, 0.5), {0.5: (1, HALF)}),
    "clamp": (lambda s: s.clamp(-1, 2), {-1: (HALF, "other"), 2: (HALF, "other")}),
    "clamp_min": (lambda s: aten.clamp_min(s, 0), {0: (HALF, "other")}),
    "clamp_max": (lambda s: aten.clamp_max(s, 1), {1: (HALF, "other")}),
}
"""Operation: (a call of it, {point: slopes that torch does not have there}); "other" is 1 - torch's own."""

SHARED = {
    "maximum": (torch.maximum, "either"),
    "minimum": (torch.minimum, "either"),
    "logaddexp": (torch.logaddexp, "logarithm"),
    "clamp_min of a tensor": (lambda s, t: torch.clamp(s, min=t), "clamp"),
    "clamp_max of a tensor": (lambda s, t: torch.clamp(s, max=t), "clamp"),
    "clamp between tensors": (lambda s, t: torch.clamp(s, min=t, max=t + 1), "clamp"),
}
RULES = [
    *((name, point, slope) for name, (_, points) in POINTS.items() for point, all_ in points.items() for slope in all_),
    *((name, "tie", share) for name, (_, kind) in SHARED.items() for share in ("all", "none") if kind != "clamp"),
    *((name, "rule", k) for name, (_, kind) in SHARED.items() for k in (1, 2) if kind == "clamp"),
]


def of_score(function, q, k, v):
    return function(q @ k.mT).softmax(-1) @ v


def of_score_and_bias(function, q, k, v, bias):
    return function(q @ k.mT, bias).softmax(-1) @ v


def slope_at(function, point):
    x = torch.tensor(float(point), requires_grad=True)
    return torch.autograd.grad(function(x), x)[0].item()


def put_in(monkeypatch, name, point, given):
    """Another convention for one operation."""
    if point == "rule":
        own, shares = pointwise._share_on_bound, (1.0, 0.0, 0.5)
        another = functools.cache(lambda tensors: shares[(shares.index(own(tensors)) + given) % len(shares)])
        monkeypatch.setattr(pointwise, "_share_on_bound", another)
        return

    def wrong(right, call):
        made = right(call)
        if made is None:
            return made
        first, *others = (arg for arg in call.args if isinstance(arg, Expr))
        if point == "tie":
            (second,) = others
            side = first if given == "all" else apply("detach", first)
            shift = math.log(2) if name == "logaddexp" else 0.0
            return where(apply("feq", first, second), side + shift, made)
        function = POINTS[name][0]
        slope = 1 - slope_at(function, point) if given == "other" else given
        value = function(torch.tensor(float(point))).item()
        line = const(value) + (first - float(point)) * float(slope)
        return where(apply("feq", first, const(float(point))), line, made)

    for packet in {getattr(aten, name), aten.clamp} & {*pointwise.BUILDERS}:
        monkeypatch.setitem(pointwise.BUILDERS, packet, functools.partial(wrong, pointwise.BUILDERS[packet]))


def compiled(name):
    torch._dynamo.reset()
    given = faults.inputs(True)
    function, pattern = (POINTS[name][0], of_score) if name in POINTS else (SHARED[name][0], of_score_and_bias)
    if name in SHARED:
        given.append(torch.randn(faults.LENGTH, faults.LENGTH, requires_grad=True))
    with fusion.collect_reports() as reports:
        options = {"inner": "eager", "emitter": "reference", "verify": True}
        torch.compile(functools.partial(pattern, function), backend="fusion", options=options)(*given)
    ((site,),) = [report.sites for report in reports]
    return site


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())


@pytest.mark.parametrize("name", [*POINTS, *SHARED])
def test_the_convention_of_this_torch_is_right(name):
    site = compiled(name)
    assert site.reason is None
    assert "gradients" in site.validated


@pytest.mark.parametrize(("name", "point", "given"), RULES)
def test_another_convention_is_seen(monkeypatch, name, point, given):
    put_in(monkeypatch, name, point, given)
    site = compiled(name)
    assert not site.fused
    assert "a defect of fusion" in site.reason and "gradient" in site.reason
    assert "values that tie" in site.reason


def test_there_are_enough():
    assert len(RULES) >= 30
