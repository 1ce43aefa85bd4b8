"""Masks that are data: maps of their tiles agree with brute force, and attention with one with eager, dead rows too."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fusion
import fusion.runtime.op  # registers the ops
from fusion.ir import integers
from fusion.ir.expr import ZERO, I, J, Kind, const, coord, load
from fusion.ir.ops import apply
from fusion.ir.tile_map import CELL_KEYS, CELL_ROWS, HARD_BIAS, MapSpec
from fusion.machine import machine, with_cores
from fusion.planning.pays import map_pays
from fusion.runtime.tile_map_op import Cells, tile_map
from tests.numerics import assert_as_exact_as_eager, wide

B0 = coord("b0")
MASK = load(0, (B0, I, J), Kind.BOOL)
BIAS = load(0, (B0, I, J), Kind.FLOAT)
LOWEST = torch.finfo(torch.float32).min


def spec_of(live, n_q, n_k, full=None, rows=True, batch=2):
    numbers = (integers.integer(n) for n in (batch, n_q, n_k))
    extent, queries, keys = numbers
    return MapSpec(
        sizes=(), batch=(extent,), n_q=queries, n_k=keys, live=live, full=live if full is None else full, rows=rows
    )


def brute(live, full):
    """[b, rows of cells, columns, 2] of bool tensors [b, n_q, n_k], cell by cell."""
    found = []
    for line_live, line_full in zip(live.split(CELL_ROWS, 1), full.split(CELL_ROWS, 1), strict=True):
        pairs = zip(line_live.split(CELL_KEYS, 2), line_full.split(CELL_KEYS, 2), strict=True)
        found.append(torch.stack([torch.stack([a.any(2).any(1), ~b.all(2).all(1)], -1) for a, b in pairs], 1))
    return torch.stack(found, 1)


def blocky(n_q, n_k, seed):
    """A random mask with empty, full and random cells."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-n_q // 16), -(-n_k // 32)
    kind = torch.randint(0, 4, (2, rows, columns), generator=generator)
    kind = kind.repeat_interleave(16, 1).repeat_interleave(32, 2)[:, :n_q, :n_k]
    noise = torch.rand(2, n_q, n_k, generator=generator) > 0.5
    return torch.where(kind == 0, noise, kind >= 2)


@hypothesis.given(st.integers(1, 150), st.integers(1, 200), st.integers(0, 9))
@hypothesis.settings(max_examples=40)
def test_cells_of_random_dense_masks_are_those_of_brute_force(n_q, n_k, seed):
    mask = blocky(n_q, n_k, seed)
    expected = brute(mask, mask)
    assert torch.equal(Cells(spec_of(MASK, n_q, n_k), [mask], {}).codes(), expected)
    hard = [LOWEST, -math.inf, HARD_BIAS][seed % 3]
    bias = torch.zeros(mask.shape).masked_fill(~mask, hard)
    live, full = apply("not", apply("fle", BIAS, const(HARD_BIAS))), apply("feq", BIAS, ZERO)
    assert torch.equal(Cells(spec_of(live, n_q, n_k, full), [bias], {}).codes(), expected)
    assert torch.equal(Cells(spec_of(live, n_q, n_k, full), [bias.mT.contiguous().mT], {}).codes(), expected)


@hypothesis.given(st.integers(1, 150), st.integers(1, 200), st.integers(0, 9), st.data())
@hypothesis.settings(max_examples=30)
def test_the_table_counts_the_cells_of_any_rectangle(n_q, n_k, seed, data):
    mask = blocky(n_q, n_k, seed)
    table = tile_map([mask], [], spec_of(MASK, n_q, n_k).to_json())
    expected = brute(mask, mask)
    r0, r1 = sorted((data.draw(st.integers(0, expected.shape[1])), data.draw(st.integers(0, expected.shape[1]))))
    c0, c1 = sorted((data.draw(st.integers(0, expected.shape[2])), data.draw(st.integers(0, expected.shape[2]))))
    count = table[:, r1, c1] - table[:, r0, c1] - table[:, r1, c0] + table[:, r0, c0]
    assert torch.equal(count, expected[:, r0:r1, c0:c1].sum((1, 2)).to(torch.int32))


