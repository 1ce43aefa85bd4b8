"""Rows without a live key under softmaxes that are masked again, or divided by more than their sum: eager's value."""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager


def keep(q, k):
    """Causal, and of the first three rows nothing."""
    rows = torch.arange(q.shape[2])[:, None]
    return (torch.arange(k.shape[2]) <= rows) & (rows > 2)


def filled_with_zero(q, k, v):
    w = (q @ k.mT).masked_fill(~keep(q, k), -math.inf).softmax(-1)
    return w.masked_fill(~keep(q, k), 0.0) @ v


def selected_of_two_masks(q, k, v):
    padding = torch.arange(k.shape[2]) < k.shape[2] - 2
    s = torch.where(keep(q, k), q @ k.mT, -math.inf).masked_fill(~padding, -math.inf)
    return torch.where(keep(q, k) & padding, s.softmax(-1), torch.zeros_like(s)) @ v


def lowest_then_zero(q, k, v):
    w = (q @ k.mT).masked_fill(~keep(q, k), torch.finfo(q.dtype).min).softmax(-1)
    return w.masked_fill(~keep(q, k), 0.0) @ v


def lowest_twice_then_zero(q, k, v):
    """Twice the lowest number is -inf, in two of the three rows."""
    dead = (torch.arange(q.shape[2]) < 2)[:, None].expand(-1, k.shape[2])
    masks = [torch.zeros(x.shape, dtype=q.dtype).masked_fill(x, torch.finfo(q.dtype).min) for x in (dead, ~keep(q, k))]
    return (q @ k.mT + masks[0] + masks[1]).softmax(-1).masked_fill(~keep(q, k), 0.0) @ v


def multiplied(q, k, v):
    """Not selected: NaN times zero is NaN."""
    return ((q @ k.mT).masked_fill(~keep(q, k), -math.inf).softmax(-1) * keep(q, k)) @ v


def sum_and_epsilon(q, k, v):
    e = torch.exp(q @ k.mT) * keep(q, k)
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


def sum_at_least_epsilon(q, k, v):
    e = torch.exp((q @ k.mT).masked_fill(~keep(q, k), -math.inf))
    return (e / e.sum(-1, keepdim=True).clamp(min=1e-9)) @ v


def sum_twice(q, k, v):
    """0 / 0."""
    e = torch.exp(q @ k.mT) * keep(q, k)
    return (e / (2.0 * e.sum(-1, keepdim=True))) @ v


def one_more_than_maximum(q, k, v):
    """The maximum is -inf, and -inf less -inf is NaN."""
    s = (q @ k.mT).masked_fill(~keep(q, k), -math.inf)
    top = s.max(-1, keepdim=True).values
    e = torch.exp(torch.subtract(s, top))
    return torch.divide(e, e.sum(-1, keepdim=True) + torch.exp(torch.multiply(top, -1))) @ v


def one_more_than_positive_maximum(q, k, v):
    s = (q @ k.mT).masked_fill(~keep(q, k), -math.inf)
    top = s.amax(-1, keepdim=True).clamp(min=0)
    e = (s - top).exp()
    return (e / (e.sum(-1, keepdim=True) + torch.exp(-top))) @ v


def lowest(q, k):
    return (q @ k.mT).masked_fill(~keep(q, k), torch.finfo(q.dtype).min)


def shifted_and_halved(q, k, v):
    s = lowest(q, k)
    return ((s - s.amax(-1, keepdim=True)) * 0.5).softmax(-1) @ v


def shifted_between_scales(q, k, v):
    """LayoutLMv3 and CogView: a scale undoes another one, and nothing overflows."""
    s = lowest(q, k) / 32
    return ((s - s.amax(-1, keepdim=True)) * 32).softmax(-1) @ v


def shifted_between_scales_of_which_one_remains(q, k, v):
    s = lowest(q, k) * 0.0625
    return ((s - s.amax(-1, keepdim=True)) * 12.0).softmax(-1) @ v


