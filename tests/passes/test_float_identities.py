"""Every builder of a pointwise operation against the operation itself, on scalars: values and gradients at all special
values, at both sides of every kink, and at random ones."""

import math

import pytest
import torch

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import Expr, Kind, load
from fusion.ir.ops import evaluate
from fusion.passes.pullback.casts import Call
from fusion.passes.pullback.pointwise import BUILDERS, build
from tests.numerics import assert_as_exact_as_eager

aten = torch.ops.aten
_FINFO = torch.finfo(torch.float32)
_MAGNITUDES = (0.0, 1e-42, _FINFO.tiny, 1e-20, 1e-6, 0.1, 0.3, 0.5, 0.6, 0.999, 1.0 - 2.0**-24, 1.0, 1.5, 2.0, 2.5,
               3.0, 6.0, 17.0, 20.0, 20.5, 60.0, 88.0, 89.0, 104.0, 1e4, 16777217.0, 1e20, 1e30, _FINFO.max,
               math.inf)  # fmt: skip
SPECIAL = torch.tensor([s * m for m in _MAGNITUDES for s in (1.0, -1.0)] + [math.nan])
ORDINARY = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 3
BANDS = ((0.0, 1e-3), (1e-3, 50.0), (50.0, 1e6), (1e6, math.inf))
"""Of the magnitude of the arguments: the rule is one of a whole tensor, in which large values hide small ones."""


class Case:
    """A call of a builder: `operation(*first, *operands, *rest, **keywords)`, with so many operands that are tensors.

    least, limit: smaller and larger magnitudes are left out: there torch's own answer depends on the length of the
    tensor, or something overflows on the way to a finite one, there or here.
    """

    def __init__(self, name: str, *rest, operands: int = 1, first=(), least=0.0, limit=math.inf, **keywords):
        self.name, self.rest, self.operands, self.first, self.keywords = name, rest, operands, first, keywords
        self.least, self.limit = least, limit

    def __str__(self) -> str:
        given = [*self.first, *self.rest, *(f"{k}={v}" for k, v in self.keywords.items())]
        return f"{self.name}({', '.join(map(str, given))})"

    def call(self, *tensors):
        return getattr(aten, self.name)(*self.first, *tensors, *self.rest, **self.keywords)

    def expression(self, leaves: list[Expr], dtype: torch.dtype) -> Expr:
        call = Call(args=(*self.first, *leaves, *self.rest), kwargs=self.keywords, dtype=dtype)
        expr = build(getattr(aten, self.name), call)
        assert expr is not None
        return expr


_PLAIN = """neg abs reciprocal relu leaky_relu softplus elu sign hardsigmoid hardtanh hardswish relu6 log_sigmoid log2
tan round nan_to_num floor ceil trunc sqrt rsqrt exp log log1p expm1 sin cos tanh sigmoid erf atan special_expit
special_erf celu selu hardshrink softshrink atanh frac erfc log10 deg2rad positive negative absolute fix sgn
arctan arctanh special_ndtr rad2deg special_round"""
_LIMITED = {"square": 1e30, "silu": 1e30, "mish": 1e30, "gelu": 1e30, "exp2": 20.0}
_BINARY = "add sub rsub mul div true_divide minimum maximum max min pow logaddexp multiply divide subtract"
_PREDICATES = "isnan isinf isposinf isneginf isfinite"
_COMPARISONS = "eq ne lt le gt ge less less_equal not_equal greater greater_equal"
CASES = [
    *(Case(name) for name in _PLAIN.split()), *(Case(name, limit=limit) for name, limit in _LIMITED.items()),
    *(Case(name, operands=2) for name in _BINARY.split()),
    *(Case("pow", exponent) for exponent in (0, 0.5, 1, 3, 4, 8, -1, -2, -3, -1.5, 9)),
    Case("pow", 2, limit=1e30), Case("pow", 1.5, limit=1e30), Case("pow", -0.5, least=1e-9),
    *(Case("pow", first=(base,)) for base in (2.0, 0.5, 0.0)),
    *(Case(name, 0.3) for name in ("add", "sub", "mul", "div", "rsub")),
    *(Case(name, 0.0) for name in ("add", "sub", "mul")), Case("div", -3.0), Case("add", 1.0, alpha=2.5),
    Case("add", 1.0, 2.5), Case("sub", 1.0, 2.5), Case("rsub", 1.0, 2.5),
    *(Case("lerp", weight, operands=2, limit=1e30) for weight in (0.0, 0.25, 0.5, 0.6, 1.0, -1.0, 2.0)),
    Case("lerp", operands=3, limit=1e18),
    Case("addcmul", operands=3, limit=1e18), Case("addcmul", operands=3, value=0.5, limit=1e18),
    Case("addcdiv", operands=3, least=0.01, limit=1e18), Case("addcdiv", operands=3, value=0.5, least=0.01, limit=1e18),
    *(Case(name, *args) for name in ("clamp", "clip") for args in ((-1.0, 2.0), (None, 2.0), (-1.0,), (3.0, 2.0))),
    Case("clamp_min", 0.5), Case("clamp_max", 0.5), Case("clamp_min", operands=2), Case("clamp_max", operands=2),
    Case("gelu", approximate="tanh", limit=1e30), Case("leaky_relu", 0.3), Case("leaky_relu", -0.3),
    Case("elu", 1.5, 2.0, 0.5), Case("softplus", 2.0, 10.0), Case("hardtanh", -2.0, 0.5), Case("celu", 0.5),
    Case("threshold", 0.1, -2.0), Case("hardshrink", 1.5), Case("softshrink", 1.5), Case("nan_to_num", 1.0, 2.0, -3.0),
    Case("div", operands=2, rounding_mode="trunc"),
    Case("remainder", 2.0), Case("remainder", -0.5, limit=1e30),
    Case("_prelu_kernel", operands=2), Case("ldexp", operands=2, limit=60.0),
    *(Case(name) for name in _PREDICATES.split()), *(Case(name, operands=2) for name in _COMPARISONS.split()),
]  # fmt: skip
OTHERS = """floor_divide where masked_fill logical_and logical_or logical_not logical_xor bitwise_and
bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ bitwise_left_shift bitwise_right_shift __lshift__
__rshift__"""
"""Builders of operations on predicates and integers."""


