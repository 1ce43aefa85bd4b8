"""Operations that are traced as those that they are made of, in scores, on weights and behind them: fused, and values
and gradients those of eager mode, also where gradients jump."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from tests.numerics import assert_as_exact_as_eager


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 3


def _weighted(change):
    return lambda q, k, v: change(_scores(q, k)).softmax(-1) @ v


SLOPES = torch.tensor([0.2, -0.5])
IN_SCORES = {
    "glu": lambda s: F.glu(torch.cat([s, s * 0.5], -1)),
    "prelu": lambda s: F.prelu(s, SLOPES.to(s.dtype)),
    "prelu of one slope": lambda s: F.prelu(s, SLOPES[:1].to(s.dtype)),
    "float_power": lambda s: torch.float_power(s.abs() + 0.5, 1.5).to(s.dtype),
    "losses of pairs": lambda s: -F.mse_loss(s, s.new_ones(()).expand_as(s), reduction="none"),
    "huber": lambda s: -F.huber_loss(s, s.new_zeros(()).expand_as(s), reduction="none", delta=0.5),
    "smooth_l1": lambda s: -F.smooth_l1_loss(s, s.new_zeros(()).expand_as(s), reduction="none", beta=0.5),
    "l1": lambda s: -F.l1_loss(s, s.new_zeros(()).expand_as(s), reduction="none"),
    "soft_margin": lambda s: -F.soft_margin_loss(s, s.new_ones(()).expand_as(s), reduction="none"),
    "bce_with_logits": lambda s: F.binary_cross_entropy_with_logits(s, s.new_ones(()).expand_as(s), reduction="none"),
    "ndtr": torch.special.ndtr,
    "cast to long": lambda s: s + s.long(),
    "masked by a cast": lambda s: s.masked_fill(s.long() == 1, -float("inf")),
}


@pytest.mark.parametrize("name", IN_SCORES)
def test_in_scores(name: str) -> None:
    torch.manual_seed(0)
    q, k = (torch.randint(-3, 4, (1, 2, n, 8)) / 2 for n in (11, 13))  # at kinks, too
    _assert_fused(_weighted(IN_SCORES[name]), [q, k, torch.randn(1, 2, 13, 8)])


LOSSES = {
    "mse": lambda w, t: F.mse_loss(w, t),
    "l1 of sums": lambda w, t: F.l1_loss(w, t, reduction="sum"),
    "huber": lambda w, t: F.huber_loss(w, t, delta=0.1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_weights(name: str) -> None:
    torch.manual_seed(0)
    target = torch.rand(1, 2, 11, 13)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = _scores(q, k).softmax(-1)
        return (w @ v) * LOSSES[name](w, target.to(w.dtype))

    _assert_fused(attend, [torch.randn(1, 2, n, 8) for n in (11, 13, 13)])


def _assert_fused(attend, given: list[Tensor]) -> None:
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        compiled = torch.compile(attend, backend="fusion", fullgraph=True, options={"inner": "eager"})
        ours = _outputs_and_gradients(compiled, given)
    sites = [site for report in reports for site in report.sites]
    assert sites and all(site.fused for site in sites), [site.reason for site in sites]
    exact = _outputs_and_gradients(attend, [x.double() for x in given])
    assert_as_exact_as_eager(ours, _outputs_and_gradients(attend, given), exact)


def _outputs_and_gradients(function, given: list[Tensor]) -> list[Tensor]:
    given = [x.clone().requires_grad_() for x in given]
    out = function(*given)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, upstream)]
