"""Biases whose keys lie apart in memory are laid out anew where that pays, and stay right where they are written to."""

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager

N, H = 40, 3
TABLE, POSITIONS = torch.randn(9, H), torch.randint(0, 9, (N, N))
Z, W = torch.randn(N, N, 8), torch.randn(8, H)


def attention(q, k, v, bias):
    return torch.softmax(q @ k.mT / 4 + bias, -1) @ v


def from_pairs(q, k, v, x):
    """A linear layer of what is known of pairs, as in AlphaFold's triangles."""
    return attention(q, k, v, (Z.to(x.dtype) @ x).permute(2, 0, 1))


def given(q, k, v, x):
    return attention(q, k, v, x.permute(2, 0, 1))


def written_to(q, k, v, x):
    """After it is read."""
    bias = Z.to(x.dtype) @ x
    out = attention(q, k, v, bias.permute(2, 0, 1))
    bias[:, 1:3] += 2
    return out + bias.sum()


def inputs(batch: int, x: torch.Tensor, trained: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [t.requires_grad_(trained) for t in (*(torch.randn(batch, H, N, 16) for _ in range(3)), x.clone())]


def strides_read(function, args) -> list[tuple[int, ...]]:
    """Strides of the biases that attentions are given in the graph."""
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        torch.compile(function, backend="fusion", options={"inner": "eager", "training": "always"})(*args)
    calls = [node for node in reports[0].graph_after.graph.nodes if str(node.target).startswith("fusion.attention")]
    return [call.args[0][3].meta["val"].stride() for call in calls]


def looked_up(q, k, v, x):
    return attention(q, k, v, x[POSITIONS].permute(2, 0, 1))


@pytest.mark.parametrize(
    ("function", "x", "batch", "trained", "together"),
    [
        (from_pairs, W, 2, False, True),
        (from_pairs, W, 2, True, True),
        (from_pairs, W, 1, False, True),
        (given, torch.randn(N, N, H), 2, False, True),
        (given, torch.randn(N, N, H), 1, False, False),
        (looked_up, TABLE, 1, False, True),
        (looked_up, TABLE, 1, True, False),
    ],
)
def test_where_keys_are_put_together(function, x, batch: int, trained: bool, together: bool) -> None:
    strides = strides_read(function, inputs(batch, x, trained))
    assert [min(stride) == stride[1] for stride in strides] == [together], strides


@pytest.mark.one_in(3)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", [from_pairs, given, looked_up, written_to])
def test_as_exact_as_eager(function, trained: bool, inner: str) -> None:
    x = {"given": torch.randn(N, N, H), "looked_up": TABLE}.get(function.__name__, W)

    def run(function, args):
        out = function(*args)
        return (out, *torch.autograd.grad(out.square().sum(), args)) if trained else (out,)

    args = inputs(2, x, trained)
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": inner, "training": "always"})
        found = run(compiled, args)
    assert sum(report.fused for report in reports) >= 1
    exact = run(function, [t.detach().double().requires_grad_(trained) for t in args])
    assert_as_exact_as_eager(found, run(function, args), exact)
