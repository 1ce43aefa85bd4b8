"""vmap is traced through, be it over positions of a mask or around an attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.passes.trace.normalize import normalize
from fusion.torch_private import functorch
from tests.numerics import assert_as_exact_as_eager, assert_same
from tests.passes.graphs import captured


def keep(rows, columns):
    """Nested, as models write masks."""
    one = torch.vmap(lambda i, j: (j <= i) & (i - j < 3), in_dims=(None, 0))
    return torch.vmap(one, in_dims=(0, None))(rows, columns)


def test_nested_positions_broadcast():
    positions = torch.arange(7), torch.arange(9)
    graph = normalize(captured(keep, *positions), positions)
    assert not any("functorch" in getattr(node.target, "__module__", "") for node in graph.graph.nodes)
    assert_same(graph(*positions)[0], keep(*positions))


def attend(q, k, v):
    return (q @ k.mT * 0.3).softmax(-1) @ v


def over_the_batch(q, k, v):
    return torch.vmap(attend)(q, k, v)


def heads_moved(q, k, v):
    return torch.vmap(torch.vmap(attend), in_dims=(1, 1, 1), out_dims=2)(q, k, v)


def of_sdpa(q, k, v):
    return torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))(q, k, v)


def of_batched_sdpa(q, k, v):
    return torch.vmap(lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True))(
        q, k, v
    )


def keys_shared(q, k, v):
    return torch.vmap(attend, in_dims=(0, None, None))(q, k[0], v[0])


def with_a_mask_per_element(q, k, v):
    lengths = torch.arange(q.shape[0]) + 3

    def one(q, k, v, length):
        live = torch.arange(k.shape[-2]) < length
        return (q @ k.mT).masked_fill(~live, -torch.inf).softmax(-1) @ v

    return torch.vmap(one)(q, k, v, lengths)


def written_in_place(q, k, v):
    def one(q, k, v):
        scores = q @ k.mT
        scores.mul_(0.3)
        scores[..., :2] = 0
        return scores.softmax(-1) @ v

    return torch.vmap(one)(q, k, v)


def without_a_gradient_of_weights(q, k, v):
    def one(q, k, v):
        with torch.no_grad():
            weights = (q @ k.mT).softmax(-1)
        return weights @ v + attend(q, k, v)

    return torch.vmap(one)(q, k, v)


def by_einsum(q, k, v):
    def one(q, k, v):
        weights = torch.einsum("hid,hjd->hij", q, k).sub(1).softmax(-1)
        return torch.einsum("hij,hjd->ihd", weights, v)

    return torch.vmap(one, out_dims=1)(q, k, v)


AROUND = [over_the_batch, heads_moved, of_sdpa, of_batched_sdpa, keys_shared, with_a_mask_per_element, written_in_place,
          without_a_gradient_of_weights, by_einsum]  # fmt: skip


def skip_where_dynamo_raises(run):
    """Dynamo of torch 2.11 cannot take a product of matrices of symbolic sizes inside vmap, whatever the backend."""
    try:
        run()
    except torch._dynamo.exc.TorchRuntimeError as error:
        if "on tensor with symbolic sizes" not in str(error):
            raise
        pytest.skip("Dynamo has no symbolic sizes inside vmap")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (torch.float32, None),
        (torch.float32, True),
        (torch.bfloat16, None),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", AROUND, ids=lambda f: f.__name__)
def test_an_attention_inside_vmap_is_fused(function, dtype, dynamic):
    def run(call, dtype):
        torch.manual_seed(0)
        inputs = [torch.randn(3, 2, 9, 8).to(dtype).requires_grad_() for _ in range(3)]
        out = call(*inputs)
        out.sin().sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    if dynamic:
        skip_where_dynamo_raises(lambda: run(torch.compile(function, backend="eager", dynamic=True), dtype))
    with fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", options={"inner": "aot_eager"}, dynamic=dynamic)
        actual = run(compiled, dtype)
    sites = [site.fused for report in reports for site in report.sites]
    assert sites and all(sites)
    exact = run(function, torch.float64)
    assert_as_exact_as_eager(actual, run(function, dtype), exact, dtype)


def dropped(q, k, v):
    return torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(q) + attend(q, k, v)


def test_random_numbers_are_those_of_eager():
    inputs = [torch.randn(3, 9, 8) for _ in range(3)]
    torch.manual_seed(0)
    expected = dropped(*inputs)
    torch.manual_seed(0)
    compiled = torch.compile(dropped, backend="fusion", options={"inner": "eager"})
    assert_as_exact_as_eager(compiled(*inputs), expected, expected.double())


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_cannot_be_traced_stays_as_it_is(monkeypatch, dynamic):
    """Nothing of the attempt is left behind, and the attention after it is fused."""

    def function(q, k, v):
        return attend(torch.vmap(lambda row, other: row.add_(1) @ other[: row.shape[-1]])(q.sin(), k), k, v)

    def refuse(*given):
        raise RuntimeError("no rule")

    once = functorch.of_vmap
    monkeypatch.setattr(
        "fusion.passes.trace.retrace.of_vmap", lambda target: refuse if "remove" in str(target) else once(target)
    )
    inputs = [torch.randn(3, 8, 8) for _ in range(3)]
    report = fusion.explain(function, *inputs)
    assert [site.fused for site in report.sites] == [True]
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager"}, dynamic=dynamic)
    assert_as_exact_as_eager(compiled(*inputs), function(*inputs), function(*(x.double() for x in inputs)))
