"""A table that is read at a function of the distance between row and key is read once for each distance."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import transformers

import fusion
from tests.numerics import assert_as_exact_as_eager

N_Q, N_K, HEADS, WIDTH, ROWS = 37, 53, 3, 16, 24


def distance(dtype=torch.int64):
    return torch.arange(N_K, dtype=dtype)[None] - torch.arange(N_Q, dtype=dtype)[:, None]


def t5_bucket(relative, buckets=ROWS, most=40):
    """As in transformers, writes in place included."""
    buckets //= 2
    found = 0
    found += (relative > 0).to(torch.long) * buckets
    relative = torch.abs(relative)
    exact = buckets // 2
    large = exact + (torch.log(relative.float() / exact) / math.log(most / exact) * (buckets - exact)).to(torch.long)
    large = torch.min(large, torch.full_like(large, buckets - 1))
    found += torch.where(relative < exact, relative, large)
    return found


def heads_last(bias):
    return bias.permute(2, 0, 1)


READS = {
    "clamped": lambda table: heads_last(table[distance().clamp(-11, 11) + 11]),
    "row minus key": lambda table: heads_last(table[(-distance()).clamp(0, 20)]),
    "from the end": lambda table: heads_last(table[-1 - distance().abs().clamp(max=9)]),
    "int32": lambda table: heads_last(table[distance(torch.int32).clamp(-11, 11) + 11]),
    "embedding": lambda table: heads_last(F.embedding(distance().abs().clamp(max=ROWS - 1), table)),
    "padding": lambda table: heads_last(F.embedding(distance().abs().clamp(max=20), table, padding_idx=3)),
    "buckets": lambda table: heads_last(F.embedding(t5_bucket(distance()), table)),
    "buckets with a batch": lambda table: F.embedding(t5_bucket(distance()[None]), table).permute(0, 3, 1, 2),
    "heads first": lambda table: table.t()[:, distance().clamp(-11, 11) + 11],
    "later rows": lambda table: heads_last(table[(distance() - 10).clamp(-11, 11) + 11]),
    "buckets in a table": lambda table: heads_last(table[torch.arange(ROWS).flip(0)[distance().clamp(-11, 11) + 11]]),
    "behind other rows": lambda table: heads_last(table[2:][distance().abs().clamp(max=15)]),
}


def attend(read):
    def attention(q, k, v, table):
        return (q @ k.mT / 4 + read(table)).softmax(-1) @ v

    return attention


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, n, WIDTH) for n in (N_Q, N_K, N_K))
    return [t.to(dtype).requires_grad_() for t in (q, k, v, torch.randn(ROWS, HEADS))]


def run(function, given, dtype):
    given = [t.detach().to(dtype).requires_grad_() for t in given]
    out = function(*given)
    return out, *torch.autograd.grad(out, given, torch.ones_like(out).tril())


def compiled(attention, **options):
    torch._dynamo.reset()
    return torch.compile(attention, backend="fusion", options={"inner": "eager"}, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", READS)
def test_results_and_gradients(name, dynamic):
    attention, given = attend(READS[name]), inputs()
    eager, exact = (run(attention, given, dtype) for dtype in (torch.float32, torch.float64))
    assert_as_exact_as_eager(run(compiled(attention, dynamic=dynamic), given, torch.float32), eager, exact)


@pytest.mark.parametrize("name", READS)
def test_attention_reads_what_is_linear_in_row_and_key(name):
    report = fusion.explain(attend(READS[name]), *(t.detach() for t in inputs()))
    assert report.fused == 1
    assert re.search(r"softmax\(s / 4 \+ \w+\[(b1, )?j - i \+ 36(, b1)?\]\)", str(report))


def test_the_graph_makes_no_matrix_of_positions():
    report = fusion.explain(attend(READS["buckets"]), *(t.detach() for t in inputs()))
    shapes = {tuple(n.meta["val"].shape) for n in report.graph_after.graph.nodes if "val" in n.meta and n.op != "output"
              and isinstance(n.meta["val"], torch.Tensor)}  # fmt: skip
    assert not [shape for shape in shapes if shape[-2:] == (N_Q, N_K) or shape[:2] == (N_Q, N_K)]
    assert (N_Q + N_K - 1, HEADS) in shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    attention, given = attend(READS["buckets"]), inputs(dtype)
    eager, exact = (run(attention, given, kind) for kind in (dtype, torch.float64))
    assert_as_exact_as_eager(run(compiled(attention), given, dtype), eager, exact)


def test_positions_beyond_the_table_are_eager_modes_error():
    attention = attend(lambda table: heads_last(table[distance().clamp(-30, 30) + 30]))
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(attention)(*inputs())


def _added_in_place(table):
    positions = distance().clamp(-11, 11) + 11
    positions[0, 0] = 5
    return heads_last(table[positions])


MORE = {
    "buckets in a matrix": lambda table: heads_last(
        table[torch.arange(2 * ROWS).view(2, ROWS)[:, distance().clamp(-11, 11) + 11][1] - ROWS]
    ),
    "rows counted twice": lambda table: heads_last(table[(2 * distance() + torch.arange(N_Q)[:, None]).clamp(0, 20)]),
    "the key alone": lambda table: heads_last(table[torch.arange(N_K).clamp(max=20).expand(N_Q, N_K)]),
    "one element written": _added_in_place,
    "data": lambda table: heads_last(table[(distance() + (table[0, 0] > 9).long()[None, None]).clamp(-9, 9) + 9]),
    "random": lambda table: heads_last(
        table[distance().clamp(-9, 9) + 9 + torch.zeros(N_Q, N_K).bernoulli(0.0).long()]
    ),
    "frequencies": lambda table: heads_last(
        F.embedding(distance().abs().clamp(max=20), table, scale_grad_by_freq=True)
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_positions_that_are_more_than_a_distance_stay(name):
    attention, given = attend(MORE[name]), inputs()
    eager, exact = (run(attention, given, dtype) for dtype in (torch.float32, torch.float64))
    assert_as_exact_as_eager(run(compiled(attention), given, torch.float32), eager, exact)


@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (0, 5), (5, 0), (1, 5), (5, 1), (2, 2)])
def test_few_rows_or_keys(rows, keys):
    def attention(q, k, v, table):
        relative = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        return (q @ k.mT + heads_last(table[relative.abs().clamp(max=20)])).softmax(-1) @ v

    q, k, v, table = (t.detach() for t in inputs())
    given = [q[:, :, :rows], k[:, :, :keys], v[:, :, :keys], table]
    eager, exact = (run(attention, given, dtype) for dtype in (torch.float32, torch.float64))
    assert_as_exact_as_eager(run(compiled(attention), given, torch.float32), eager, exact)


def test_buckets_in_a_buffer_are_read_at_each_call():
    class Biased(torch.nn.Module):
        buckets: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("buckets", t5_bucket(torch.arange(-N_Q + 1, N_K)))

        def forward(self, q, k, v, table):
            bias = heads_last(table[self.buckets[distance() + N_Q - 1]])
            return (q @ k.mT / 4 + bias).softmax(-1) @ v

    module, given = Biased(), inputs()
    report = fusion.explain(module, *(t.detach() for t in given))
    assert report.fused == 1 and "j - i + 36" in str(report)
    call = compiled(module)
    for _ in range(2):
        eager, exact = (run(module, given, dtype) for dtype in (torch.float32, torch.float64))
        assert_as_exact_as_eager(run(call, given, torch.float32), eager, exact)
        module.buckets.copy_(module.buckets.flip(0))


def test_buckets_that_change_between_their_reads():
    """The positions are those of before the change."""

    def attention(q, k, v, table, buckets):
        positions = buckets[distance().clamp(-11, 11) + 11]
        buckets.zero_()
        return (q @ k.mT / 4 + heads_last(table[positions])).softmax(-1) @ v

    given = [t.detach() for t in inputs()]
    results = []
    for call in (compiled(attention), attention):
        results.append(call(*given, torch.arange(ROWS)))
    exact = attention(*(t.double() for t in given), torch.arange(ROWS))
    assert_as_exact_as_eager(*([t] for t in (*results, exact)), torch.float32)


def test_what_is_returned_keeps_its_strides():
    def attention(q, k, v, table):
        bias = READS["heads first"](table)
        return (q @ k.mT + bias).softmax(-1) @ v, bias

    q, k, v, table = (t.detach() for t in inputs())
    assert compiled(attention)(q, k, v, table)[1].stride() == attention(q, k, v, table)[1].stride()


def test_one_query_is_left_as_it_is():
    def attention(q, k, v, table):
        return (q @ k.mT + heads_last(table[torch.arange(N_K)[None].clamp(max=20)])).softmax(-1) @ v

    q, *rest = inputs()
    given = [q[:, :, :1].detach().requires_grad_(), *rest]
    eager, exact = (run(attention, given, dtype) for dtype in (torch.float32, torch.float64))
    assert_as_exact_as_eager(run(compiled(attention), given, torch.float32), eager, exact)


def test_t5_reads_its_buckets_once_for_each_distance():
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, vocab_size=50, dropout_rate=0.0
    )
    tokens, targets = torch.randint(0, 50, (2, 40)), torch.randint(0, 50, (2, 30))
    model = transformers.T5Model(config).eval()
    with torch.no_grad():
        report = fusion.explain(model, input_ids=tokens, decoder_input_ids=targets, use_cache=False)
    assert report.fused == len(report.sites) == 6
    assert "j - i + 39" in str(report)
    assert "j - i + 29" in str(report)
