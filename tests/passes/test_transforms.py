"""Attention inside of a function transform is fused, and its derivatives are those of eager mode."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion
from fusion.refusals import Reason
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager, leaves


def scores(q, k):
    return q @ k.mT / 3


def plain(q, k, v, b):
    return torch.softmax(scores(q, k), -1) @ v


def capped(q, k, v, b):
    return torch.softmax(torch.tanh(scores(q, k)) * 3 + b.sigmoid(), -1) @ v


def causal(q, k, v, b):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q, k, v, b):
    k, v = (x[:, :1].repeat_interleave(2, 1) for x in (k, v))
    return torch.softmax(scores(q, k) + b, -1) @ v


def masked(q, k, v, fill):
    """Some rows have no live key."""
    keep = (torch.arange(k.shape[-2]) > 3) & (torch.arange(q.shape[-2])[:, None] > 2)
    return torch.softmax(scores(q, k).masked_fill(~keep, fill), -1) @ v


def with_dead_rows(q, k, v, b):
    return masked(q, k, v, -torch.inf)


def with_means_of_rows(q, k, v, b):
    return masked(q, k, v, torch.finfo(q.dtype).min)


def sigmoid(q, k, v, b):
    return torch.sigmoid(scores(q, k) - 2) @ v


def with_entropy(q, k, v, b):
    w = torch.softmax(scores(q, k), -1)
    return torch.cat([w @ v, -(w * torch.log(w + 1e-3)).sum(-1, keepdim=True)], -1)


def of_detached(q, k, v, b):
    return torch.softmax(scores(q.detach(), k) + b, -1) @ v


def two_layers(q, k, v, b):
    return plain(capped(q, k, v, b), k, v, b)


FUNCTIONS = [plain, capped, causal, grouped, with_dead_rows, with_means_of_rows, sigmoid, with_entropy, of_detached,
             two_layers]  # fmt: skip


def tangents(attend):
    return lambda *x: jvp(attend, x, tuple(y.sin() for y in x))


def tangents_of_queries(attend):
    return lambda q, *x: jvp(lambda y: attend(y, *x), (q,), (q.cos(),))


def penalty(attend):
    """Of size 1: rounding of a sum of hundreds, whose sine is taken next, would decide every gradient."""
    slope = grad(lambda *y: attend(*y).sin().sum() / 20, argnums=(0, 1, 2))
    return lambda *x: sum(g.square().sum() for g in slope(*x))


def pulled_back(attend):
    def function(q, k, v, b):
        out, pull, *_ = vjp(lambda *x: attend(*x, b), q, k, v)
        return out, pull(out.sin())

    return function


def curvature(attend):
    return lambda q, k, v, b: hessian(lambda a: attend(q + a, k, v * a, b).sin().sum())(q[0, :, :1])


def gradient_of_a_gradient(attend):
    """The inner levels forbid hooks anew where they end."""

    def inner(q, k, v, b):
        return grad(lambda k: attend(q, k, v, b).sin().sum())(k)

    return lambda q, k, v, b: grad(lambda q: inner(q, k, v, b).sin().sum())(q)


def forward_jacobian(attend):
    return lambda q, k, v, b: jacfwd(lambda a: attend(q, k + a, v * a, b).sin().sum((1, 2)))(k[0, :, :1])


def reverse_jacobian(attend):
    return lambda q, k, v, b: jacrev(lambda a: attend(q, k * a, v, b).sin().sum((0, 1)))(k[0, 0])


def per_sample(attend):
    def loss(q, k, v, b):
        return attend(q[None], k[None], v[None], b[None]).sin().sum()

    return lambda *x: vmap(grad(loss, argnums=(0, 2)))(*x)


TRANSFORMS = [tangents, tangents_of_queries, penalty, pulled_back, curvature, gradient_of_a_gradient, forward_jacobian,
              reverse_jacobian, per_sample]  # fmt: skip


def results(function, dtype, draws=1):
    """Of some draws together (a single number decides nothing): what a function returns, and its gradients."""
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        x = [torch.randn(2, 2, 11, 8).to(dtype) for _ in range(3)] + [torch.randn(2, 1, 11, 11).to(dtype)]
        x = [y.requires_grad_() for y in x]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no forward mode
            out = [tensor for _, tensor in leaves(function(*x))]
        gradients = torch.autograd.grad(sum(y.sin().sum() for y in out), x, allow_unused=True)
        zeros = [torch.zeros_like(y) if g is None else g for g, y in zip(gradients, x, strict=True)]
        found.append([y.detach() for y in (*out, *zeros)])
    return [torch.stack(each) for each in zip(*found, strict=True)]


def check(function, dtype=torch.float32, sites=1, dynamic=None, **options):
    """The house rule, and how many attentions are fused."""
    torch._dynamo.reset()
    compiled = torch.compile(
        function,
        backend="fusion",
        dynamic=dynamic,
        options={"inner": "aot_eager", "emitter": "reference", "transforms": "always"} | options,
    )
    with fusion.collect_reports() as reports:
        actual = results(compiled, dtype, draws=4)
    assert [site.fused for report in reports for site in report.sites] == [True] * sites
    eager, exact = results(function, dtype, draws=4), results(function, torch.float64, draws=4)
    assert_as_exact_as_eager(actual, eager, exact, dtype)


USUAL = list(zip(FUNCTIONS, itertools.cycle((tangents, penalty))))
USUAL += [(capped, transform) for transform in TRANSFORMS if transform not in (tangents, penalty)]
CASES = [
    pytest.param(attend, transform, marks=[] if (attend, transform) in USUAL else pytest.mark.long)
    for attend in FUNCTIONS
    for transform in TRANSFORMS
]


@pytest.mark.parametrize(("attend", "transform"), CASES, ids=lambda f: f.__name__)
def test_every_attention_inside_every_transform(attend, transform):
    """By the reference interpreter, which no kernel has to be compiled for."""
    check(transform(attend), emitter="reference", sites=2 if attend is two_layers else 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("transform", [tangents, penalty, per_sample], ids=lambda f: f.__name__)
def test_kernels_inside_a_transform(transform, inner):
    with failures_raised():
        check(transform(capped), inner=inner)


@pytest.mark.parametrize("transform", [tangents, penalty, per_sample], ids=lambda f: f.__name__)
def test_sizes_that_vary(transform):
    check(transform(grouped), emitter="reference", dynamic=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transform", [tangents, penalty], ids=lambda f: f.__name__)
def test_other_dtypes(transform, dtype):
    check(transform(capped), dtype, emitter="reference")


@pytest.mark.parametrize("transform", [tangents, per_sample], ids=lambda f: f.__name__)
def test_masks_that_are_looked_at(transform):
    """A map of live tiles is made below the transform, for each sample of a batch."""

    def padded(q, k, v, b):
        keep = b[..., :1, :] > -0.5
        return torch.softmax(scores(q, k).masked_fill(~(keep | (torch.arange(11) == 0)), -torch.inf), -1) @ v

    with failures_raised():
        check(transform(padded), tile_maps="always", inner="eager")


def test_autocast_around_and_inside():
    def cast(q, k, v, b):
        with torch.autocast("cpu", torch.bfloat16):
            return capped(q, k, v, b)

    def around(q, k, v, b):
        with torch.autocast("cpu", torch.bfloat16):
            return tangents(capped)(q, k, v, b)

    for function in (tangents(cast), around):
        compiled = torch.compile(
            function, backend="fusion", options={"inner": "eager", "emitter": "reference", "transforms": "always"}
        )
        with fusion.collect_reports() as reports:
            actual = results(compiled, torch.float32, draws=4)
        assert [report.fused for report in reports] == [1]
        eager, exact = results(function, torch.float32, draws=4), results(tangents(capped), torch.float64, draws=4)
        assert_as_exact_as_eager(actual, eager, exact, torch.bfloat16, check_dtype=True)


def test_a_function_called_behind_its_levels():
    """What lies between `vjp` and the call of what it returned is fused as well, and so is what follows."""

    def function(q, k, v, b):
        pull = vjp(lambda *x: plain(*x, b), q, k, v)[1]
        between = capped(q, k, v, b)
        return pull(between), grad(lambda x: plain(x, k, v, b).sin().sum())(capped(between, k, v, b))

    check(function, emitter="reference", sites=4)


def test_dropout_is_that_of_the_value():
    """Value, gradient and tangent drop the same weights: the value is linear in V."""

    def function(q, k, v):
        def attend(x):
            return F.dropout(torch.softmax(scores(q, k), -1), 0.5) @ x

        return *jvp(attend, (v,), (v,)), grad(lambda x: attend(x).sum())(v)

    q, k, v = (torch.randn(2, 2, 20, 8) for _ in range(3))
    options = {"inner": "aot_eager", "transforms": "always", "emitter": "reference"}
    compiled = torch.compile(function, backend="fusion", options=options)
    with fusion.collect_reports() as reports:
        out, moved, gradient = compiled(q, k, v)
    assert [report.fused for report in reports] == [2]
    assert_as_exact_as_eager(moved, out, out.double())
    assert 0 < (gradient * v).sum().abs() < torch.inf


def in_part_without_gradients(q, k, v, b):
    with torch.no_grad():
        weighted = plain(q, k, v, b)
    return weighted * capped(q, k, v, b)


def test_tangents_do_not_heed_no_grad():
    check(penalty(in_part_without_gradients), emitter="reference", sites=2)
    function = tangents(in_part_without_gradients)
    inputs = [torch.randn(2, 2, 11, 8) for _ in range(3)] + [torch.randn(2, 1, 11, 11)]
    report = fusion.explain(function, *inputs)
    assert not report.fused
    assert "uses torch.no_grad inside" in report.notes[0]
    check(function, sites=0)


REGIONS = {
    "torch.no_grad is entered in the function": torch.no_grad,
    "autocast is entered in the function": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("note", REGIONS)
def test_a_region_that_holds_more_than_the_function(note):
    """It would be entered in one graph and left in another."""

    def function(q, k, v, b):
        def loss(x):
            with REGIONS[note]():
                y = plain(x, k, v, b)
                return grad(lambda z: z.float().sin().sum())(y).sum() + x.sum()

        return grad(loss)(q)

    inputs = [torch.randn(2, 2, 11, 8) for _ in range(3)] + [torch.randn(2, 1, 11, 11)]
    report = fusion.explain(function, *inputs)
    assert not report.fused
    assert note in report.notes[0]


def fused_by_default(function, *inputs, **options):
    """The sites of a function inside of a transform, whose result is eager's."""
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options={"inner": "eager"} | options)(*inputs)
    exact = function(*(x.detach().double() for x in inputs))
    assert_as_exact_as_eager([y for _, y in leaves(actual)], [y for _, y in leaves(function(*inputs))],
                             [y for _, y in leaves(exact)], torch.float32)  # fmt: skip
    return [site for report in reports for site in report.sites]