@pytest.mark.parametrize("n", [1, 64, 150])
def test_cells_of_sorted_documents_are_those_of_brute_force(n):
    numbers = torch.randint(0, 2, (2, n), generator=torch.Generator().manual_seed(n)).cumsum(1)
    same = apply("ieq", load(0, (B0, I), Kind.INT), load(0, (B0, J), Kind.INT))
    mask = numbers[:, :, None] == numbers[:, None, :]
    assert torch.equal(Cells(spec_of(same, n, n), [numbers], {}).codes(), brute(mask, mask))


_shifts = st.integers(-60, 60)


@hypothesis.given(_shifts, _shifts, st.sampled_from(["and", "or"]), st.sampled_from([1, 3, 16]))
@hypothesis.settings(max_examples=40)
def test_cells_of_predicates_of_positions_hold_what_is_live(low, high, join, divisor):
    """Interval arithmetic is never wrong, and exact for one comparison."""
    n = 130
    row, column = integers.floordiv(I, divisor), integers.floordiv(J, divisor)
    first = apply("ile", column, integers.add(row, high))
    second = apply("ile", integers.add(row, low), column)
    i, j = torch.arange(n)[:, None] // divisor, torch.arange(n)[None, :] // divisor
    one, two = (j <= i + high)[None], (i + low <= j)[None]
    single = Cells(spec_of(first, n, n, batch=1), [], {}).codes()
    if divisor in (1, 16):
        assert torch.equal(single.expand(1, 5, 3, 2), brute(one, one))
    found = Cells(spec_of(apply(join, first, second), n, n, batch=1), [], {}).codes().expand(1, 5, 3, 2)
    mask = one & two if join == "and" else one | two
    exact = brute(mask, mask)
    assert bool((found | ~exact).all())


def test_nan_and_soft_values_are_neither_dead_nor_full():
    bias = torch.zeros(2, 64, 192)
    bias[:, :, :64], bias[:, 3, 70], bias[:, :, 128:] = LOWEST, math.nan, -5.0
    live, full = apply("not", apply("fle", BIAS, const(HARD_BIAS))), apply("feq", BIAS, ZERO)
    found = Cells(spec_of(live, 64, 192, full), [bias], {}).codes()
    assert found[0, 0].tolist() == [[False, True], [True, True], [True, True]]
    assert found[0, 1].tolist() == [[False, True], [True, False], [True, True]]


def test_a_mask_without_structure_is_not_read_to_the_end():
    mask = torch.rand(1, 2048, 1024) > 0.5
    mask[0, 700:740, :64] = False  # between the rows that are looked at
    table = tile_map([mask], [], spec_of(MASK, 2048, 1024, batch=1).to_json())
    assert table[0, -1, -1].tolist() == [64 * 16, 64 * 16]


def test_a_map_does_not_depend_on_the_calls_before_it():
    random, structured = torch.rand(1, 2048, 1024) > 0.5, torch.ones(1, 2048, 1024, dtype=torch.bool).tril()
    text = spec_of(MASK, 2048, 1024, batch=1).to_json()
    live = int(brute(structured, structured)[..., 0].sum())
    for mask, expected in [(random, 64 * 16)] * 3 + [(structured, live)]:
        assert int(tile_map([mask], [], text)[0, -1, -1, 0]) == expected


# --- through the backend ----------------------------------------------------------------------------------------

N = 300


def masked(fill):
    def attend(q, k, v, keep):
        value = torch.finfo(q.dtype).min if fill is LOWEST else fill
        return torch.softmax((q @ k.mT).masked_fill(~keep, value), -1) @ v

    return attend


def added(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.3 + bias, -1) @ v


def capped(q, k, v, bias):
    return torch.softmax(torch.tanh(q @ k.mT / 5) * 5 + bias, -1) @ v


def causal_and(q, k, v, tokens):
    i, j = torch.arange(N)[:, None], torch.arange(N)
    keep = (j <= i) & (tokens[:, None, None, :] != 0)
    return torch.softmax(torch.where(keep, q @ k.mT, LOWEST), -1) @ v


