"""Dropout of the weights: torch's semantics, with a mask that is a function of a seed and the coordinates."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.ir.primitives import hashed
from tests.numerics import assert_as_exact_as_eager, assert_same

B, H, N, D = 2, 3, 40, 16


def plain(q, k, v, p=0.3):
    return F.dropout(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(D), -1), p) @ v


def sdpa(q, k, v, p=0.3):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


def inputs(n=N, width=D):
    return [torch.randn(B, H, n, D), torch.randn(B, H, n, D), torch.randn(B, H, n, width)]


def compiled(function, emitter="auto", inner="aot_eager"):
    options = {"inner": inner, "emitter": emitter, "strict": True}
    return torch.compile(function, backend="fusion", options=options, fullgraph=True)


def dropped_weights(function, q, k):
    """The weights that the attention uses, read off by values that are unit vectors."""
    torch.manual_seed(5)
    return function(q, k, torch.eye(k.shape[-2]).expand(B, H, -1, -1))


@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("function", [plain, sdpa])
def test_elements_are_dropped_or_scaled(function, emitter):
    q, k, _ = inputs()
    weights = dropped_weights(compiled(function, emitter), q, k)
    kept = weights != 0
    units = torch.eye(N).expand(B, H, -1, -1)
    eager, exact = (function(*(x.to(t) for x in (q, k, units)), 0.0) for t in (torch.float32, torch.float64))
    assert 0.6 < kept.sum() / (exact != 0).sum() < 0.8
    assert_as_exact_as_eager(weights, eager * kept / 0.7, exact * kept / 0.7)


@pytest.mark.parametrize("function", [plain, sdpa])
def test_every_emitter_draws_the_same_mask(function):
    q, k, _ = inputs()
    ours, reference = (dropped_weights(compiled(function, e), q, k) for e in ("auto", "reference"))
    assert torch.equal(ours != 0, reference != 0)


def test_masks_follow_the_seed():
    q, k, v = inputs()
    function = compiled(plain, inner="inductor")
    torch.manual_seed(1)
    first, second = function(q, k, v), function(q, k, v)
    torch.manual_seed(1)
    again = function(q, k, v)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("function", [plain, sdpa])
def test_the_backward_has_the_mask_of_the_forward(function, inner):
    q, k, v = inputs()
    found = compiled(function, inner=inner)
    scaled = (dropped_weights(found, q, k) != 0) / 0.7

    def explicit(q, k, v):
        s = q @ k.transpose(-1, -2) / math.sqrt(D)
        s = s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf) if function is sdpa else s
        return (torch.softmax(s, -1) * scaled) @ v

    upstream = torch.randn(B, H, N, D)

    def gradients(function, dtype):
        tensors = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        torch.manual_seed(5)
        out = function(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(dtype))]

    exact, eager = gradients(explicit, torch.float64), gradients(explicit, torch.float32)
    assert_as_exact_as_eager(gradients(found, torch.float32), eager, exact)


def test_recomputation_has_the_mask_of_the_forward():
    q, k, v = (t.requires_grad_() for t in inputs())
    function = compiled(plain)

    def gradients(call):
        torch.manual_seed(3)
        out = call(q, k, v)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    def again(*tensors):
        return checkpoint(function, *tensors, use_reentrant=False)

    assert_same(gradients(again), gradients(function))


def test_what_is_not_fused_keeps_its_dropout():
    def function(x):
        return F.dropout(x @ x.T, 0.5)

    x = torch.randn(8, 8)
    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    assert torch.equal(torch.compile(function, backend="fusion", options={"inner": "eager"})(x), expected)


def test_evaluation_drops_nothing():
    layer = torch.nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
    function = torch.compile(layer, backend="fusion", options={"inner": "aot_eager"})
    x = torch.randn(2, 9, 12)

    def call():
        return function(x, x, x, need_weights=False)[0]

    counters.clear()
    assert not torch.equal(call(), call())
    layer.eval()
    exact = copy.deepcopy(layer).double()(*[x.double()] * 3, need_weights=False)[0]
    assert_as_exact_as_eager(call(), layer(x, x, x, need_weights=False)[0], exact)
    assert counters["fusion"]["fused"] >= 2


# --- the random numbers -----------------------------------------------------------------------------------------


def drawn(seed, rows, columns):
    keys = hashed(torch.tensor(seed), torch.arange(rows))
    return hashed(keys[:, None], torch.arange(columns)).double() / 2**31


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 2])
def test_numbers_are_uniform_and_uncorrelated(seed):
    u = drawn(seed, 1024, 1024)
    count = u.numel()
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * count)
    histogram = torch.histc(u.float(), 64, 0, 1)
    chi = ((histogram - count / 64) ** 2 / (count / 64)).sum()
    assert chi < 63 + 5 * math.sqrt(2 * 63)
    centred = (u - 0.5) * math.sqrt(12)
    for di, dj in ((0, 1), (1, 0), (1, 1), (0, 2), (64, 0), (1, -1)):
        product = (centred * centred.roll((di, dj), (0, 1))).mean()
        assert abs(product) < 5 / math.sqrt(count), (di, dj)


def test_rates_per_row_column_and_seed():
    """Numbers of kept elements are binomial: in rows, in columns, and over seeds for one element."""
    u = drawn(7, 2048, 2048) < 0.9
    for dim in (0, 1):
        z = (u.double().sum(dim) - 0.9 * 2048) / math.sqrt(2048 * 0.09)
        assert z.abs().max() < 5
        assert abs(z.std() - 1) < 0.1
    seeds = hashed(hashed(torch.arange(4096), torch.tensor(17)), torch.tensor(5)).double() / 2**31 < 0.9
    assert abs(seeds.double().mean() - 0.9) < 5 * math.sqrt(0.09 / 4096)


def scores_too(q, k, v, p=0.3):
    return torch.softmax(F.dropout(q @ k.mT, p), -1) @ v


@pytest.mark.parametrize("function", [plain, sdpa, scores_too])
def test_everything_can_be_dropped(function):
    """Eager mode multiplies by 0 then: what is kept is not divided by the 0 that 1 - p is."""
    tensors = [x.requires_grad_() for x in inputs()]
    (site,) = fusion.explain(lambda *qkv: function(*qkv, 1.0), *(x.detach() for x in tensors)).sites
    assert site.validated.startswith("values")
    results = [f(*tensors, 1.0) for f in (compiled(function), function)]
    found = [[out, *torch.autograd.grad(out.sum(), tensors)] for out in results]
    exact = [x.double() for x in tensors]
    out = function(*exact, 1.0)
    assert_as_exact_as_eager(*found, [out, *torch.autograd.grad(out.sum(), exact)])
