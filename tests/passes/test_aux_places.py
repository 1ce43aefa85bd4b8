"""Where the call of an attention stands that writes more than the output: with the gradients of eager mode, and reading
what the operations read in whose place it stands."""

import pytest
import torch

import fusion
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager
from tests.passes.test_aux_outputs import gradients, run, scores, tensors, weights


def without_gradient(q, k, v):
    w = weights(q, k)
    with torch.no_grad():
        importance = w.sum(-2).mean()
    with torch.no_grad():
        peak = w.amax(-1).mean()
    return w @ v, importance, peak


def table_without_gradient(q, k, v):
    w = weights(q, k)
    with torch.no_grad():
        rest = (w * 2 + 1).cumsum(-1)
    return w @ v, rest


def values_alone_have_a_gradient(q, k, v):
    with torch.no_grad():
        w = weights(q, k)
        importance = w.sum(-2).mean()
    return w @ v, importance


def output_without_gradient(q, k, v):
    w = weights(q, k)
    importance = w.sum(-2)
    with torch.no_grad():
        out = w @ v
    return importance, out


def neither_has_a_gradient(q, k, v):
    w = weights(q, k)
    importance = w.detach().sum(-2)
    with torch.no_grad():
        out = w @ v
    return (q * 2).sum(), importance, out


MODES = [without_gradient, table_without_gradient, values_alone_have_a_gradient, output_without_gradient,
         neither_has_a_gradient]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", MODES, ids=lambda f: f.__name__)
def test_gradients_flow_where_they_do_in_eager_mode(function, inner):
    """The call stands where the first of what it writes is used; that may be where gradients are off."""
    inputs = tensors(19, 23)
    torch._dynamo.reset()
    with failures_raised():
        compiled = torch.compile(function, backend="fusion", options={"inner": inner})
        given = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
        ours, eager = compiled(*given[0]), function(*given[1])
    assert [x.requires_grad for x in ours] == [x.requires_grad for x in eager]
    wide = [x.double() for x in inputs]
    assert_as_exact_as_eager(ours, eager, function(*wide))
    found = gradients(compiled, inputs), gradients(function, inputs), gradients(function, wide)
    for a, b, exact in zip(*found, strict=True):
        assert (a is None or not a.any()) if b is None else True
        if b is not None:
            assert_as_exact_as_eager(a, b, exact)


def values_changed_between(q, k, v):
    w = weights(q, k)
    importance = w.sum(-2)
    v[..., 0] = 0
    return w @ v, importance


def values_scaled_between(q, k, v):
    w = weights(q, k)
    importance = w.sum(-2)
    v.mul_(importance.mean())
    return w @ v, importance


def changed_after(q, k, v):
    w = weights(q, k)
    out = w @ v
    v.zero_()
    return out, w.sum(-2)


def gate_changed_before_it_is_read(q, k, v, gate):
    w = weights(q, k)
    out = w @ v
    gate[..., 0] = 5
    return out, (w * gate).sum(-1)


def gate_changed_after_it_was_read(q, k, v, gate):
    w = weights(q, k)
    gated = w * gate
    gate.view(-1).add_(1)
    return w @ v, gated.sum(-2), gate


def gate_of_a_table_changed(q, k, v, gate):
    w = weights(q, k)
    out = w @ v
    gate[..., ::2] = 5
    return out, w * gate


def masked_far_below_the_largest(q, k, v):
    s = scores(q, k)
    with torch.no_grad():
        live = s > s.max() - 2
    return torch.softmax(s.masked_fill(~live, -1e4), -1) @ v, s.sum((1, 2))


def test_what_a_site_reads_is_not_split():
    """The largest of all scores is a scalar to the attention, and no auxiliary output."""
    inputs = tensors()
    ours, report = run(masked_far_below_the_largest, inputs)
    assert not report.notes and "the result of aten.max.default on its own scores" in report.sites[0].reason
    assert_as_exact_as_eager(
        ours, masked_far_below_the_largest(*inputs), masked_far_below_the_largest(*(x.double() for x in inputs))
    )


CHANGED = [values_changed_between, values_scaled_between, changed_after, gate_changed_before_it_is_read,
           gate_changed_after_it_was_read, gate_of_a_table_changed]  # fmt: skip


@pytest.mark.parametrize("function", CHANGED, ids=lambda f: f.__name__)
def test_operands_that_change_in_place(function):
    """The call reads its operands at one place, wherever the operations of the graph read them."""
    given = [[*tensors(), torch.linspace(0, 1, 29)][: function.__code__.co_argcount] for _ in range(3)]
    ours, _ = run(function, given[0])
    wide = [x.double() for x in given[2]]
    eager, exact = function(*given[1]), function(*wide)
    assert_as_exact_as_eager((*ours, *given[0]), (*eager, *given[1]), (*exact, *wide))


def weights_of_an_attention_that_is_refused(q, k, v):
    """The first product is left, so that its weights are needed, after the sum of them was."""
    w = weights(q, k)
    with torch.no_grad():
        part = w @ v[..., :3]
    return w @ v, part, w.double().amax(-1)


def weights_of_two_attentions_that_are_refused(q, k, v):
    w = weights(q, k)
    with torch.no_grad():
        parts = w @ v[..., :3], w.sum(-2), w.flip(-1) @ v
    return w @ v, *parts, w.double().sum(-1), w.double().amax(-1)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "function",
    [weights_of_an_attention_that_is_refused, weights_of_two_attentions_that_are_refused],
    ids=lambda f: f.__name__,
)
def test_what_was_needed_before_is_written_beside_what_is_needed_now(function, trained):
    """Each hid the other, and compilation did not end."""
    torch._dynamo.reset()
    inputs = [x.requires_grad_(trained) for x in tensors(19, 23)]
    with failures_raised(), fusion.collect_reports() as reports:
        ours = torch.compile(function, backend="fusion", options={"inner": "eager"})(*inputs)
    assert any(site.fused for site in reports[0].sites)
    assert_as_exact_as_eager(ours, function(*inputs), function(*(x.double() for x in inputs)))


def relative_positions(q, k, v):
    """Shaw et al. (2018): vectors of relative positions beside keys and beside values. The products with these are
    attention by themselves, of the same weights, whose scores each other's are a bias of."""
    n, d = q.shape[-2], q.shape[-1]
    place = torch.arange(n)[:, None] - torch.arange(k.shape[-2]) + n
    table = torch.linspace(-1, 1, 3 * n * d).sin().view(3 * n, d).to(q)
    w = torch.softmax((q @ k.mT + torch.einsum("bhid,ijd->bhij", q, table[place])) / 4, -1)
    return w @ v + torch.einsum("bhij,ijd->bhid", w, table[place].flip(-1))


def test_one_of_two_attentions_that_need_each_others_scores_writes_the_weights():
    inputs = tensors(23, 19)
    ours, report = run(relative_positions, inputs)
    assert report.fused == 1
    assert "by another attention, at " in next(site.reason for site in report.sites if not site.fused)
    assert [len(spec.aux_outputs) for site in report.sites for spec in site.specs] == [1]
    assert_as_exact_as_eager(ours, relative_positions(*inputs), relative_positions(*(x.double() for x in inputs)))