def test_every_builder_has_a_case():
    assert set(BUILDERS) == {getattr(aten, name) for name in {*(c.name for c in CASES), *OTHERS.split()}}


def _operands(count: int, values: torch.Tensor) -> list[torch.Tensor]:
    """Every combination of the values, fewer of them where that would be many."""
    if count == 3:
        values = values[torch.tensor([i for i in range(len(values)) if i % 5 in (0, 1) or i > len(values) - 4])]
    return [x.flatten() for x in torch.meshgrid(*[values] * count, indexing="ij")]


def _evaluate(expr: Expr, leaves: list[Expr], tensors: list[torch.Tensor], upstream: torch.Tensor) -> torch.Tensor:
    values = dict(zip(leaves, tensors, strict=True)) | {UPSTREAM: upstream}
    return evaluate(expr, values.__getitem__, tensors[0].dtype).expand(upstream.shape)


def _eager(case: Case, tensors: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out = case.call(*tensors)
    if not out.requires_grad:
        return [out]
    found = torch.autograd.grad(out, tensors, upstream, allow_unused=True)
    return [out, *(torch.zeros_like(x) if f is None else f for f, x in zip(found, tensors, strict=True))]


def _ours(case: Case, tensors: list[torch.Tensor], upstream: torch.Tensor, gradients: bool) -> list[torch.Tensor]:
    leaves = [load(n, (), Kind.FLOAT) for n in range(case.operands)]
    expr = case.expression(leaves, torch.float32 if gradients else case.call(*tensors).dtype)
    wanted = adjoints(expr, UPSTREAM, leaves) if gradients else {}
    return [_evaluate(e, leaves, tensors, upstream) for e in (expr, *wanted.values())]


@pytest.mark.parametrize("arriving", [1.0, 0.0, -2.5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_torch(case: Case, arriving: float):
    for values in (SPECIAL, ORDINARY[: 200 if case.operands == 1 else 20]):
        tensors = _operands(case.operands, values)
        upstream = torch.full_like(tensors[0], arriving)
        eager = _eager(case, tensors, upstream)
        exact = _eager(case, [x.double() for x in tensors], upstream.double())
        ours = _ours(case, tensors, upstream, gradients=len(eager) > 1)
        for group in (ours, eager, exact):  # where the value is NaN, its gradient says nothing
            group[1:] = [torch.where(group[0].isnan(), 0.0, x) for x in group[1:]]
        size = torch.stack([x.abs() for x in tensors]).amax(0)
        size[torch.stack([(x.abs() > case.limit) | (x.abs() < case.least) for x in tensors]).any(0)] = -1.0
        for low, high in BANDS:
            here = ((size >= low) & (size < high)) | (size.isnan() | size.isinf() if high == math.inf else False)
            if here.any():
                parts = ([x[here] for x in group] for group in (ours, eager, exact))
                assert_as_exact_as_eager(*parts, name=f"{case} at {low} to {high}")


@pytest.mark.parametrize("name, divisor", [("floor_divide", 0.1), ("remainder", 2.5), ("floor_divide", None)])
def test_quotients_that_are_rounded_before_they_are_rounded_down_are_not_expressed(name, divisor):
    x, y = (load(n, (), Kind.FLOAT) for n in range(2))
    call = Call(args=(x, y if divisor is None else divisor), kwargs={}, dtype=torch.float32)
    assert build(getattr(aten, name), call) is None
