"""torch's fused encoder operations, written with ordinary ones: the same numbers, or NotImplemented."""

from __future__ import annotations

import pytest
import torch

from fusion.passes.trace.decompositions import ENCODER, multi_head_attention, transformer_encoder_layer
from tests.numerics import assert_as_exact_as_eager, wide

E, HEADS, N = 16, 4, 7


def parameters(*shapes):
    return [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]


PROJECTIONS = ((3 * E, E), (3 * E,), (E, E), (E,))
PADDING = torch.arange(N)[None] >= torch.tensor([[N], [4]])
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("mask", "kind"), [(None, None), (CAUSAL, 0), (PADDING, 1), (CAUSAL.expand(2, HEADS, N, N), 2)]
)
@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention(mask, kind, weights):
    x = torch.randn(2, N, E)
    given = (x, x, x, E, HEADS, *parameters(*PROJECTIONS), mask, weights, True, kind)
    ours, eager = multi_head_attention(*given), torch._native_multi_head_attention(*given)
    exact = multi_head_attention(*wide(given))
    kept = slice(None) if weights else slice(0, 1)
    assert_as_exact_as_eager(ours[kept], eager[kept], exact[kept])
    assert weights or ours[1] is None


@torch.no_grad()
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer(norm_first, gelu):
    norms = [torch.ones(E), torch.zeros(E), torch.ones(E), torch.zeros(E)]
    feed_forward = parameters((32, E), (32,), (E, 32), (E,))
    given = (torch.randn(2, N, E), E, HEADS, *parameters(*PROJECTIONS), gelu, norm_first, 1e-5, *norms, *feed_forward)
    ours, eager = transformer_encoder_layer(*given), torch._transformer_encoder_layer_fwd(*given)
    assert_as_exact_as_eager(ours, eager, transformer_encoder_layer(*wide(given)))


def test_what_is_not_covered_is_left_to_torch():
    x = torch.randn(2, N, E)
    weights = parameters(*PROJECTIONS)
    assert multi_head_attention(x, x, x, E, HEADS, *weights, CAUSAL, False, True, 3) is NotImplemented
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])
    assert multi_head_attention(nested, nested, nested, E, HEADS, *weights) is NotImplemented


def test_both_names_of_an_operation_are_known():
    assert len(ENCODER) == 4 and set(ENCODER.values()) == {
        multi_head_attention,
        transformer_encoder_layer,
    }
