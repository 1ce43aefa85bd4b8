"""An attention over sets of keys that was stated wrongly is found, and sees a mask of all keys."""

import dataclasses

import pytest
import torch

import fusion
from fusion.ir import integers
from fusion.ir.expr import J, coord, load, substitute
from fusion.passes.specify import gathered_keys

B, H, N, K, D = 2, 4, 24, 5, 16


def attention(q, k, v, index_scores):
    dead = torch.ones_like(index_scores, dtype=torch.bool).scatter(-1, index_scores.topk(K).indices, False)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT).masked_fill(dead.unsqueeze(1), -float("inf"))
    return (scores + torch.arange(1, H + 1)[:, None, None] * torch.arange(N)).softmax(-1) @ v


def one_position_for_all(number, index, kind):
    return load(number, (*index[:-1], integers.mul(0, index[-1])), kind)


def of_other_rows(number, index, kind):
    return load(number, (index[0], integers.integer(0), *index[2:]), kind)


def heads_in_another_order(spec, axis, group, heads):
    made = right_heads(spec, axis, group, heads)
    last = coord(f"b{axis}")
    return dataclasses.replace(made, q=tuple(substitute(e, {last: integers.mul(0, last)}) for e in made.q))


def biases_of_slots(found):
    """The score program still at the key's number in the set, not at its position."""
    made = right_end(found)
    score = substitute(made.spec.score, dict.fromkeys(gathered_keys.loads(made.spec.score), J))
    return dataclasses.replace(made, spec=dataclasses.replace(made.spec, score=score))


right_heads, right_end = gathered_keys._heads_as_rows, gathered_keys._without_unused
FAULTS = {
    "load": one_position_for_all,
    "load ": of_other_rows,
    "_heads_as_rows": heads_in_another_order,
    "_without_unused": biases_of_slots,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_form_is_found(name, monkeypatch):
    monkeypatch.setattr("fusion.planning.pays.sets_pay", lambda *_: None)
    torch.manual_seed(0)
    inputs = (torch.randn(B, H, N, D), *(torch.randn(B, 2, N, D) for _ in range(2)), torch.randn(B, N, N))
    with torch.no_grad():
        assert "for each query" in fusion.explain(attention, *inputs).sites[0].attentions[0].keys
        torch._dynamo.reset()
        monkeypatch.setattr(gathered_keys, name.strip(), FAULTS[name])
        found = fusion.explain(attention, *inputs).sites[0].attentions[0]
    assert "a defect of fusion" in found.keys and found.spec.n_k_total is None
