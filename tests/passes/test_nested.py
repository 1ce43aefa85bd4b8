"""Attention of jagged nested tensors on CPUs: against eager on each sequence by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion
from tests.numerics import assert_as_exact_as_eager, assert_same

LENGTHS = [(50, 90, 30), (7, 0, 130, 1), (64,), (33, 33, 33)]
HEADS, COLUMNS = 4, 16
WIDTH = HEADS * COLUMNS


def nested(tensors):
    return torch.nested.nested_tensor(list(tensors), layout=torch.jagged)


def of_offsets(values, lengths):
    """Values [T, ...] as a nested tensor: its gradient is theirs."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))


def attend(q, k, v, **how):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **how).transpose(1, 2)


def of_each(q, k, v, lengths, of_keys=None, **how):
    """Values [T, H, D] of what eager computes for each sequence by itself."""
    parts = zip(q.split(lengths), *(x.split(of_keys or lengths) for x in (k, v)), strict=True)
    rows = [[x.transpose(0, 1)[None] for x in part] for part in parts]
    return torch.cat([F.scaled_dot_product_attention(*part, **how)[0].transpose(0, 1) for part in rows])


def compiled(function, *given, fused=1, inner="eager", fullgraph=True):
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        out = torch.compile(function, backend="fusion", fullgraph=fullgraph, options={"inner": inner})(*given)
    assert sum(report.fused for report in reports) == fused
    return out, reports


def operands(lengths, dtype=torch.float32, heads_of_keys=HEADS, of_keys=None, trained=False):
    sizes = ((lengths, HEADS), (of_keys or lengths, heads_of_keys), (of_keys or lengths, heads_of_keys))
    return [torch.randn(sum(n), h, COLUMNS, dtype=dtype, requires_grad=trained) for n, h in sizes]


def wide(tensors):
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_outputs(lengths, how, dtype):
    given = operands(lengths, dtype, heads_of_keys=2 if "enable_gqa" in how else HEADS)
    q, *keys = given
    q = of_offsets(q, lengths)
    k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets()) for x in keys)
    out, _ = compiled(lambda *given: attend(*given, **how), q, k, v)
    assert out.offsets() is q.offsets() and out.dtype is dtype
    eager, exact = (of_each(*tensors, lengths, **how) for tensors in (given, wide(given)))
    assert_as_exact_as_eager(out.values(), eager, exact)


@pytest.mark.parametrize(("queries", "keys"), [((5, 40, 0, 9), (30, 7, 12, 0)), ((1, 1), (70, 200))], ids=str)
def test_other_lengths_of_keys(queries, keys):
    given = operands(queries, of_keys=keys)
    q, k = of_offsets(given[0], queries), of_offsets(given[1], keys)
    out, _ = compiled(attend, q, k, torch.nested.nested_tensor_from_jagged(given[2], k.offsets()))
    eager, exact = (of_each(*tensors, queries, keys) for tensors in (given, wide(given)))
    assert_as_exact_as_eager(out.values(), eager, exact)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal, inner):
    lengths = LENGTHS[1]
    given = operands(lengths, trained=True)
    towards = torch.randn(sum(lengths), HEADS, COLUMNS)

    def packed(q, k, v):
        q = of_offsets(q, lengths)
        k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets()) for x in (k, v))
        return compiled(lambda *given: attend(*given, is_causal=causal), q, k, v, inner=inner)[0].values()

    results = [packed(*given), of_each(*given, lengths, is_causal=causal)]
    reference = wide(given)
    results.append(of_each(*reference, lengths, is_causal=causal))
    gradients = [
        torch.autograd.grad(out, tensors, towards.to(out))
        for out, tensors in zip(results, (given, given, reference), strict=True)
    ]
    assert_as_exact_as_eager(*gradients)


