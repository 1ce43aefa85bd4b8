"""Sets of keys that an indexer leaves to each query, in GPU kernels: the keys are read through the table."""

import functools

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.facts import compile_offline
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import forward_kernels
from fusion.machine import of_target
from fusion.planning.gpu import GpuPlanner
from tests.emitters import interpreted
from tests.passes import test_key_sets as sets

LONG = functools.partial(pytest.param, marks=pytest.mark.long)

INTERPRETED = (
    sets.of_the_function, sets.with_a_set_per_head, sets.with_heads_of_one_key, sets.with_grouped_heads,
    sets.with_biases, sets.with_a_sink, sets.without_a_softmax, sets.with_one_set_for_all_queries,
)  # fmt: skip
SIZES = {"B0": 1, "B1": 8, "Nq": 8192, "Nk": 8192, "Nset": 2048}


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch):
    monkeypatch.setattr("fusion.planning.pays.sets_pay", lambda *_: None)
    torch._dynamo.reset()


@pytest.mark.parametrize("function", INTERPRETED, ids=lambda f: f.__name__)
def test_sets_are_read_through_a_table(function):
    inputs = sets.drawn()
    with torch.no_grad(), interpreted(), fusion.collect_reports() as reports:
        sets.check(function, *inputs)
    assert "read through " in reports[0].sites[0].attentions[0].keys, str(reports[0])


def test_a_narrow_dtype():
    inputs = sets.drawn(torch.bfloat16)
    with torch.no_grad(), interpreted():
        sets.check(sets.with_heads_of_one_key, *inputs, dtype=torch.bfloat16)


@pytest.mark.parametrize("target", [LONG("sm_80"), "sm_90", LONG("sm_100"), "gfx942"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "d", "d_v"), [(8, 8, 192, 128), (32, 8, 128, 128), (128, 1, 576, 512)], ids=str
)
def test_kernels_do_not_spill(heads: int, key_heads: int, d: int, d_v: int, target: str):
    """Of DeepSeek-V3.2's layer with heads of their own, of grouped heads, and of latent keys that 128 heads share."""

    def attention(q, k, v, index_scores):
        dead = sets.outside(index_scores.topk(8, dim=-1).indices, index_scores).unsqueeze(1)
        v = k[..., :d_v] if key_heads == 1 else v
        if key_heads > 1:
            k, v = (x.repeat_interleave(heads // key_heads, 1) for x in (k, v))
        return sets.softmax_over((q @ k.mT).masked_fill(dead, -sets.INF), v)

    shapes = (heads, d), (key_heads, d), (key_heads, d_v)
    q, k, v = (torch.randn(1, h, 32, width, dtype=torch.bfloat16) for h, width in shapes)
    with torch.no_grad():
        spec = sets.site_of(attention, q, k, v, torch.randn(1, 32, 32)).spec
    tile = GpuPlanner(spec, of_target(target)).choose([SIZES[name] for name in spec.sizes]).tile
    kernels = forward_kernels(spec, d, d_v, False, Order(shared=key_heads == 1))
    (fact,) = compile_offline(spec, kernels, d, d_v, {kernels[0].name: tile}, target)
    assert fact.fits and not fact.lost and fact.spilled < 0.01, fact
    assert sum(fact.matrix.values()), fact