def shifted_and_scaled_without_a_low_fill(q, k, v):
    s = (q @ k.mT).masked_fill(~keep(q, k), -math.inf)
    return ((s - s.amax(-1, keepdim=True)) * (q.abs().amax() + 1)).softmax(-1) @ v


def shifted_by_the_unmasked(q, k, v):
    s = lowest(q, k)
    return (s - (q @ k.mT).amax(-1, keepdim=True)).softmax(-1) @ v


def shifted_by_a_clamped_maximum(q, k, v):
    s = lowest(q, k)
    return (s - s.amax(-1, keepdim=True).clamp(min=0)).softmax(-1) @ v


def exponentials_of_the_lowest(q, k, v):
    """Without the maximum: 0 / 0."""
    e = lowest(q, k).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def exponentials_of_the_lowest_and_epsilon(q, k, v):
    e = ((q @ k.mT) + (~keep(q, k)) * -1e9).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


def powers_of_two_under_a_low_fill(q, k, v):
    """Without the maximum: 0 / 0."""
    s = (q @ k.mT) / 2 + torch.where(keep(q, k), 0.0, -1e9)
    e = torch.exp2(s * 1.4426950408889634)
    return (e / e.sum(-1, keepdim=True)) @ v


def exponentials_less_the_maximum_of_the_lowest(q, k, v):
    s = lowest(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


def exponentials_less_a_clamped_maximum(q, k, v):
    s = lowest(q, k)
    e = (s - s.amax(-1, keepdim=True).clamp(min=0)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def written_mask_then_zero(q, k, v):
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    mask[:3, :2] = -math.inf
    mask[:3, 2:] = -math.inf
    return (q @ k.mT + mask).softmax(-1).masked_fill(~keep(q, k), 0.0) @ v


def exponentials_under_a_written_mask(q, k, v):
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    mask[:3] = torch.finfo(q.dtype).min
    e = (q @ k.mT + mask).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def less_the_log_sum_of_the_lowest(q, k, v):
    """log(n) is nothing beside the lowest number: every weight of a dead row is 1, and not 1 / n."""
    s = lowest(q, k)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def less_the_log_sum_of_two_fills(q, k, v):
    s = (q @ k.mT).masked_fill(~keep(q, k), -1e30).masked_fill(torch.arange(k.shape[2]) < 2, -math.inf)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def less_the_log_sum(q, k, v):
    s = (q @ k.mT).masked_fill(~keep(q, k), -math.inf)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


INFINITE, LOWEST = torch.zeros(2, 21, 21)
INFINITE[:3] = -math.inf
LOWEST[:3] = torch.finfo(torch.float32).min
"""Masks of which the compiler sees no values."""

FUSED = [
    less_the_log_sum,
    less_the_log_sum_of_the_lowest,
    less_the_log_sum_of_two_fills,
    written_mask_then_zero,
    exponentials_under_a_written_mask,
    shifted_and_halved,
    shifted_between_scales,
    shifted_between_scales_of_which_one_remains,
    shifted_and_scaled_without_a_low_fill,
    shifted_by_the_unmasked,
    shifted_by_a_clamped_maximum,
    exponentials_of_the_lowest,
    powers_of_two_under_a_low_fill,
    exponentials_of_the_lowest_and_epsilon,
    exponentials_less_the_maximum_of_the_lowest,
    exponentials_less_a_clamped_maximum,
    filled_with_zero,
    selected_of_two_masks,
    lowest_then_zero,
    lowest_twice_then_zero,
    multiplied,
    sum_and_epsilon,
    sum_at_least_epsilon,
    sum_twice,
    one_more_than_maximum,
    one_more_than_positive_maximum,
]


def other_rows_zero(q, k, v):
    """Some dead rows are selected and some are not."""
    w = (q @ k.mT).masked_fill(~keep(q, k), -math.inf).softmax(-1)
    return w.masked_fill((torch.arange(q.shape[2]) < 2)[:, None], 0.0) @ v


def mask_added_then_zero(q, k, v):
    return (q @ k.mT + INFINITE.to(q.dtype)).softmax(-1).masked_fill(~keep(q, k), 0.0) @ v


def shifted_and_scaled(q, k, v):
    s = lowest(q, k)
    return ((s - s.amax(-1, keepdim=True)) * 3.0).softmax(-1) @ v


def shifted_between_scales_that_round(q, k, v):
    """The lowest number / 30 * 30 may be rounded to -inf."""
    s = lowest(q, k) / 30
    return ((s - s.amax(-1, keepdim=True)) * 30).softmax(-1) @ v


def shifted_between_a_scale_and_a_larger_one(q, k, v):
    s = lowest(q, k) / 32
    return ((s - s.amax(-1, keepdim=True)) * 64).softmax(-1) @ v


def shifted_between_scales_below_zero(q, k, v):
    s = lowest(q, k) / -2
    return ((s - s.amax(-1, keepdim=True)) * 2).softmax(-1) @ v


def shifted_and_scaled_by_a_tensor(q, k, v):
    s = lowest(q, k)
    return ((s - s.amax(-1, keepdim=True)) * (q.abs().amax() + 1)).softmax(-1) @ v


def shifted_by_the_sum(q, k, v):
    s = lowest(q, k)
    return (s - s.sum(-1, keepdim=True)).softmax(-1) @ v


def shifted_by_twice_the_maximum(q, k, v):
    s = lowest(q, k)
    return (s - 2.0 * s.amax(-1, keepdim=True)).softmax(-1) @ v


def exponentials_less_nearly_the_maximum(q, k, v):
    s = (q @ k.mT).masked_fill(~keep(q, k), -1e4)
    e = (s - (s.amax(-1, keepdim=True) + 1.0)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def exponentials_under_an_added_tensor(q, k, v):
    e = (q @ k.mT + LOWEST.to(q.dtype)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def powers_of_two_of_the_lowest(q, k, v):
    s = lowest(q, k)
    e = torch.exp2((s - s.amax(-1, keepdim=True)) * 1.4)
    return (e / e.sum(-1, keepdim=True)) @ v


def shifted_and_scaled_below_zero(q, k, v):
    """The fill is +2e38, which 1.5 times that is not, unless the maximum is taken off first."""
    s = lowest(q, k) * -0.7
    return ((s - s.amax(-1, keepdim=True)) * 1.5).softmax(-1) @ v


def shifted_and_scaled_by_a_tensor_below_zero(q, k, v):
    s = lowest(q, k) * -0.7
    return ((s - s.amax(-1, keepdim=True)) * (q.abs().amax() + 1)).softmax(-1) @ v


def queries_added_then_zero(q, k, v):
    """What is added is the same for all keys of a query, and masks all of them at once."""
    mask = INFINITE[:, :1].to(q.dtype)
    return (q @ k.mT + mask).softmax(-1).masked_fill(mask < 0, 0.0) @ v


def exponentials_less_a_maximum_of_fills_above(q, k, v):
    """Every exponential of a score is 0, and so is their sum."""
    s = lowest(q, k) * -0.7
    e = (s - s.amax(-1, keepdim=True)).exp() * keep(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


def exponentials_of_fills_above(q, k, v):
    """Infinite, and NaN times a mask of zeros."""
    e = torch.exp(-(q @ k.mT).masked_fill(~keep(q, k), -65504.0)) * keep(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


LEFT = {
    exponentials_of_fills_above: "far above the scores",
    exponentials_less_a_maximum_of_fills_above: "a maximum that a mask's fill takes far above",
    queries_added_then_zero: "masked after the softmax",
    shifted_between_scales_that_round: "another reduction",
    shifted_between_a_scale_and_a_larger_one: "another reduction",
    shifted_between_scales_below_zero: "another reduction",
    shifted_and_scaled_below_zero: "another reduction",
    shifted_and_scaled_by_a_tensor_below_zero: "another reduction",
    powers_of_two_of_the_lowest: "a softmax by hand",
    mask_added_then_zero: "masked after the softmax",
    shifted_and_scaled: "another reduction",
    shifted_and_scaled_by_a_tensor: "another reduction",
    shifted_by_the_sum: "another reduction",
    shifted_by_twice_the_maximum: "another reduction",
    exponentials_less_nearly_the_maximum: "a softmax by hand",
    exponentials_under_an_added_tensor: "a softmax by hand",
}


def outcome(function, emitter="reference"):
    given = [torch.randn(2, 2, 21, 8) for _ in range(3)]
    with torch.no_grad(), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": emitter})
        actual, eager, exact = compiled(*given), function(*given), function(*(x.double() for x in given))
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)
    (site,) = [site for report in reports for site in report.sites]
    return site


@pytest.mark.parametrize("function", [*FUSED, other_rows_zero], ids=lambda f: f.__name__)
def test_is_fused_with_the_value_of_eager_in_dead_rows(function):
    assert outcome(function).reason is None


@pytest.mark.parametrize(
    "function", [filled_with_zero, sum_at_least_epsilon, sum_twice, one_more_than_maximum], ids=lambda f: f.__name__
)
def test_kernels_have_it_too(function):
    assert outcome(function, "auto").fused


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_is_left_alone_where_dead_rows_are_not_seen_through(function):
    assert LEFT[function] in outcome(function).reason


def exponentials_times_mask(q, k, v):
    """0 / 0, whose gradient is NaN, and stays it when it is multiplied by a mask of zeros."""
    s = q @ k.mT
    e = torch.exp(s - s.amax(-1, keepdim=True)) * keep(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


def exponentials_or_zero(q, k, v):
    """0 / 0, whose gradient a selection does not let through."""
    s = q @ k.mT
    e = torch.where(keep(q, k), torch.exp(s - s.amax(-1, keepdim=True)), 0.0)
    return (e / e.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("emitter", ["reference", "auto"])
@pytest.mark.parametrize(
    "function",
    [filled_with_zero, exponentials_times_mask, exponentials_or_zero, sum_and_epsilon],
    ids=lambda f: f.__name__,
)
def test_gradients_of_dead_rows(function, emitter):
    given = [torch.randn(2, 2, 21, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": emitter})

    def gradients(function, inputs):
        return torch.autograd.grad(function(*inputs).square().sum(), inputs)

    exact = gradients(function, [x.detach().double().requires_grad_() for x in given])
    assert_as_exact_as_eager(gradients(compiled, given), gradients(function, given), exact, torch.float32)


@pytest.mark.parametrize("mask", ["filled", "added"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", [-1e4, None], ids=str)
def test_a_log_sum_that_a_narrow_dtype_rounds(fill, dtype, mask):
    """In a row of fills it is the fill: every weight is 1, where the logarithm of the sum is lost."""

    def masked(q, k, v):
        low = torch.finfo(q.dtype).min if fill is None else fill
        s, live = q @ k.mT, keep(q, k)
        s = s.masked_fill(~live, low) if mask == "filled" else s + torch.where(live, 0.0, low).to(s.dtype)
        return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v

    given = [torch.randn(1, 2, 21, 8, dtype=dtype) for _ in range(3)]
    exact = masked(*given).double()  # in float64 logarithms are not lost
    actual = torch.compile(masked, backend="fusion", options={"inner": "eager"})(*given)
    assert_as_exact_as_eager(actual, masked(*given), exact)


@pytest.mark.parametrize(("fill", "rows"), [(-math.inf, 48), (-math.inf, 4), (-1e9, 48), (-1e9, 4)])
def test_keys_are_visited_again_where_dead_rows_need_them(fill, rows):
    def masked(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return (q @ k.mT).masked_fill((j > i) | (j < 9), fill).softmax(-1).nan_to_num(0.0) @ v

    given = [torch.randn(1, 2, n, 16) for n in (rows, 48, 48)]
    (site,) = fusion.explain(masked, *given).sites
    again = any(word in source for source in site.sources for word in ("again", "%alive"))
    assert again == (fill != -math.inf)
    torch._dynamo.reset()
    actual = torch.compile(masked, backend="fusion", options={"inner": "eager", "strict": True})(*given)
    assert_as_exact_as_eager(actual, masked(*given), masked(*(x.double() for x in given)))
