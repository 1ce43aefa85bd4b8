"""Caches of keys and values in integers, packed, and in pages: no widened, unpacked or gathered copy is made."""

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.numerics import assert_as_exact_as_eager

aten = torch.ops.aten
B, H, N, D, PAGE = 2, 4, 48, 32, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(dtype, queries=1, heads=H):
    """Query, caches of integers, pages, a table, scales and zero points of keys."""
    torch.manual_seed(0)
    pages = [torch.randn(3 * N // PAGE, PAGE, H, D).to(dtype) for _ in range(2)]
    return {
        "q": torch.randn(B, heads, queries, D).to(dtype),
        "bytes": [torch.randint(-128, 128, (B, H, N, D), dtype=torch.int8) for _ in range(2)],
        "nibbles": [torch.randint(0, 256, (B, H, N, D // 2), dtype=torch.uint8) for _ in range(2)],
        "pages": pages,
        "table": torch.randperm(3 * N // PAGE)[: B * N // PAGE].view(B, N // PAGE) - N // PAGE,
        "order": torch.stack([torch.randperm(N) for _ in range(B)]),
        "scale": (torch.rand(B, H, N, 1) * 0.02).to(dtype),
        "zero": torch.randint(-4, 5, (B, H, N, 1)).to(dtype),
        "of_columns": (torch.rand(1, H, 1, D) * 0.02).to(dtype),
        "of_groups": (torch.rand(B, H, N, D // 8, 1) * 0.1).to(dtype),
        "of_spans": (torch.rand(B, H, N // 16, 1, D) * 0.02).to(dtype),
    }


def per_key(g):
    return [x.to(g["q"].dtype) * g["scale"] for x in g["bytes"]]


def with_zero_points(g):
    return [(x.to(g["q"].dtype) - g["zero"]) * g["scale"] for x in g["bytes"]]


def per_column(g):
    return [x.to(g["q"].dtype) * g["of_columns"] for x in g["bytes"]]


def keys_per_column_in_spans(g):
    """As KIVI does: keys by channel over spans of tokens, values by token."""
    k, v = (x.to(g["q"].dtype) for x in g["bytes"])
    return (k.unflatten(2, (-1, 16)) * g["of_spans"]).flatten(2, 3), v * g["scale"]


def unpacked(packed):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def nibbles(g):
    return [(unpacked(x).to(g["q"].dtype).unflatten(-1, (-1, 8)) * g["of_groups"]).flatten(-2) for x in g["nibbles"]]


def halves(g):
    """Packed by halves of a row, and signed: from -8 to 7."""
    return [(torch.cat([x & 15, x >> 4], -1).to(torch.int8) - 8).to(g["q"].dtype) * g["scale"] for x in g["nibbles"]]


def signed_nibbles(g):
    low, high = ([(x.view(torch.int8) << 4 >> 4), (x.view(torch.int8) >> 4)] for x in g["nibbles"])
    return [torch.stack(x, -1).flatten(-2).to(g["q"].dtype) * g["of_columns"] for x in (low, high)]


def paged(g):
    return [x[g["table"]].reshape(B, N, H, D).transpose(1, 2) for x in g["pages"]]


def selected(g):
    flat = (g["table"] % len(g["pages"][0])).flatten()
    return [x.index_select(0, flat).view(B, N, H, D).transpose(1, 2) for x in g["pages"]]


def slots(g):
    """A table with an entry per key, into a cache without pages."""
    places = ((g["table"] % len(g["pages"][0]))[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    return [x.flatten(0, 1)[places].transpose(1, 2) for x in g["pages"]]


def gathered(g):
    places = g["order"][:, None, :, None].expand(B, H, N, D)
    return [x.flatten(0, 1)[: B * N].view(B, N, H, D).transpose(1, 2).gather(2, places) for x in g["pages"]]


def paged_bytes(g):
    """Pages of integers, with scales in pages of their own."""
    caches = [x.transpose(1, 2).reshape(-1, PAGE, H, D) for x in g["bytes"]]
    scales = g["scale"].transpose(1, 2).reshape(-1, PAGE, H, 1)
    table = g["table"] % len(caches[0])
    k, v = (x[table].to(g["q"].dtype) * scales[table] for x in caches)
    return [x.reshape(B, N, H, D).transpose(1, 2) for x in (k, v)]


SPELLINGS = (per_key, with_zero_points, per_column, keys_per_column_in_spans, nibbles, halves, signed_nibbles, paged,
             selected, slots, gathered, paged_bytes)  # fmt: skip


def attention(keys, g, causal=False):
    k, v = keys(g)
    return F.scaled_dot_product_attention(g["q"], k, v, is_causal=causal, enable_gqa=True)


def wide(g):
    """The same in float64."""
    return {
        name: [x.double() if x.is_floating_point() else x for x in held]
        if isinstance(held, list)
        else held.double()
        if held.is_floating_point()
        else held
        for name, held in g.items()
    }


def run(keys, given, causal=False, **options):
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": True} | options
    with fusion.collect_reports() as reports, torch.no_grad():
        result = torch.compile(attention, backend="fusion", options=options)(keys, given, causal)
        assert_as_exact_as_eager(result, attention(keys, given, causal), attention(keys, wide(given), causal))
    (report,) = reports
    return report


def large(graph) -> list[str]:
    """Operations that make a tensor with an element for every element of K."""
    size = B * H * N * D
    made = [n for n in graph.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)]
    storages = {n.meta["val"].untyped_storage()._cdata for n in graph.graph.nodes if n.op == "placeholder"}
    return [
        str(n.target)
        for n in made
        if n.meta["val"].numel() >= size
        and n.meta["val"].untyped_storage()._cdata not in storages
        and n.target in (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.mul.Tensor,
                         aten.sub.Tensor, aten.stack.default, aten.cat.default, aten.to.dtype)
    ]  # fmt: skip


@pytest.mark.parametrize("keys", SPELLINGS, ids=lambda f: f.__name__)
def test_nothing_of_the_size_of_a_cache_is_made(keys):
    report = run(keys, draw(torch.float32), emitter="reference")
    (site,) = report.sites
    assert site.validated.startswith("values in")
    assert not large(report.graph_after), site.spec


def test_nothing_is_left_where_the_result_is_moved():
    """As transformers does: what is replaced ends behind SDPA."""

    def moved(keys, g):
        return attention(keys, g).transpose(1, 2).contiguous()

    given = draw(torch.float32)
    torch._dynamo.reset()
    with fusion.collect_reports() as reports, torch.no_grad():
        out = torch.compile(moved, backend="fusion", options={"inner": "eager", "strict": True})(paged, given)
    assert_as_exact_as_eager(out, moved(paged, given), moved(paged, wide(given)))
    graph = reports[0].graph_after
    assert not large(graph)
    assert aten.scaled_dot_product_attention.default not in {node.target for node in graph.graph.nodes}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("queries", [1, 21])
@pytest.mark.parametrize("keys", SPELLINGS, ids=lambda f: f.__name__)
def test_kernels(keys, queries):
    pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")
    dtype = DTYPES[(SPELLINGS.index(keys) + queries) % 3]
    run(keys, draw(dtype, queries, heads=H if queries > 1 else 2 * H), causal=queries > 1)


@pytest.mark.parametrize("keys", SPELLINGS, ids=lambda f: f.__name__)
def test_gpu_kernels(keys):
    pytest.importorskip("triton", reason="kernels need triton")
    from tests.emitters import interpreted

    with interpreted():
        run(keys, draw(DTYPES[SPELLINGS.index(keys) % 2], 5), causal=True)


# --- bad tables -------------------------------------------------------------------------------------------------------


def selected_rows(g):
    return [x.flatten(0, 1)[:, 0].index_select(0, g["places"]) for x in g["pages"]]


def gathered_rows(g):
    return [x.flatten(0, 1)[:, 0].gather(0, g["places"][:, None].expand(-1, D)) for x in g["pages"]]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("keys", [paged, selected_rows, gathered_rows], ids=lambda f: f.__name__)
def test_bad_tables_get_the_error_of_eager_mode(keys, inner):
    def function(g):
        k, v = keys(g)
        return torch.softmax(g["q"] @ k.mT, -1) @ v

    torch._dynamo.reset()
    given = draw(torch.float32)
    extent = len(given["pages"][0]) if keys is paged else len(given["pages"][0]) * PAGE
    given["places"] = torch.arange(20)
    with torch.no_grad():
        compiled = torch.compile(function, backend="fusion", options={"inner": inner, "strict": True})
        assert_as_exact_as_eager(compiled(given), function(given), function(wide(given)))
        for bad in (extent, -extent - 1):
            given["table"][1, 2] = given["places"][3] = bad
            with pytest.raises(Exception) as expected:
                function(given)
            with pytest.raises(type(expected.value)) as found:
                compiled(given)
            assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


# --- what is left as it was -------------------------------------------------------------------------------------------


def test_a_gathered_copy_that_is_needed_anyway():
    def function(q, cache, table):
        k = cache[table]
        return torch.softmax(q @ k.mT, -1) @ cache[table[:3]].repeat(4, 1), k

    q, cache, table = torch.randn(5, 8), torch.randn(20, 8), torch.arange(12)
    torch._dynamo.reset()
    with fusion.collect_reports() as reports, torch.no_grad():
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})
        assert_as_exact_as_eager(
            compiled(q, cache, table), function(q, cache, table), function(q.double(), cache.double(), table)
        )
    assert reports[0].sites[0].spec.operands[1].rank == 2 and not reports[0].sites[0].spec.k_value


def test_caches_that_are_trained():
    """The gradient of a gathered cache is a scatter, which stays with the graph."""

    def function(q, cache, table):
        return torch.softmax(q @ cache[table].mT, -1) @ cache[table]

    def gradients(run, q, cache):
        q, cache = q.detach().requires_grad_(), cache.detach().requires_grad_()
        run(q, cache, table).square().sum().backward()
        return q.grad, cache.grad

    q, cache, table = torch.randn(5, 8), torch.randn(20, 8), torch.arange(12) % 7
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})
    actual, eager = gradients(compiled, q, cache), gradients(function, q, cache)
    assert_as_exact_as_eager(actual, eager, gradients(function, q.double(), cache.double()))


def test_positions_that_change_after_they_were_read():
    def function(q, cache, table):
        k = cache[table]
        table.zero_()
        return torch.softmax(q @ k.mT, -1) @ cache[table]

    torch._dynamo.reset()
    q, cache = torch.randn(5, 8), torch.randn(20, 8)
    with torch.no_grad():
        compiled = torch.compile(function, backend="fusion", options={"inner": "eager"})
        actual, eager = (f(q, cache, torch.arange(12)) for f in (compiled, function))
        assert_as_exact_as_eager(actual, eager, function(q.double(), cache.double(), torch.arange(12)))


def test_heads_picked_by_a_list():
    """As falcon splits its projection: the list is a tensor of the graph, and counts from the end."""

    def attend(x):
        rows = x.unflatten(-1, (-1, H + 2, D))
        k, v = (rows[:, :, :, [place]].expand_as(rows[:, :, :, :-2]) for place in (-2, -1))
        q, k, v = (y.flatten(2, 3).transpose(1, 2) for y in (rows[:, :, :, :-2], k, v))
        return (q @ k.mT * 0.3).softmax(-1) @ v

    x = torch.randn(B, 7, 2 * (H + 2) * D)
    assert fusion.explain(attend, x).fused == 1
    torch._dynamo.reset()
    out = torch.compile(attend, backend="fusion", options={"inner": "eager"})(x)
    assert_as_exact_as_eager(out, attend(x), attend(x.double()))


@pytest.mark.parametrize("first", [3, 8])
def test_the_last_keys_of_a_cache_that_has_fewer(first):
    """A window of five keys on a cache that grows: sizes are symbols, of which the first call has fewer or more."""

    def step(q, k, v):
        return torch.softmax(q @ k[..., -5:, :].mT / 4, -1) @ v[..., -5:, :]

    compiled = torch.compile(step, backend="fusion", dynamic=True, options={"inner": "eager", "strict": True})
    for n in (first, 4, 5, 6, 31):
        inputs = [torch.randn(2, 3, length, 16) for length in (7, n, n)]
        exact = step(*(x.double() for x in inputs))
        assert_as_exact_as_eager(compiled(*inputs), step(*inputs), exact)
