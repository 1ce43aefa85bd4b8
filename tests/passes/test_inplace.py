"""Writes to parts of tensors: fused where nobody else sees the memory, left as they are where somebody does."""

import math

import pytest
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager


def scores(q, k):
    return q @ k.mT * 0.25


def weights_cut_off(q, k, v):
    w = scores(q, k).softmax(-1)
    w[..., 5:] = 0
    return w @ v


def first_keys_masked(q, k, v):
    s = scores(q, k)
    s[..., :4] = -math.inf
    return s.softmax(-1) @ v


def last_keys_masked(q, k, v):
    s = scores(q, k)
    s[..., -3:] = torch.finfo(s.dtype).min
    return s.softmax(-1) @ v


def scaled_corner(q, k, v):
    s = scores(q, k)
    s[..., 2:7, 3:9] *= 2
    return s.softmax(-1) @ v


def one_row(q, k, v):
    s = scores(q, k)
    s[..., 3, :] = 0
    return s.softmax(-1) @ v


def one_head(q, k, v):
    s = scores(q, k)
    s[:, 1] = s[:, 1] + 1
    return s.softmax(-1) @ v


def part_of_a_mask(q, k, v):
    s = scores(q, k)
    mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    mask[:, :2] = True
    mask[4] = False
    mask[4, 1] = True
    return s.masked_fill(~mask, -math.inf).softmax(-1) @ v


def copied(q, k, v):
    s = scores(q, k)
    return torch.empty_like(s).copy_(s).softmax(-1) @ v


def filled(q, k, v):
    s = scores(q, k)
    bias = torch.empty(s.shape[-2:], dtype=s.dtype).fill_(-2.0).triu(1)
    return (s + bias).softmax(-1) @ v


def written_twice(q, k, v):
    s = scores(q, k)
    s[..., :4] = 1
    s[..., 2:6] += 3
    return s.softmax(-1) @ v


def beyond_the_end(q, k, v):
    s = scores(q, k)
    s[..., 8:1000] = -1
    s[..., 500:] = 7
    return s.softmax(-1) @ v


def wider_mask(q, k, v):
    """Added in the mask's dtype, and rounded to that of the scores."""
    s = scores(q, k)
    s += torch.ones(s.shape[-2:], dtype=torch.float32).triu(1) * -1e9
    return s.softmax(-1) @ v


def wider_factors_of_a_part(q, k, v):
    s = scores(q, k)
    s[..., 2:] *= torch.linspace(0.3, 1.7, 2, dtype=torch.float32)[:, None, None]
    return s.softmax(-1) @ v


def through_a_view(q, k, v):
    s = scores(q, k)
    s.view(2, 2, *s.shape[-2:]).masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return s.softmax(-1) @ v


def through_a_view_of_heads(q, k, v):
    s = scores(q.flatten(0, 1), k.flatten(0, 1))
    s.unflatten(0, (2, 2))[..., :3] = -1
    return s.softmax(-1) @ v.flatten(0, 1)


def bias_written_through_data(q, k, v):
    bias = q.new_zeros(k.shape[-2])
    bias.data[3:].copy_(k[0, 0, 3:, 0].data)
    return (scores(q, k) + bias).softmax(-1) @ v


def whole_scores(q, k, v):
    """As MViT adds its positions where it has no class token."""
    s = scores(q, k)
    s[:, :, 0:, 0:] = (s.unflatten(-1, (6, 2)) + v[..., :6, None]).view(s.shape)
    return s.softmax(-1) @ v


def scores_behind_a_class_token(q, k, v):
    s = scores(q, k)
    s[:, :, 2:, 2:] = (
        s[:, :, 2:, 2:].view(*s.shape[:2], 5, -1, 5, 2) + v[:, :, 2:, :5, None].unflatten(2, (5, 2))
    ).view(*s.shape[:2], 10, 10)
    return s.softmax(-1) @ v


def shifted_load(q, k, v):
    s = scores(q, k)
    s[..., 3:] += v[..., 0][..., None, :-3]
    return s.softmax(-1) @ v


def load_of_another_length(q, k, v):
    s = scores(q, k)
    s[..., 4:, :-5] *= v[..., :8, :7] + q[..., 1:9, :1]
    return s.softmax(-1) @ v


