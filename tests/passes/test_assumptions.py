"""Dynamic sizes stay dynamic where an attention is refused, at whatever stage; where it is taken, torch guards."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusion.codegen import reference
from fusion.refusals import Reason, Refusal
from fusion.runtime import kernels
from tests.numerics import assert_runs_as_exact_as_eager


def graphs(function, calls, **options):
    """How many graphs these calls compile; their results are as exact as eager."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="fusion", dynamic=True, options={"inner": "eager", **options})
    for inputs in calls:
        assert_runs_as_exact_as_eager(compiled, function, *inputs)
    return counters["stats"]["unique_graphs"], counters["fusion"]["fused"]


def tensors(d, heads=2, groups=2):
    torch.manual_seed(d)
    return torch.randn(3, heads, 9, d), torch.randn(3, groups, 11, d), torch.randn(3, groups, 11, d + 3)


WIDTHS = [tensors(d) for d in (5, 8, 12)]


def summed(q, k, v):
    return torch.softmax(q @ k.mT, -1).cumsum(-1) @ v


def mixed_dtypes(q, k, v):
    return sdpa(q.double(), k.double(), v.double())


def plain(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def scaled(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, -1).cumsum(-1) @ v


@pytest.mark.parametrize("function", [summed, mixed_dtypes])
def test_an_attention_that_is_refused_costs_no_compilation(function):
    assert graphs(function, WIDTHS) == (1, 0)


def test_numbers_of_a_refused_attention_stay_dynamic():
    calls = [(*WIDTHS[0], scale) for scale in (0.3, 0.4, 0.5)]
    assert graphs(scaled, calls) == (1, 0)


@pytest.mark.parametrize("function", [plain, sdpa])
def test_nor_does_one_that_no_kernel_is_made_for(function):
    refusing = SimpleNamespace(**vars(reference))
    refusing.supports = lambda spec, machine: Refusal(Reason.DTYPE, "no kernel, for this test")
    with kernels.emitting("refusing", ("cpu",), lambda: refusing):
        assert graphs(function, WIDTHS, emitter="refusing") == (1, 0)


@pytest.mark.parametrize("function", [plain, sdpa])
def test_one_that_is_taken_is_compiled_for_its_head_dimension(function):
    assert graphs(function, WIDTHS) == (3, 3)


def test_groups_of_heads_that_are_refused_stay_dynamic():
    def grouped(q, k, v):
        return sdpa(q.double(), k.double(), v.double(), enable_gqa=True)

    calls = [tensors(13, heads, groups) for heads, groups in ((8, 4), (10, 5), (12, 6))]
    assert graphs(grouped, calls)[0] == 1


def test_a_size_may_be_the_head_dimension_of_one_attention_and_the_length_of_another():
    def both(q, k, v, r, l, w):
        return plain(q, k, v), plain(r, l, w)

    def draw(n):
        shapes = (2, 9, n), (2, 11, n), (2, 11, n), (2, 9, 5), (2, n, 5), (2, n, 5)
        return [torch.randn(shape) for shape in shapes]

    assert graphs(both, [draw(8), draw(12)]) == (2, 4)
