"""Sets of keys against a mask of all keys: what is predicted, and what bounds it."""

import pytest
import torch

import fusion
from fusion.ir import AttentionSpec
from fusion.machine import machine
from fusion.planning.pays import sets_pay
from fusion.planning.problem import problem_of
from fusion.planning.schedules import lower_bound

D = 64


def forms(monkeypatch, shared: bool) -> tuple[AttentionSpec, AttentionSpec]:
    """(over sets, under a mask) of 4 heads."""
    specs = []

    def attention(q, k, v, index_scores):
        dead = torch.ones_like(index_scores, dtype=torch.bool).scatter(-1, index_scores.topk(8).indices, False)
        k, v = (x[:, :1] if shared else x for x in (k, v))
        return (q @ k.mT).masked_fill(dead.unsqueeze(1), -float("inf")).softmax(-1) @ v

    tensors = [torch.randn(1, 4, 32, D) for _ in range(3)]
    for answer in (None, "as asked for"):
        torch._dynamo.reset()
        monkeypatch.setattr("fusion.planning.pays.sets_pay", lambda *_, answer=answer: answer)
        with torch.no_grad():
            specs.append(fusion.explain(attention, *tensors, torch.randn(1, 32, 32)).sites[0].spec)
    return specs[0], specs[1]


def sizes(spec: AttentionSpec, n: int, keys: int) -> list[int]:
    known = {"B0": 1, "B1": 4, "Nq": n, "Nk": n, "Nset": keys}
    return [known[name] for name in spec.sizes]


@pytest.mark.parametrize("shared", [False, True])
def test_few_of_many_keys_pay_and_most_do_not(monkeypatch, shared):
    sets, dense = forms(monkeypatch, shared)
    here = machine("cpu")
    for n, keys, pays in ((8192, 64, True), (8192, 8192, False), (256, 256, False)):
        reason = sets_pay((sets, sizes(sets, n, keys)), (dense, sizes(dense, n, keys)), 0, here)
        assert (reason is None) == pays, (n, keys, reason)
    reason = sets_pay((sets, sizes(sets, 256, 256)), (dense, sizes(dense, 256, 256)), 1 << 40, here)
    assert reason is None  # a mask that large costs more than anything


@pytest.mark.parametrize("name", ["a100", "h100", "mi300x"])
@pytest.mark.parametrize("shared", [False, True])
def test_sets_on_gpus(monkeypatch, shared, name):
    """Heads that share keys fill a tile's rows, so that more keys pay than where each head has its own."""
    sets, dense = forms(monkeypatch, shared)
    there = machine(name)
    for n, keys, pays in ((8192, 64, True), (8192, 8192, False), (256, 256, False)):
        reason = sets_pay((sets, sizes(sets, n, keys)), (dense, sizes(dense, n, keys)), 0, there)
        assert (reason is None) == pays, (n, keys, reason)
    reason = sets_pay((sets, sizes(sets, 256, 256)), (dense, sizes(dense, 256, 256)), 1 << 40, there)
    assert reason is None


def test_the_bound_counts_keys_once(monkeypatch):
    """Every query and every key once, or the share of the scores that is wanted: not the keys of each set."""
    n, keys = 4096, 64
    for shared, rows in ((False, 1), (True, 4)):
        sets, _ = forms(monkeypatch, shared)
        problem = problem_of(sets, sizes(sets, n, keys))
        assert (problem.n_k_total, problem.n_k, problem.n_q, problem.heads) == (n, keys, rows, n)
        heads = 4 // rows
        trivial = heads * (n * rows + n) * 2 * D
        assert lower_bound(problem, 1 << 20) == trivial
        capacity = D * D
        assert lower_bound(problem, capacity) == max(trivial, heads * n * rows * keys * D**2 / capacity)
    assert "of 4096 keys" in str(problem)
