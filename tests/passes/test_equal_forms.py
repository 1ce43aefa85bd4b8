"""Equal forms of what is fused: numbers put at listed places of scores, scores by `F.linear`, a result in float64.
Values and gradients, with rows without a live key and infinities."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from tests.numerics import assert_as_exact_as_eager

N, M = 11, 14
I, DATA = torch.arange(N), torch.tensor([3, 0, -1, 3])
NINF = -math.inf


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 3


def _put(places, number: float = NINF):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = _scores(q, k)
        s[places] = number
        return s.softmax(-1) @ v

    return attend


def _filled(change):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(_scores(q, k)).softmax(-1) @ v

    return attend


def _diagonal(*where, number: float = NINF, turned: bool = False):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = _scores(q, k)
        s.diagonal(*where).fill_(number)
        return s.softmax(-1) @ v

    return attend


def _put_into_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = _scores(q, k).softmax(-1) * 1.5
    w[:, :, I, I] = 0.0
    return w @ v


FORMS = {
    "diagonal put by positions": _put((slice(None), slice(None), I, I)),
    "positions that are data, negative and repeated": _put((slice(None), slice(None), DATA, DATA)),
    "rows and keys that are listed": _put((slice(None), slice(None), I[:3, None], DATA)),
    "one head's keys": _put((slice(None), torch.tensor([1, 0]), slice(None), torch.tensor([2, 5])), -2.5),
    "rows without a live key": _put((slice(None), slice(None), I[2:4, None], torch.arange(M))),
    "a diagonal of weights": _put_into_weights,
    "index_fill": _filled(lambda s: s.index_fill(-1, torch.tensor([0, 3]), NINF)),
    "index_fill of data": _filled(lambda s: s.index_fill(-1, DATA, NINF)),
    "index_fill of rows, which have no live key": _filled(lambda s: s.index_fill(2, DATA, NINF)),
    "index_fill in place": _filled(lambda s: s.index_fill_(-1, DATA, 1.5)),
    "diagonal": _diagonal(0, -2, -1),
    "diagonal above": _diagonal(2, -2, -1),
    "diagonal below, turned": _diagonal(-3, -1, -2, number=0.5),
    "result in float64": lambda q, k, v: (_scores(q, k).softmax(-1) @ v).double(),
}


def _tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, n, 8) for n in (N, M, M)]


def _outputs_and_gradients(function, given: list[Tensor]) -> list[Tensor]:
    given = [x.clone().requires_grad_() for x in given]
    out = function(*given)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, upstream)]


def _assert_fused(function, given: list[Tensor], sites: int = 1, inner: str = "eager") -> None:
    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", fullgraph=True, options={"inner": inner})
        ours = _outputs_and_gradients(compiled, given)
    met = [site for report in reports for site in report.sites]
    assert len(met) == sites and all(site.fused for site in met), [site.reason for site in met]
    exact = _outputs_and_gradients(function, [x.double() for x in given])
    assert_as_exact_as_eager(ours, _outputs_and_gradients(function, given), exact)


@pytest.mark.parametrize("name", FORMS)
def test_of_one_attention(name: str) -> None:
    _assert_fused(FORMS[name], _tensors())


@pytest.mark.parametrize("special", [math.inf, NINF, math.nan])
@pytest.mark.parametrize("name", ["diagonal put by positions", "index_fill of data", "diagonal above"])
def test_infinities_beneath_what_is_put(name: str, special: float) -> None:
    q, k, v = _tensors()
    k[:, :, 3, 0] = special
    _assert_fused(FORMS[name], [q, k, v])


KEEP = torch.rand(N, M, generator=torch.Generator().manual_seed(3)) > 0.4
KEEP[2] = False


def _masked(q: Tensor, k: Tensor) -> Tensor:
    return _scores(q, k).masked_fill(~KEEP, NINF)


def _gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _masked(q, k)
    return (s.softmax(-1) * torch.sigmoid(s)) @ v


def _times_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    return (s.masked_fill(~KEEP, NINF).softmax(-1) * (s + 1)) @ v


def _dead_rows_by_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _masked(q, k).softmax(-1).masked_fill(~KEEP.any(-1, keepdim=True), 0) @ v


def _rows_kept(rows: Tensor):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = _masked(q, k)
        return torch.where(rows, (s - s.amax(-1, keepdim=True)).softmax(-1), 0) @ v

    return attend


def _dead_rows_by_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _masked(q, k)
    return s.softmax(-1).masked_fill((s == NINF).all(-1, keepdim=True), 0) @ v


def _safe_softmax_decomposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As torch decomposes `_safe_softmax` in an exported program."""
    s = _masked(q, k)
    w = s.softmax(-1)
    return (torch.where(s.eq(NINF).all(-1, keepdim=True), torch.zeros_like(w), w) * 0.5) @ v


