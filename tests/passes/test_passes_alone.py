"""Single passes on small graphs: what each changes or finds, and what it leaves as it is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fusion.ir.expr import const, size
from fusion.passes import nodes
from fusion.passes.building import Symbols
from fusion.passes.nodes import Unsupported
from fusion.passes.prepare.distances import read_by_distance
from fusion.passes.prepare.late_division import move_divisions
from fusion.passes.prepare.unread_rows import skip_unread_rows
from fusion.passes.pullback.indexing import KeySet
from fusion.passes.pullback.operands import Access, mark_stored
from fusion.passes.pullback.reductions import MAX_SINKS
from fusion.passes.recognize.ancestors import escaping_weights
from fusion.passes.recognize.find import Site, find_sites
from fusion.passes.region import cut_out
from fusion.passes.specify.aux_outputs import split_extrema
from fusion.passes.specify.calls import specify_sites
from fusion.passes.specify.tile_maps import mapped
from fusion.passes.subgraphs import bodies, runs
from fusion.passes.tensors import dtensor, nested
from fusion.passes.trace.autocast import cast_before_expansions
from fusion.passes.trace.normalize import normalize
from fusion.refusals import Reason
from fusion.report import drawings
from tests.numerics import assert_same
from tests.passes.graphs import captured

aten = torch.ops.aten
N = 6


def qkv(**options) -> list[torch.Tensor]:
    return [torch.randn(2, N, 8, **options) for _ in range(3)]


def traced(function, *inputs) -> torch.fx.GraphModule:
    module = captured(function, *inputs)
    return normalize(module, [nodes.fake(node) for node in module.graph.find_nodes(op="placeholder")])


def calls(module) -> list[str]:
    return [str(nodes.packet(n)).removeprefix("aten.") for n in module.graph.nodes if n.op == "call_function"]


def site_of(function, *inputs) -> Site:
    (site,) = find_sites(traced(function, *inputs).graph)
    return site


def softmax(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


# trace


def test_fills_at_positions_become_masks_where_they_are_of_scores():
    positions = torch.tensor([1, 3])
    filled = lambda q, k, at: (q @ k.mT).index_fill(-1, at, -math.inf)
    assert calls(traced(filled, *qkv()[:2], positions))[-1] == "masked_fill"
    assert calls(traced(lambda x, at: x.index_fill(-1, at, 0.0), qkv()[0], positions)) == ["index_fill"]


def test_tensors_in_the_shape_of_scores_are_made_by_sizes():
    assert calls(traced(lambda q, k, v: torch.zeros_like(q @ k.mT), *qkv())) == ["zeros"]
    assert calls(traced(torch.zeros_like, qkv()[0])) == ["zeros_like"]


def test_a_linear_layer_of_data_is_a_product():
    weight = torch.nn.Parameter(torch.randn(5, 8))
    assert "matmul" in calls(traced(F.linear, qkv()[0], torch.randn(5, 8)))
    assert calls(traced(lambda x: F.linear(x, weight), qkv()[0].requires_grad_())) == ["linear"]


def test_casts_of_autocast_are_written_where_it_rules():
    def under(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return (q @ k.mT).exp()

    written = calls(traced(under, *qkv()))
    assert written.count("to") == 2 and written.index("to") < written.index("matmul")
    assert "to" not in calls(traced(lambda q, k, v: (q @ k.mT).exp(), *qkv()))


@pytest.mark.parametrize(("dtype", "moved"), [(torch.float32, True), (torch.int32, False)])
def test_casts_go_before_expansions_of_floats(dtype, moved):
    def repeated(q, k):
        return q @ k[:, None].expand(2, 3, N, 8).to(torch.bfloat16).mT

    module = traced(repeated, torch.randn(2, 3, N, 8, dtype=torch.bfloat16), torch.ones(2, N, 8, dtype=dtype))
    cast_before_expansions(module.graph)
    order = calls(module)
    assert (order.index("to") < order.index("expand")) is moved


def test_checkpointed_graphs_and_transforms_are_found():
    def part(x):
        return softmax(x, x, x)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)

    x = qkv()[0].requires_grad_()
    (body,) = bodies(captured(checkpointed, x)).values()
    assert "matmul" in str(body.graph.graph) and body.around == ()
    gradient = captured(torch.func.grad(lambda x: part(x).sum()), qkv()[0])
    assert [run.refusal for run in runs(gradient)] == [None] and "softmax" in str(runs(gradient)[0].body.graph)
    assert not bodies(captured(part, x)) and not runs(captured(part, x))


def test_other_kinds_of_tensor_are_left_to_their_rules():
    assert dtensor.conversion("redistribute", (torch.ones(2),)) is None
    assert "not all of its tensors are nested" in str(nested.reason_against(*qkv()))


# prepare


def test_a_table_is_read_once_for_each_distance():
    def biased(table, function):
        place = function(torch.arange(N)[:, None], torch.arange(N))
        return table[place]

    table = torch.randn(2 * N)
    module = traced(lambda table: biased(table, lambda i, j: (j - i).clamp(-2, 2) + 2), table)
    read_by_distance(module.graph)
    assert [tuple(nodes.fake(n).shape) for n in module.graph.nodes if nodes.packet(n) is aten.index][0] == (2 * N - 1,)
    module.recompile()
    assert_same(module(table)[0], biased(table, lambda i, j: (j - i).clamp(-2, 2) + 2))
    other = traced(lambda table: biased(table, lambda i, j: (j * i).clamp(0, 5)), table)
    before = calls(other)
    read_by_distance(other.graph)
    assert calls(other) == before


def test_rows_that_nothing_reads_are_not_computed():
    def last(x, w, every):
        out = F.linear(softmax(x, x, x), w)
        return (out if every else out[:, -1:]).exp()

    given = torch.randn(2, N, 8), torch.randn(8, 8)
    module = traced(lambda x, w: last(x, w, False), *given)
    assert skip_unread_rows(module.graph)
    (result,) = module.graph.output_node().all_input_nodes
    assert nodes.fake(result).shape == (2, 1, 8)
    assert not skip_unread_rows(traced(lambda x, w: last(x, w, True), *given).graph)


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.float16, False)])
def test_divisions_move_behind_the_product(dtype, fused):
    def renormalised(q, k, v):
        w = torch.softmax(q @ k.mT, -1) * (k.sum(-1) > 0)[:, None]
        return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v

    module = traced(renormalised, *qkv(dtype=dtype))
    _, (site,), promised = move_divisions(module, find_sites(module.graph))
    assert (site.refusal is None) is fused and bool(promised) is fused


# pullback


@pytest.mark.parametrize(("scale", "stripped"), [(0.5, True), (1e30, False)])
def test_an_operand_is_read_behind_its_scale_if_that_is_moderate(scale, stripped):
    (product,) = site_of(lambda q, k, v: softmax(q * scale, k, v), *qkv()).attentions[0].pullback.products
    assert (product.query.node.op == "placeholder") is stripped
    assert product.scale is (const(scale) if stripped else const(1.0))


def test_a_stored_cache_is_read_itself():
    q, k, v = qkv()
    widened = lambda q, k, s, v: softmax(q, k.to(q.dtype) * s, v)
    site = site_of(widened, q, k.to(torch.int8), torch.rand(2, N, 1), v)
    key = site.attentions[0].pullback.products[0].key
    assert isinstance(key, Access) and nodes.dtype(key.node) is torch.int8
    trained = site_of(widened, q.requires_grad_(), k.to(torch.int8), torch.rand(2, N, 1), v)
    assert nodes.dtype(trained.attentions[0].pullback.products[0].key.node) is torch.float32


def test_narrow_floats_are_marked_where_kernels_read_them():
    module = traced(lambda k: k.float() * 2, torch.ones(3).to(torch.float8_e4m3fn))
    for reads in (True, False):
        mark_stored(module.graph, lambda dtype, device, reads=reads: reads)
        assert next(iter(module.graph.nodes)).meta["stored"] is reads


@pytest.mark.parametrize("count", [MAX_SINKS, MAX_SINKS + 1])
def test_a_few_columns_may_stand_beside_the_keys(count):
    def with_sinks(q, k, v):
        scores = torch.cat([q @ k.mT, torch.zeros(2, N, count)], -1)
        return torch.softmax(scores, -1)[..., :N] @ v

    site = site_of(with_sinks, *qkv())
    assert site.refusal is None if count <= MAX_SINKS else site.refusal.kind is Reason.LIMIT
    if site.refusal is not None:
        assert f"{count} columns" in site.refusal.message


@pytest.mark.parametrize("distinct", [True, False])
def test_a_mask_of_the_largest_keys_is_a_set(distinct):
    def among(q, k, v, which):
        scores = q @ k.mT
        chosen = (k @ q.mT).topk(3, -1).indices if distinct else which
        dead = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
        return torch.softmax(scores.masked_fill(dead, -math.inf), -1) @ v

    sets = site_of(among, *qkv(), torch.zeros(2, N, 3, dtype=torch.int64)).attentions[0].pullback.key_sets
    assert [type(keys) for keys in sets.values()] == [KeySet] * distinct


# recognize, specify, replace


def test_weights_that_are_returned_are_listed_and_a_loss_is_not():
    def weights(q, k, v):
        return torch.softmax(q @ k.mT, -1)

    assert len(escaping_weights(traced(weights, *qkv()).graph)) == 1
    assert not escaping_weights(traced(lambda q, k, v: weights(q, k, v).square().sum(), *qkv()).graph)


@pytest.mark.parametrize("trained", [False, True])
def test_an_extremum_over_rows_and_keys_is_split_without_gradients(trained):
    def with_largest(q, k, v):
        scores = q @ k.mT
        return torch.softmax(scores, -1) @ v, scores.amax((-2, -1))

    module = traced(with_largest, *qkv(requires_grad=trained))
    split_extrema(module.graph, find_sites(module.graph))
    assert calls(module).count("amax") == (1 if trained else 2)


@pytest.mark.parametrize("of_data", [True, False])
def test_masks_of_data_have_a_map_of_tiles(of_data):
    def masked(q, k, v, pad):
        live = pad[:, None] if of_data else torch.arange(N)[:, None] >= torch.arange(N)
        return torch.softmax((q @ k.mT).masked_fill(~live, -math.inf), -1) @ v

    module = traced(masked, *qkv(), torch.ones(2, N, dtype=torch.bool))
    specify_sites(module.graph, sites := find_sites(module.graph))
    (call,) = sites[0].calls
    assert (mapped(call) is not None) is of_data


def test_sizes_are_values_of_the_graph_where_an_input_carries_them():
    torch._dynamo.reset()
    x = torch.randn(7, 8)
    torch._dynamo.mark_dynamic(x, 0)
    module = traced(lambda x: x * 2, x)
    symbols, extent = Symbols(module.graph), nodes.shape(next(n for n in module.graph.nodes if nodes.is_tensor(n)))[0]
    symbols.require(extent)
    with module.graph.inserting_before(module.graph.output_node()):
        assert nodes.fake(symbols.value(extent)).node.hint == 7 and symbols.value(const(3)) == 3
    with pytest.raises(Unsupported, match="not carried by any input"):
        symbols.require(size("nothing"))


def test_a_region_is_drawn_and_runs_alone():
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, N, 8), torch.randn(2, N, 3)
    site = site_of(softmax, q, k, v)
    roles = {box.text: box.role for box in drawings.before([site])[0].nodes}
    assert roles["aten::softmax"] == "step" and roles["aten::matmul"] == "product"
    region = cut_out(site)
    by_shape = {x.shape: x for x in (q, k, v)}
    assert_same(region.module(*(by_shape[nodes.fake(node).shape] for node in region.inputs)), softmax(q, k, v))
    drawn = site_of(lambda q, k, v: F.dropout(torch.softmax(q @ k.mT, -1)) @ v, q, k, v)
    assert cut_out(drawn) is None
