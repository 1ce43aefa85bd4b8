"""Values that a model rounds to a narrower dtype on the way: rounded as the model rounds them, or left to the graph."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion
from tests.numerics import assert_same
from tests.passes.exactness import as_exact_as_eager

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALF = (torch.bfloat16, torch.float16)
N = 41


def rounded(x, dtype):
    return x.to(dtype).to(x.dtype)


def scores(q, k, v, dtype):
    return rounded(q @ k.mT / 3, dtype).softmax(-1) @ v


def scaled_afterwards(q, k, v, dtype):
    return (rounded(q @ k.mT, dtype) * 0.3).softmax(-1) @ v


def by_hand(q, k, v, dtype):
    s = rounded(q @ k.mT / 3, dtype)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) @ v


def masked_by(q, k, v, dtype):
    s = q @ k.mT / 3
    return s.masked_fill(rounded(s, dtype) < -0.5, float("-inf")).softmax(-1) @ v


def causal(q, k, v, dtype):
    live = torch.ones(N, N, dtype=torch.bool).tril()
    return rounded((q @ k.mT / 3).masked_fill(~live, float("-inf")), dtype).softmax(-1) @ v


def slopes(q, k, v, dtype):
    i = torch.arange(float(N))
    return (q @ k.mT / 3 + rounded(-0.37 * (i[:, None] - i).abs(), dtype)).softmax(-1) @ v


def summed_in_it(q, k, v, dtype):
    i = torch.arange(float(N))
    bias = (-0.37 * (i[:, None] - i).abs()).to(dtype) + (0.211 * i).to(dtype)
    return (q @ k.mT / 3 + bias.to(q.dtype)).softmax(-1) @ v


def bias(q, k, v, dtype):
    return (q @ k.mT / 3 + rounded(v.mean(-1), dtype)[..., None, :]).softmax(-1) @ v


def pointwise(q, k, v, dtype):
    return rounded((q @ k.mT / 3).sigmoid(), dtype) @ v


def weights(q, k, v, dtype):
    return rounded((q @ k.mT / 3).softmax(-1), dtype) @ v


def divided_after_rounding(q, k, v, dtype):
    e = (q @ k.mT / 3).sigmoid()
    return rounded(e / e.sum(-1, keepdim=True), dtype) @ v


def softmax_in_it(q, k, v, dtype):
    return (q @ k.mT / 3).to(dtype).softmax(-1).to(q.dtype) @ v


def softmax_to_it(q, k, v, dtype):
    return (q @ k.mT / 3).softmax(-1, dtype=dtype).to(q.dtype) @ v


def sum_to_it(q, k, v, dtype):
    e = (q @ k.mT / 3).exp()
    return e / e.sum(-1, keepdim=True, dtype=dtype).to(q.dtype) @ v


def by_hand_in_it(q, k, v, dtype):
    s = (q @ k.mT / 3).to(dtype)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(q.dtype) @ v


def result(q, k, v, dtype):
    return rounded(sdpa(q, k, v), dtype)


def divided_result(q, k, v, dtype):
    e = (q @ k.mT / 3).exp()
    return rounded(e @ v / e.sum(-1, keepdim=True), dtype) * 2


def keys(q, k, v, dtype):
    return sdpa(q, rounded(k, dtype), rounded(v, dtype))


CARRIED = (
    scores,
    scaled_afterwards,
    by_hand,
    masked_by,
    causal,
    slopes,
    summed_in_it,
    bias,
    pointwise,
    softmax_in_it,
    by_hand_in_it,
)
"""Programs that stay fused where kernels round to the dtype."""
OUTSIDE = (result, divided_result, keys)
"""Programs whose attention has no rounding in it."""
APART = (weights, divided_after_rounding, softmax_to_it, sum_to_it)
"""Programs that no kernel computes: weights are rounded only when their sum is known."""
ROUNDED_LAST = (
    pointwise,
    result,
    divided_result,
    weights,
    divided_after_rounding,
    softmax_in_it,
    by_hand_in_it,
    softmax_to_it,
    sum_to_it,
)
"""Programs that round what is rounded otherwise in the last place, so that now and then the next number is met."""


NO_FLOAT8 = (softmax_in_it, by_hand_in_it, softmax_to_it, sum_to_it, summed_in_it)
"""Programs with arithmetic in the dtype, of which torch has none in float8."""


def inputs(dtype=torch.float32):
    """Q and K whose products are exact, so that a rounding of these is the same in every order of summation."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-8, 9, (2, 2, N, 8), generator=generator) / 8 for _ in range(2))
    return [t.to(dtype) for t in (q, k, torch.randn(2, 2, N, 8, generator=generator))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float8_e4m3fn])
