"""Analysis of one product is bounded: long graphs neither overflow the stack nor cost the attentions beside them."""

import torch

import fusion
from fusion.passes.pullback.pullback import MAX_DEPTH, MAX_ELEMENTS


def recurrence(state, x, steps):
    for _ in range(steps):
        state = torch.exp(-x.abs()) * state + x @ state
    return state


def test_a_long_recurrence_costs_no_attention_beside_it():
    def function(q, k, v, x):
        return torch.softmax(q @ k.mT, -1) @ v + recurrence(x, x, 2 * MAX_DEPTH).mean()

    report = fusion.explain(function, *(torch.randn(2, 17, 16) for _ in range(3)), torch.randn(16, 16) / 16)
    assert not report.notes
    assert report.fused == 1


def test_a_mask_of_many_operations_is_loaded_where_the_walk_ends():
    def function(q, k, v):
        mask = torch.arange(17.0)[:, None] - torch.arange(17.0)
        for step in range(MAX_ELEMENTS):
            mask = mask + step
        return torch.softmax(q @ k.mT + mask, -1) @ v

    report = fusion.explain(function, *(torch.randn(2, 17, 16) for _ in range(3)))
    assert report.fused == 1 and len(report.sites[0].spec.operands) == 4