def class_token_alone(q, k, v):
    """The row that is read was not written to."""
    s = scores(q, k)
    s[..., 1:, :] += (q @ v[..., :1, :].mT)[..., 1:, :] + v[..., :1, 0, None]
    return s[..., :1, :].softmax(-1) @ v


FUSED = [weights_cut_off, first_keys_masked, last_keys_masked, scaled_corner, one_row, part_of_a_mask, copied, filled,
         written_twice, beyond_the_end, wider_mask, through_a_view, through_a_view_of_heads,
         bias_written_through_data, whole_scores, scores_behind_a_class_token, shifted_load,
         load_of_another_length, class_token_alone]  # fmt: skip


def view_read_later(q, k, v):
    s = scores(q, k)
    view = s[..., :4]
    s[..., 2:] = 1
    return s.softmax(-1) @ v + view.sum()


def slice_of_an_input(q, k, v):
    k[..., :2, :] = 0
    return scores(q, k).softmax(-1) @ v


def every_other_key(q, k, v):
    s = scores(q, k)
    s[..., ::2] = -1
    return s.softmax(-1) @ v


def shifted_scores(q, k, v):
    s = scores(q, k)
    s[..., 2:] = scores(k, q)[..., :-2]
    return s.softmax(-1) @ v


def overwritten_scores(q, k, v):
    """The gradient of Q is zero, not None."""
    s = scores(q, k)
    s[:, :] = scores(k, v)
    return s.softmax(-1) @ v


def copied_values_through_a_view(q, k, v):
    v = v.clone()
    v.mT.add_(0.3)
    return scores(q, k).softmax(-1) @ v


def copied_keys_through_a_slice(q, k, v):
    k = k.mT.contiguous().mT
    k[..., ::2].mul_(-2)
    return scores(q, k).softmax(-1) @ v


def copied_scores_through_a_view(q, k, v):
    s = scores(q, k).clone()
    s.mT[..., ::2].add_(0.7)
    return s.softmax(-1) @ v


def view_that_is_written_and_read_later(q, k, v):
    s = scores(q, k)
    view = s.unsqueeze(0)
    s.view(s.shape).add_(1.5)
    return s.softmax(-1) @ v + view.sum()


def written_again_through_the_result(q, k, v):
    s = scores(q, k)
    s[..., :4].abs_().add_(1)
    s[..., 5:].mul_(0.5)[..., :2].sub_(3)
    return s.softmax(-1) @ v


def result_of_a_write_to_a_part(q, k, v):
    s = scores(q, k)
    part = s[..., :4].mul_(2)
    s[..., 2:].add_(1)
    return s.softmax(-1) @ v + part.sum()


def predicate_in_floats(q, k, v):
    s = scores(q, k)
    return s.softmax(-1).gt_(0.1) @ v


def power(q, k, v):
    k = k * 1
    k.pow_(2)
    return scores(q, k).softmax(-1) @ v


def keys_copied_from(q, k, v):
    keys = torch.empty_like(k)
    keys.copy_(q)
    return scores(q, keys).softmax(-1) @ v + k.sum() * 0


def keys_copied_to_a_part(q, k, v):
    k = k.clone()
    k[..., 2:, :] = q[..., 2:, :]
    k[..., :1, :] = v[..., 3:4, :]
    return scores(q, k).softmax(-1) @ v


def keys_copied_over_others(q, k, v):
    k = k.clone()
    k.copy_(v.mT.contiguous().mT)
    return scores(q, k).softmax(-1) @ v


def random_again(q, k, v):
    s = scores(q, k)
    return (s + torch.empty_like(s).uniform_(1.0, 1.0)).softmax(-1) @ v


def dimension_added(q, k, v):
    s = scores(q, k)
    s.unsqueeze_(0)
    return (s.softmax(-1) @ v)[0]


def repeated_values_through_a_view(q, k, v):
    v = v[:, :1].repeat(1, 2, 1, 1)
    v.mT.add_(0.3)
    return scores(q, k).softmax(-1) @ v


def factor_behind_autograd(q, k, v):
    s = scores(q, k)
    s.data.mul_(2)
    return s.softmax(-1) @ v