@pytest.mark.parametrize("function", [*CARRIED, *OUTSIDE, *APART])
def test_roundings_are_those_of_eager(function, dtype, emitter):
    if dtype in F8 and function in NO_FLOAT8:
        pytest.skip("torch has no arithmetic in float8")
    coarse = dtype if function in ROUNDED_LAST else None
    sites = as_exact_as_eager(lambda q, k, v: function(q, k, v, dtype), inputs(), emitter, dtype=coarse)
    free = function in (*OUTSIDE, slopes, bias)
    assert [site.fused for site in sites] == [free or (function in CARRIED and dtype in HALF)] * len(sites)
    if function in CARRIED and dtype in HALF:
        assert f"{dtype}(".removeprefix("torch.") in str(sites[0].spec.score)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [result, divided_result])
@pytest.mark.parametrize("dtype", [*HALF, *F8])
def test_results_are_numbers_of_the_dtype(function, dtype):
    out = torch.compile(function, backend="fusion")(*inputs(), dtype)
    assert_same(rounded(out, dtype), out)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float8_e5m2])
@pytest.mark.parametrize("function", [*CARRIED, *OUTSIDE])
def test_gradients_through_roundings(function, dtype, emitter):
    if dtype in F8 and function in NO_FLOAT8:
        pytest.skip("torch has no arithmetic in float8")
    as_exact_as_eager(lambda q, k, v: function(q, k, v, dtype), inputs(), emitter, True, dtype=dtype)


@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize("function", [scores, scaled_afterwards, by_hand, causal, bias])
def test_a_gradient_is_rounded_like_its_value(function, emitter):
    """One that float16 does not hold vanishes on its way through the cast."""

    def gradients(call):
        given = [t.requires_grad_() for t in inputs()]
        (call(*given, torch.float16).sum() * 2.0**-40).backward()
        return [t.grad for t in given]

    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": emitter})
    ours, theirs = gradients(compiled), gradients(function)
    assert [bool(t.any()) for t in ours] == [bool(t.any()) for t in theirs]
    assert not (function is not bias and ours[0].any())


@pytest.mark.parametrize("function", [scores, bias, result, keys])
@pytest.mark.parametrize("dtype", F8)
def test_in_half_precision_float8_is_a_rounding_and_the_own_dtype_is_none(function, dtype):
    given = inputs(torch.bfloat16)
    (site,) = as_exact_as_eager(lambda q, k, v: function(q, k, v, dtype), given, dtype=dtype)
    assert site.fused == (function is not scores)
    (site,) = fusion.explain(lambda q, k, v: function(q, k, v, torch.bfloat16), *given).sites
    assert site.fused and "bfloat16(" not in str(site.spec.score)


def test_mixed_precision_stays_fused_and_is_not_rounded():
    """Scores, weights and results in bfloat16 because products are: kernels keep them in float32."""

    def model(q, k, v):
        s = q.bfloat16() @ k.bfloat16().mT / 3
        return (s.float().softmax(-1).bfloat16() @ v.bfloat16()).float()

    given = inputs()
    (site,) = as_exact_as_eager(model, given, dtype=torch.bfloat16)
    assert site.fused and "bfloat16(" not in str(site.spec.score)
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = fusion.explain(lambda q, k, v: (q @ k.mT / 3).softmax(-1) @ v, *given).sites
    assert site.fused and "bfloat16(" not in str(site.spec.score)