def test_derivatives_that_kernels_do_not_compute_are_left_where_scores_are_few(monkeypatch):
    q, k, v = (torch.randn(2, 11, 8) for _ in range(3))
    moved = lambda *x: jvp(lambda *y: capped(*y, torch.zeros(())), x, x)
    (site,) = fused_by_default(moved, q, k, v)
    assert site.refusal.kind is Reason.DERIVATIVES and "too few" in site.reason and not site.attentions
    assert "transforms" in site.advice
    monkeypatch.setattr("fusion.planning.pays.DERIVATIVES", 4 * 2 * 11 * 11)
    assert [site.fused for site in fused_by_default(moved, q, k, v)] == [True]


@pytest.mark.parametrize("wait", ["detach", "no_grad", None])
def test_tangents_are_fused_where_kernels_compute_all_that_is_asked_for(wait, monkeypatch):
    """The target of MeanFlow has a tangent, through which no gradient flows."""

    def loss(q, k, v):
        out, moved, *_ = jvp(lambda y: plain(y, k, v, None), (q,), (q.cos(),))
        with torch.set_grad_enabled(wait != "no_grad"):
            target = v - 2 * moved
        return (out - (target.detach() if wait == "detach" else target)).square().mean()

    inputs = [torch.randn(2, 11, 8) for _ in range(3)]
    assert not fused_by_default(loss, *inputs)[0].fused  # few scores
    monkeypatch.setattr("fusion.planning.pays.TANGENTS", 4 * 2 * 11 * 11)
    assert [site.fused for site in fused_by_default(loss, *inputs)] == [True]
    trained = [x.clone().requires_grad_() for x in inputs]
    assert [site.fused for site in fused_by_default(loss, *trained)] == [wait is not None]
    twice = lambda *x: jvp(lambda y: loss(y, *x[1:]), x[:1], x[:1])
    assert not fused_by_default(twice, *inputs)[0].fused


def test_a_first_gradient_is_fused_unless_it_is_differentiated_again():
    inputs = [torch.randn(2, 11, 8) for _ in range(3)]
    sloped = lambda q, k, v: grad(lambda y: plain(y, k, v, None).sin().sum())(q)
    assert [site.fused for site in fused_by_default(sloped, *inputs)] == [True]
    (site,) = fused_by_default(sloped, inputs[0].clone().requires_grad_(), *inputs[1:])
    assert site.refusal.kind is Reason.DERIVATIVES
    assert not fused_by_default(sloped, *inputs, transforms="never")