FORMS |= {
    "rows of which the scores leave nothing": _dead_rows_by_the_scores,
    "a safe softmax, decomposed": _safe_softmax_decomposed,
    "rows of which the mask leaves nothing": _dead_rows_by_the_mask,
    "some rows": _rows_kept(torch.arange(N)[:, None] % 3 > 0),
    "none of some rows": _rows_kept(torch.arange(N)[:, None] % 3 > 2),
}


@pytest.mark.parametrize("special", [None, math.inf, NINF, math.nan])
@pytest.mark.parametrize("function", [_gated, _times_scores], ids=lambda f: f.__name__)
def test_weights_times_a_function_of_their_scores(function, special: float | None) -> None:
    q, k, v = _tensors()
    if special is not None:
        q[0, 0, 2, 0] = k[1, 1, 3, 0] = special
    for given, fused in (([q, k, v], True), ([q.clone().requires_grad_(), k, v], False)):
        with fusion.collect_reports() as reports:
            ours = torch.compile(function, backend="fusion", options={"inner": "eager"})(*given)
        (site,) = (site for report in reports for site in report.sites)
        assert site.fused is fused and (fused or "a function of their scores, in training" in site.reason), site.reason
        exact = function(*(x.detach().double() for x in given))
        assert_as_exact_as_eager(ours.detach(), function(*given).detach(), exact)


@pytest.mark.parametrize("special", [math.inf, NINF, math.nan])
def test_rows_that_are_nan_for_another_reason_stay(special: float) -> None:
    q, k, v = _tensors()
    q[0, 0, 2, 0] = q[0, 0, 5, 1] = k[1, 1, 3, 0] = special
    with torch.no_grad():
        ours = torch.compile(_dead_rows_by_the_scores, backend="fusion", options={"inner": "eager"})(q, k, v)
    exact = _dead_rows_by_the_scores(q.double(), k.double(), v.double())
    assert_as_exact_as_eager(ours, _dead_rows_by_the_scores(q, k, v), exact)


def test_a_function_of_scores_that_masked_keys_make_infinite_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = _masked(q, k)
        return (s.softmax(-1) * s) @ v

    (site,) = fusion.explain(attend, *_tensors()).sites
    assert not site.fused and "not linear" in site.reason


def _part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = _scores(q, k)
    log_sum = s.logsumexp(-1, keepdim=True)
    return (s - log_sum).exp() @ v, log_sum


def _merged_by_log_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (a, x), (b, y) = _part(q, k, v), _part(q, k[..., :9, :] * 0.7, v[..., :9, :] + 1)
    both = torch.logaddexp(x, y)
    return a * (x - both).exp() + b * (y - both).exp()


def _merged_by_sigmoids(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (a, x), (b, y) = _part(q, k, v), _part(q, k[..., :9, :] * 0.7, v[..., :9, :] + 1)
    return b + (a - b) * torch.sigmoid(x - y)


@pytest.mark.parametrize("function", [_merged_by_log_sums, _merged_by_sigmoids], ids=lambda f: f.__name__)
def test_parts_of_the_keys_that_are_merged(function) -> None:
    """Each writes its log-sum-exp, and not what is made of both."""
    _assert_fused(function, _tensors(), sites=2)


def test_a_number_that_is_trained() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, number: Tensor) -> Tensor:
        return _scores(q, k).index_fill(-1, DATA.abs(), number).softmax(-1) @ v

    _assert_fused(attend, [*_tensors(), torch.tensor(0.3)])


def test_a_place_that_is_not_there_is_an_error_as_in_eager() -> None:
    given = _tensors()
    attend = lambda q, k, v, i: _scores(q, k).index_fill(-1, i, NINF).softmax(-1) @ v
    compiled = torch.compile(attend, backend="fusion", options={"inner": "eager"})
    compiled(*given, DATA)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(*given, torch.tensor([0, M, 1, 2]))


@pytest.mark.parametrize("shared", [True, False])
def test_scores_by_a_linear_function(shared: bool) -> None:
    """Keys that every row shares, and as a memory of as many values."""
    torch.manual_seed(0)
    q, keys, values = torch.randn(2, N, 8) if shared else torch.randn(N, 8), torch.randn(M, 8), torch.randn(M, 6)
    _assert_fused(lambda q, k, v: F.linear(q, k).softmax(-1) @ v, [q, keys, values])


def test_a_linear_layer_stays_one() -> None:
    """Two layers and a softmax between them are no attention."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Softmax(-1), torch.nn.Linear(16, 8))
    with fusion.collect_reports() as reports:
        torch.compile(net, backend="fusion", options={"inner": "eager"})(torch.randn(4, 8))
    assert not [site for report in reports for site in report.sites]