def packed(q, k, v, numbers):
    return masked(-math.inf)(q, k, v, numbers[:, None, :, None] == numbers[:, None, None, :])


def packed_by_sums(q, k, v, starts):
    numbers = starts.cumsum(-1)
    keep = (numbers[:, None] - numbers[..., None]).abs() < 1
    return masked(LOWEST)(q, k, v, keep[:, None] & torch.ones(N, N, dtype=torch.bool).tril())


def packed_additive(q, k, v, numbers):
    apart = (numbers.unsqueeze(1) != numbers.unsqueeze(2)).float()
    return torch.softmax(q @ k.mT - (apart * 1e9)[:, None].to(q.dtype), -1) @ v


def sdpa(q, k, v, keep):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def data():
    keep = torch.zeros(2, 1, N, N, dtype=torch.bool)
    keep[0, 0, :, 60:200] = True
    keep[1, 0, 100:, :130] = torch.rand(200, 130) > 0.4
    padding = torch.ones(2, N, dtype=torch.int64)
    padding[0, :110], padding[1, 280:] = 0, 0
    numbers = (torch.arange(N) // 70)[None].repeat(2, 1)
    bias = torch.zeros(2, 1, N, N).masked_fill(~keep, LOWEST)
    soft = bias.masked_fill(bias == 0, 0.0)
    soft[:, :, 128:192] += torch.randn(64, N).clamp(-9, 9)
    tokens = padding.bool()[:, None, None, :]
    starts = torch.zeros(2, N, dtype=torch.int64).index_fill_(1, torch.tensor([50, 51, 140, 250]), 1)
    return {
        "bool mask": (masked(-math.inf), keep),
        "bool mask, finite fill": (masked(LOWEST), keep),
        "bool mask to sdpa": (sdpa, keep),
        "additive": (added, bias),
        "additive to sdpa": (sdpa, bias),
        "additive -inf": (added, bias.masked_fill(~keep, -math.inf)),
        "additive -1e9": (capped, bias.clamp(min=-1e9)),
        "additive, soft": (added, soft),
        "padding": (masked(-1e9), tokens),
        "padding left and right, causal": (causal_and, padding),
        "documents": (packed, numbers),
        "documents by sums": (packed_by_sums, starts),
        "documents, additive": (packed_additive, numbers),
    }


OPTIONS = {"inner": "eager", "strict": True, "tile_maps": "always"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", data())
def test_attention_with_a_map_is_as_exact_as_eager(name, dtype):
    torch.manual_seed(0)
    function, mask = data()[name]
    mask = mask.to(dtype) if mask.is_floating_point() else mask
    q, k, v = (torch.randn(2, 2, N, 16).to(dtype) for _ in range(3))
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options=OPTIONS)(q, k, v, mask)
        eager = function(q, k, v, mask)
        exact = function(*(x.double() if x.is_floating_point() else x for x in (q, k, v, mask)))
    assert_as_exact_as_eager(actual, eager, exact, dtype)
    (site,) = reports[0].sites
    assert site.spec.mask.tile_live is not None and site.spec.operands[-1].name == "tiles"


def graph_calls(function, *inputs, **options):
    """Targets of the calls in the graph that fusion hands on."""
    torch._dynamo.reset()
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options=OPTIONS | options)(*inputs)
        assert_as_exact_as_eager(actual, function(*inputs), function(*wide(inputs)))
    graph = reports[0].graph_after.graph
    return [str(node.target) for node in graph.nodes if "fusion" in str(node.target)]


def test_layers_with_the_same_mask_share_a_map():
    def model(x, padding, other):
        for mask in (padding, padding, other, padding):
            x = masked(-1e9)(x, x * 0.5, x, mask[:, None, None, :])
        return x

    padding = torch.arange(N)[None] < torch.tensor([[200], [N]])
    calls = graph_calls(model, torch.randn(2, 2, N, 16), padding, padding.flip(0).contiguous())
    assert calls.count("fusion.tile_map.default") == 2 and calls.count("fusion.attention.default") == 4


