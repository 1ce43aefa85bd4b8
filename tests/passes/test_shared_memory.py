"""Writes through what shares memory with a tensor though its operation does not say so, or holds a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion
from tests.numerics import assert_as_exact_as_eager


def attention(x):
    return torch.softmax(x @ x.mT * 0.2, -1) @ x


def checkpointed(function):
    return lambda x: checkpoint(function, x, use_reentrant=False)


SAME = {
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout1d": lambda x: F.dropout1d(x, 0.5, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=False),
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1])[0],
    "conj_physical": torch.conj_physical,
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "meshgrid": lambda x: torch.meshgrid(x.view(-1), x[0, 0], indexing="ij")[0][:, 0].view(x.shape),
    "checkpoint": checkpointed(lambda x: x.view(x.shape)),
    "checkpoint_of_two": lambda x: checkpointed(lambda x: (attention(x), x.mT))(x)[1].mT,
    "checkpoint_of_a_checkpoint": checkpointed(checkpointed(lambda x: x[:, :])),
}
SOURCES = {"input": lambda x: x, "local": lambda x: x * 2, "attention": attention}


def through_the_copy(x, same):
    y = same(x)
    y[:, 3].mul_(3)
    return attention(x), y * 1, x * 1


def through_the_tensor(x, same):
    y = same(x)
    x[:, 3].mul_(3)
    return attention(y), y * 1, x * 1


def run(function, x, train):
    x = x.clone().requires_grad_(train)
    given = x * 1
    results = *function(given), given
    return *results, *(torch.autograd.grad(sum(r.square().sum() for r in results), x) if train else ())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("same", SAME)
@pytest.mark.parametrize("write", [through_the_copy, through_the_tensor])
def test_a_write_is_seen_by_all(write, same, source, train):
    def function(x):
        return write(SOURCES[source](x), SAME[same])

    torch._dynamo.reset()
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "training": "always"})
    with fusion.collect_reports() as reports:
        actual = run(compiled, x, train)
    assert all(report.sites for report in reports)
    assert_as_exact_as_eager(actual, run(function, x, train), run(function, x.double(), train))


def test_what_a_checkpointed_part_makes_is_its_own():
    """A write to it needs no memory of others: the attention behind it is fused, and so is the one inside."""

    def function(x):
        y = checkpoint(attention, x, use_reentrant=False)
        y += x
        return attention(y)

    torch._dynamo.reset()
    x = torch.randn(2, 5, 4, requires_grad=True)
    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "training": "always"})
        results = [
            (out := run(given), *torch.autograd.grad(out.square().sum(), given))
            for run, given in ((compiled, x), (function, x), (function, x.detach().double().requires_grad_()))
        ]
    assert sum(report.fused for report in reports) == 2
    assert_as_exact_as_eager(*results)
