"""Functions of floats as compositions of primitives: the same numbers as torch's, and None for other calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.ir.derivative import UPSTREAM, adjoints
from fusion.ir.expr import Expr, Kind, node
from fusion.ir.ops import evaluate
from fusion.passes.pullback.casts import Call
from fusion.passes.pullback.functions import ELEMENTARY
from tests.numerics import assert_as_exact_as_eager, assert_same

aten = torch.ops.aten
X, Y = (node("load", (), Kind.FLOAT, name) for name in "xy")
NUMBERS = torch.tensor([-7.5, -3.0, -1.5, -0.6, -0.25, 0.125, 0.3, 0.75, 1.25, 2.0, 4.0, 6.0], dtype=torch.float64)
TWO = (aten.logaddexp, aten.ldexp, aten._prelu_kernel)
ARGUMENTS: dict[Any, tuple[Any, ...]] = {aten.threshold: (0.1, -2.0), aten.celu: (0.7,), aten.leaky_relu: (0.3,)}


def composed(packet: Any, *args: Any, dtype: torch.dtype = torch.float32) -> Expr | None:
    return ELEMENTARY[packet](Call(args=args, kwargs={}, dtype=dtype))


def by_torch(packet: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """A function's values, and its derivatives by the first argument."""
    x, *rest = given
    values = packet(x.requires_grad_(), *rest, *ARGUMENTS.get(packet, ()))
    values = values[0] if isinstance(values, tuple) else values
    slopes = torch.autograd.grad(values.sum(), x) if values.requires_grad else ()
    return [values.detach(), *slopes]


@pytest.mark.parametrize("packet", ELEMENTARY, ids=str)
def test_values_and_derivatives_are_torchs(packet: Any) -> None:
    x = NUMBERS[NUMBERS.abs() < 1] if packet is aten.atanh else NUMBERS
    given = [x.abs()] if packet in (aten.log2, aten.log10) else [x, x.flip(0)] if packet in TWO else [x]
    leaves = [X, Y][: len(given)]
    expr = composed(packet, *leaves, *ARGUMENTS.get(packet, ()))
    assert expr is not None
    eager, exact = (by_torch(packet, [x.to(dtype) for x in given]) for dtype in (torch.float32, torch.float64))
    known = dict(zip(leaves, given, strict=True)) | {UPSTREAM: torch.ones(())}
    parts = [expr, adjoints(expr, UPSTREAM, [X])[X]][: len(eager)]
    ours = [evaluate(part, lambda leaf: known[leaf].float()).expand(x.shape) for part in parts]
    if eager[0].dtype is torch.bool:
        assert_same(ours, eager)
    else:
        assert_as_exact_as_eager(ours, eager, exact)


@pytest.mark.parametrize("packet", [aten.relu, aten.gelu, aten.sign, aten.log2], ids=str)
def test_of_integers_there_is_none(packet: Any) -> None:
    assert composed(packet, X, dtype=torch.int64) is None


def test_a_rounding_to_decimals_is_left() -> None:
    assert composed(aten.round, X, 2) is None and composed(aten.round, X) is not None