def test_small_problems_get_no_map_and_never_means_never():
    function, mask = data()["bool mask"]
    inputs = [*(torch.randn(2, 2, N, 16) for _ in range(3)), mask]
    assert "fusion.tile_map.default" not in graph_calls(function, *(x[..., :16, :] for x in inputs[:3]),
                                                        mask[..., :16, :16], tile_maps="auto")  # fmt: skip
    assert "fusion.tile_map.default" not in graph_calls(function, *inputs, tile_maps="never")


def test_the_cost_model_weighs_the_pass_against_all_that_share_it():
    def spec_for(n):
        inputs = [*(torch.randn(1, 2, n, 16) for _ in range(3)), torch.ones(1, 1, n, n, dtype=torch.bool)]
        torch._dynamo.reset()
        with torch.no_grad(), fusion.collect_reports() as reports:
            torch.compile(masked(-1e9), backend="fusion", options=OPTIONS | {"tile_maps": "never"})(*inputs)
        return reports[0].sites[0].spec

    spec = spec_for(64)
    small, large = ([1, 2, n, n] for n in (64, 8192))
    names = dict(zip(spec.sizes, small, strict=True))
    assert set(names) == {"B0", "B1", "Nq", "Nk"}
    mapped = spec_of(MASK, 8192, 8192, batch=1)
    assert not map_pays(spec_of(MASK, 64, 64, batch=1), [], [(spec, small)])
    assert map_pays(mapped, [], [(spec, large)])
    assert map_pays(mapped, [], [(spec, large)] * 12)
    # A GPU computes one such layer in less time than the pass takes, but not all layers of a model.
    assert not map_pays(mapped, [], [(spec, large)], "h200")
    assert map_pays(mapped, [], [(spec, [4, 32, 8192, 8192])] * 24, "h200")


def test_a_float_buffer_of_ones_and_zeros_gets_a_map_in_one_layer(monkeypatch):
    """nanoGPT's mask: each layer has a buffer of its own, so that nothing is shared."""
    bias, asked = torch.tril(torch.ones(1024, 1024)).view(1, 1, 1024, 1024), []

    def attend(q, k, v, bias):
        return (q @ k.mT * 0.125).masked_fill(bias == 0, -math.inf).softmax(-1) @ v

    monkeypatch.setattr("fusion.planning.pays.map_pays", lambda *arguments: asked.append(arguments[:3]) or False)
    with torch.no_grad():
        fusion.explain(attend, *(torch.randn(1, 12, 1024, 64) for _ in range(3)), bias)
    assert map_pays(*asked[0], with_cores(machine(None), 2))


def test_on_a_gpu_no_number_is_waited_for():
    """Tensors on the meta device have no values: reading one would raise."""
    documents = apply("ieq", load(0, (B0, I), Kind.INT), load(0, (B0, J), Kind.INT))
    blocks = load(0, (B0, integers.floordiv(I, 64), integers.floordiv(J, 96)), Kind.BOOL)
    every_third = load(0, (B0, integers.mul(I, 3), J), Kind.BOOL)
    for live, shape in ((MASK, (4096, 2000)), (documents, (4096,)), (blocks, (64, 21)), (every_third, (12290, 2000))):
        data = torch.empty(2, *shape, dtype=torch.int64 if live is documents else torch.bool, device="meta")
        table = tile_map([data], [], spec_of(live, 4096, 2000).to_json())
        assert table.shape == (2, 129, 33, 2) and table.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bool mask", torch.float32),
        ("bool mask, finite fill", torch.bfloat16),
        ("additive", torch.float32),
        ("padding left and right, causal", torch.float32),
        ("documents by sums", torch.float32),
        ("documents", torch.bfloat16),
    ],
)
def test_gradients_with_a_map_are_as_exact_as_eagers(name, dtype):
    torch.manual_seed(0)
    function, mask = data()[name]
    mask = mask.to(dtype) if mask.is_floating_point() else mask
    qkv = [torch.randn(2, 2, N, 16).to(dtype).requires_grad_() for _ in range(3)]
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        out = torch.compile(function, backend="fusion", options=OPTIONS)(*qkv, mask)
    assert reports[0].sites[0].spec.mask.tile_live is not None
    grad = torch.randn(out.shape).to(dtype)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    exact = function(*wide, mask.double() if mask.is_floating_point() else mask)
    found = (
        torch.autograd.grad(out, qkv, grad),
        torch.autograd.grad(function(*qkv, mask), qkv, grad),
        torch.autograd.grad(exact, wide, grad.double()),
    )
    for triple in zip(*found, strict=True):
        assert_as_exact_as_eager(*triple, dtype)


