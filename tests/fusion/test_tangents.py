"""Tangents of an attention that kernels compute, without the reference interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion
from fusion.runtime import derivatives
from tests.numerics import assert_as_exact_as_eager

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

SHAPES = (2, 4, 37, 16), (2, 4, 51, 16), (2, 4, 51, 24)
LENGTHS = torch.tensor([20, 0])


def plain(q, k, v, b):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def biased(q, k, v, b):
    return torch.softmax(q @ k.mT / 4 + b, -1) @ v


def causal(q, k, v, b):
    rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return torch.softmax((q @ k.mT / 4).masked_fill(keys > rows, -torch.inf), -1) @ v


def padded(q, k, v, b):
    """Rows of one batch element have no live key."""
    keep = torch.arange(k.shape[-2]) < LENGTHS[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def grouped(q, k, v, b):
    k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    return plain(q, k, v, b)


def heads_inside(q, k, v, b):
    """The output's memory has the heads within the rows."""
    return plain(q, k, v, b).transpose(1, 2)


def drawn(dtype=torch.float32, means=(0, 0, 0, 0, 0, 0)):
    torch.manual_seed(0)
    tensors = [torch.randn(shape) + mean for shape, mean in zip(SHAPES + SHAPES, means, strict=True)]
    return [x.to(dtype) for x in tensors]


def moved(attend, which, bias):
    """The value and tangent of an attention, by Q, K and V of which some move."""

    def run(q, k, v, *tangents):
        given = [q, k, v]

        def partial(*moving):
            left = iter(moving)
            return attend(*(next(left) if w else x for w, x in zip(which, given, strict=True)), bias.to(q.dtype))

        pairs = [(x, t) for w, x, t in zip(which, given, tangents, strict=True) if w]
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(partial, *map(tuple, zip(*pairs, strict=True)))

    return run


def check(function, inputs, by_kernels, monkeypatch):
    torch._dynamo.reset()
    calls = []
    reference = derivatives.derivative
    monkeypatch.setattr(derivatives, "derivative", lambda *given: calls.append(given) or reference(*given))
    compiled = torch.compile(function, backend="fusion", options={"transforms": "always", "inner": "aot_eager"})
    with fusion.collect_reports() as reports:
        actual = compiled(*inputs)
    assert [report.fused for report in reports] == [1]
    assert (not calls) is by_kernels
    exact = function(*(x.double() for x in inputs))
    assert_as_exact_as_eager(list(actual), list(function(*inputs)), list(exact), inputs[0].dtype)


@pytest.mark.parametrize(
    ("attend", "which"),
    [(plain, (1, 0, 0)), (plain, (0, 1, 0)), (causal, (0, 0, 1)), (grouped, (0, 1, 1)),
     *((attend, (1, 1, 1)) for attend in (plain, biased, causal, padded, grouped, heads_inside))],
)  # fmt: skip
def test_of_some_operands(attend, which, monkeypatch):
    check(moved(attend, which, torch.randn(37, 51)), drawn(), True, monkeypatch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("means", [(0, 0, 20, 0, 10, 0), (2, 5, 0, 3, 0, 0), (0, 0, 0, 0, 0, 20), (3, 0, 20, 0, 10, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_means_that_cancel(dtype, means, monkeypatch):
    """All tangents of a row's scores have a part in common, which does not move its weights."""
    check(moved(plain, (1, 1, 1), torch.zeros(())), drawn(dtype, means), True, monkeypatch)


def capped(q, k, v, b):
    return torch.softmax(torch.tanh(q @ k.mT / 4) * 3, -1) @ v


def filled(q, k, v, b):
    """A fill that has a weight."""
    keep = torch.arange(k.shape[-2]) > 3
    return torch.softmax((q @ k.mT / 4).masked_fill(~keep, -2.0), -1) @ v


def sigmoid(q, k, v, b):
    return torch.sigmoid(q @ k.mT / 4) @ v


def scaled_bias(q, k, v, b):
    """The bias moves with the queries."""
    return torch.softmax(q @ k.mT / 4 + b * q[..., :1], -1) @ v


@pytest.mark.parametrize("attend", [capped, filled, sigmoid, scaled_bias])
def test_what_the_interpreter_computes(attend, monkeypatch):
    check(moved(attend, (1, 1, 1), torch.randn(37, 51)), drawn(), False, monkeypatch)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("where", [1, 2, 4], ids=["k", "v", "tangent of k"])
def test_what_is_not_finite_or_nearly_so(where, value, monkeypatch):
    """It would meet the zeros beside which keys and values are multiplied."""
    inputs = drawn()
    inputs[where][0, 1, 30, 3] = value
    check(moved(causal, (1, 1, 1), torch.zeros(())), inputs, False, monkeypatch)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
@pytest.mark.parametrize("where", [0, 3, 5], ids=["q", "tangent of q", "tangent of v"])
def test_special_values_of_rows_and_of_tangents(where, value, monkeypatch):
    inputs = drawn()
    inputs[where][0, 1, 30, 3] = value
    check(moved(causal, (1, 1, 1), torch.zeros(())), inputs, True, monkeypatch)


def test_a_batch_of_tangents(monkeypatch):
    def rows(q, k, v, *tangents):
        return torch.func.vmap(lambda t: jvp(lambda y: plain(y, k, v, None), (q,), (t,))[1])(torch.stack(tangents))

    q, k, v, *tangents = drawn()
    function = lambda *x: (rows(*x),)
    check(function, [q, k, v, tangents[0], tangents[0].sin()], True, monkeypatch)


def test_without_keys_or_rows(monkeypatch):
    q, k, v, *tangents = drawn()
    for rows, keys in ((0, 51), (37, 0)):
        inputs = [q[..., :rows, :], k[..., :keys, :], v[..., :keys, :]]
        inputs += [tangents[0][..., :rows, :], *(t[..., :keys, :] for t in tangents[1:])]
        torch._dynamo.reset()
        compiled = torch.compile(moved(plain, (1, 1, 1), torch.zeros(())), backend="fusion",
                                 options={"transforms": "always", "inner": "aot_eager"})  # fmt: skip
        for ours, theirs in zip(compiled(*inputs), moved(plain, (1, 1, 1), torch.zeros(()))(*inputs), strict=True):
            assert ours.shape == theirs.shape and torch.equal(ours, theirs)