LEFT_OR_FUSED = [
    factor_behind_autograd,
    copied_values_through_a_view,
    copied_keys_through_a_slice,
    copied_scores_through_a_view,
    repeated_values_through_a_view,
    view_that_is_written_and_read_later,
    wider_factors_of_a_part,
    written_again_through_the_result,
    result_of_a_write_to_a_part,
    predicate_in_floats,
    power,
    keys_copied_from,
    keys_copied_to_a_part,
    keys_copied_over_others,
    random_again,
    dimension_added,
    one_head,
    view_read_later,
    slice_of_an_input,
    every_other_key,
    shifted_scores,
    overwritten_scores,
]


def run(function, dtype=torch.float32, train=False, n=12):
    torch.manual_seed(1)
    inputs = [torch.randn(2, 2, n, 16, dtype=dtype) for _ in range(3)]
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "emitter": "reference"})

    def results(call, dtype):
        given = [x.to(dtype).clone().requires_grad_(train) for x in inputs]
        out = call(*given)
        out = out[0] if isinstance(out, tuple) else out
        return (out, *torch.autograd.grad(out.square().sum(), given)) if train else (out, *given)

    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        actual = results(compiled, dtype)
    assert_as_exact_as_eager(actual, results(function, dtype), results(function, torch.float64))
    return [site for report in reports for site in report.sites]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_fresh_tensors(function, dtype):
    (site,) = run(function, dtype)
    assert site.fused, site.reason


@pytest.mark.parametrize("function", [f for f in FUSED if f is not weights_cut_off])  # nor does eager
def test_gradients(function):
    (site,) = run(function, train=True)
    assert site.fused, site.reason


@pytest.mark.parametrize("function", LEFT_OR_FUSED)
def test_what_somebody_else_sees_is_right(function):
    run(function)


@pytest.mark.parametrize(
    "function", [f for f in LEFT_OR_FUSED if f not in (predicate_in_floats, slice_of_an_input)]
)  # which eager mode does not train
def test_gradients_of_what_somebody_else_sees(function):
    run(function, train=True)


def factor_that_is_not_recorded(q, k, v):
    s = scores(q, k)
    with torch.no_grad():
        s.mul_(2)
    return s.softmax(-1) @ v


def mask_that_is_not_recorded(q, k, v):
    s = scores(q, k)
    with torch.no_grad():
        s[..., 3:].masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)[:, 3:], -math.inf)
    return s.softmax(-1) @ v


def read_without_gradients(q, k, v):
    """`to` and `contiguous` return the scores themselves."""
    s = scores(q, k)
    with torch.no_grad():
        statistic = s.to(s.dtype).sum(-1) + s.contiguous().amax(-1)
    return s.softmax(-1) @ v, statistic


def weights_read_without_gradients(q, k, v):
    w = torch.relu(scores(q, k))
    with torch.no_grad():
        statistic = w.to(w.dtype).sum(-1)
    return w @ v, statistic


@pytest.mark.parametrize(
    "function",
    [factor_that_is_not_recorded, mask_that_is_not_recorded, read_without_gradients, weights_read_without_gradients],
)
@pytest.mark.parametrize("train", [False, True])
def test_gradients_pass_by_what_is_not_recorded(function, train):
    run(function, train=train)


def pulled_towards_bounds(q, k, v):
    s = scores(q, k)
    s.lerp_(s.tanh(), torch.full_like(s[..., :1], 0.3))  # torch has its form for symbols in Python alone
    return s.softmax(-1) @ v


@pytest.mark.parametrize("function", [first_keys_masked, pulled_towards_bounds])
def test_lengths_that_change(function):
    for n in (9, 14):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True}, dynamic=True)
        for length in (n, n + 3):
            inputs = [torch.randn(1, 2, length, 16) for _ in range(3)]
            exact = function(*(x.double() for x in inputs))
            assert_as_exact_as_eager(compiled(*inputs), function(*inputs), exact)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_result_changes_in_training(inner):
    """The backward needs the result as it was."""

    def moved(q, k, v):
        out = scores(q, k).softmax(-1) @ v
        out.mT.add_(0.3)
        return out.mul_(2.0)

    given = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    with fusion.collect_reports() as reports:
        out = torch.compile(moved, backend="fusion", options={"inner": inner})(*given)
    assert reports[0].fused == 1

    def results(out, inputs):
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    wide = [x.detach().double().requires_grad_() for x in given]
    assert_as_exact_as_eager(results(out, given), results(moved(*given), given), results(moved(*wide), wide))