class Block(nn.Module):
    """A layer as models write it, to whom it is all the same whether x is nested."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def trained(model, rows):
    """(output, gradients) with each sequence as a batch of one."""
    out = torch.cat([model(row[None])[0] for row in rows])
    return out.detach(), torch.autograd.grad(out.square().sum(), list(model.parameters()))


def test_a_model_is_trained_on_other_lengths_without_compiling_again():
    model, torch_compiles = nn.Sequential(Block(), Block()), []
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        run = torch.compile(model, backend="fusion", fullgraph=True)
        for lengths in ((9, 30, 41), (50, 60, 3), (8, 2, 100), (5, 5, 6, 70), (33, 4), (10, 20, 30, 40, 50)):
            rows = [torch.randn(n, WIDTH) for n in lengths]
            out = run(nested(rows)).values()
            gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
            exact = nn.Sequential(Block(), Block()).double()
            exact.load_state_dict(model.state_dict())
            assert_as_exact_as_eager(
                (out, gradients), trained(model, rows), trained(exact, [row.double() for row in rows])
            )
            torch_compiles.append(len(reports))
    assert [report.fused for report in reports] == [2, 2]  # once for three sequences, once for any number
    assert torch_compiles == [1, 1, 1, 2, 2, 2]


MADE_INSIDE = {
    "nested_tensor": lambda a, b: nested([a, b]),
    "as_nested_tensor": lambda a, b: torch.nested.as_nested_tensor([a, b], layout=torch.jagged),
    "from_jagged": lambda a, b: torch.nested.nested_tensor_from_jagged(torch.cat([a, b]), torch.tensor([0, 40, 110])),
}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_made_in_the_compiled_function(name, inner):
    block, exact = Block(), Block().double()
    exact.load_state_dict(block.state_dict())
    rows = [torch.randn(40, WIDTH), torch.randn(70, WIDTH)]
    out, _ = compiled(lambda a, b: block(MADE_INSIDE[name](a, b)).values(), *rows, inner=inner)
    assert_as_exact_as_eager(out, trained(block, rows)[0], trained(exact, [row.double() for row in rows])[0])


def test_operands_that_are_slices():
    """Which torch does not compute on CPUs."""
    lengths, (qkv,) = LENGTHS[0], [torch.randn(170, 3 * WIDTH)]

    def packed(x):
        return attend(*(part.unflatten(-1, (HEADS, -1)) for part in x.chunk(3, -1))).flatten(-2)

    out, _ = compiled(packed, of_offsets(qkv, lengths))
    eager, exact = (
        of_each(*(part.unflatten(-1, (HEADS, -1)) for part in x.chunk(3, -1)), lengths).flatten(-2)
        for x in (qkv, qkv.double())
    )
    assert_as_exact_as_eager(out.values(), eager, exact)


def test_autocast():
    rows, block = [torch.randn(n, WIDTH) for n in LENGTHS[0]], Block()

    def in_bfloat16(x):
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    out, _ = compiled(in_bfloat16, nested(rows))
    exact = Block().double()
    exact.load_state_dict(block.state_dict())
    eager = torch.cat([in_bfloat16(row[None])[0] for row in rows])
    wide_rows = trained(exact, [row.double() for row in rows])[0]
    assert_as_exact_as_eager(out.values(), eager, wide_rows, torch.bfloat16)


def test_dropout_is_of_the_keys_of_a_sequence():
    lengths = (40, 90, 200)
    q, k, v = (of_offsets(torch.ones(sum(lengths), 1, 8), lengths) for _ in range(3))
    out, _ = compiled(lambda *given: attend(*given, dropout_p=0.5), q, q, q)
    for part, n in zip(out.values().split(lengths), lengths, strict=True):
        kept = part * n / 2  # how many keys each row has kept
        assert_same(kept.round(), kept.round().clamp(n // 5, n)) and kept.std() > 0


def test_the_report_names_the_line_of_the_model():
    _, (report,) = compiled(Block(), nested(torch.randn(n, WIDTH) for n in LENGTHS[0]))
    (site,) = report.sites
    assert "in forward: return x + self.out(F.scaled_dot_product_attention(q, k, v)" in site.location
    assert site.mask == "index[i] ≤ j ∧ j < index2[i]"


def test_first_call_is_compared_with_eager():
    x = nested(torch.randn(n, WIDTH) for n in LENGTHS[0])
    block = Block()
    torch._dynamo.reset()
    out = torch.compile(block, backend="fusion", options={"inner": "eager", "verify": "run"})(x)
    assert out.shape[0] == 3 and torch._dynamo.utils.counters["fusion"]["invalid"] == 0


def test_what_is_not_fused_is_computed_and_reported(monkeypatch):
    monkeypatch.setattr("fusion.codegen.mlir.strategy.unavailable", lambda: "torch-mlir is not installed")
    lengths = LENGTHS[1]
    given = operands(lengths)
    q = of_offsets(given[0], lengths)
    k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets()) for x in given[1:])
    for inner in ("eager", "inductor"):
        out, (report,) = compiled(attend, q, k, v, fused=0, inner=inner)
        assert "torch-mlir is not installed" in report.sites[0].reason
        assert_as_exact_as_eager(out.values(), *(of_each(*tensors, lengths) for tensors in (given, wide(given))))