def test_a_mask_that_is_trained_keeps_its_gradient():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, N, 16, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, N, N)
    bias[..., 200:] = LOWEST
    for trained in (False, True):
        inputs = [q, k, v, bias.clone().requires_grad_(trained)]
        wanted = [x for x in inputs if x.requires_grad]
        torch._dynamo.reset()
        with fusion.collect_reports() as reports:
            out = torch.compile(added, backend="fusion", options=OPTIONS)(*inputs)
        assert (reports[0].sites[0].spec.mask is None) == trained
        gradients = torch.autograd.grad(out.square().sum(), wanted)
        expected = torch.autograd.grad(added(*inputs).square().sum(), wanted)
        exact = torch.autograd.grad(added(*(x.double() for x in inputs)).square().sum(), wanted)
        for pair in zip(gradients, expected, exact, strict=True):
            assert_as_exact_as_eager(*pair, torch.float32)


def test_the_op_says_what_it_returns():
    mask = blocky(70, 130, 0)
    text = spec_of(MASK, 70, 130).to_json()
    torch.library.opcheck(torch.ops.fusion.tile_map, ([mask], [], text))
    assert MapSpec.from_json(text) == spec_of(MASK, 70, 130)


def test_a_mask_of_the_later_batch_dimensions_has_a_map_of_its_own_for_each():
    def attend(q, k, v, keep):
        return torch.softmax((q @ k.mT).masked_fill(~keep, -math.inf), -1) @ v

    q, k, v = (torch.randn(2, 2, 3, 150, 8) for _ in range(3))
    keep = torch.eye(6, dtype=torch.bool).repeat_interleave(25, 1).view(2, 3, 1, 150)  # other keys for each (b1, b2)
    options = {"inner": "eager", "tile_maps": "always"}
    with fusion.collect_reports() as reports:
        actual = torch.compile(attend, backend="fusion", options=options)(q, k, v, keep)
    assert reports[0].sites[0].spec.mask.tile_live is not None
    exact = attend(q.double(), k.double(), v.double(), keep)
    assert_as_exact_as_eager(actual, attend(q, k, v, keep), exact, torch.float32)


ENDS = [torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).min + 40, -3, 50, torch.iinfo(torch.int64).max]
COMPARED = {
    "moved": (lambda i, j, t: integers.sub(J, integers.add(I, t)), lambda i, j, t: j - (i + t)),
    "multiplied": (lambda i, j, t: integers.mul(3, integers.add(J, I, t)), lambda i, j, t: 3 * (j + i + t)),
    "distance": (
        lambda i, j, t: apply("iabs", integers.sub(integers.add(J, t), I)), lambda i, j, t: (j + t - i).abs(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("join", ["ile", "ilt", "ieq"])
@pytest.mark.parametrize("name", COMPARED)
def test_cells_of_sums_that_wrap_around_hold_what_is_live(name: str, join: str) -> None:
    n, ends = 130, torch.tensor(ENDS)
    expression, eager = COMPARED[name]
    live = apply(join, expression(I, J, load(0, (B0,), Kind.INT)), integers.integer(20))
    i, j, t = torch.arange(n)[:, None], torch.arange(n), ends[:, None, None]
    value = eager(i, j, t)
    mask = {"ile": value <= 20, "ilt": value < 20, "ieq": value == 20}[join]
    found = Cells(spec_of(live, n, n, batch=len(ENDS)), [ends], {}).codes()
    assert bool((found | ~brute(mask, mask)).all())
