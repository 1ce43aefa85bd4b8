"""Attention of jagged nested tensors on CPUs: against eager on each sequence by itself."""

import contextlib
import logging
import operator

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


@pytest.mark.one_in(4)
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


@pytest.mark.one_in(2)
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
        run = torch.compile(model, backend="fusion", fullgraph=True, options={"inner": "aot_eager"})
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


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_sequences_that_are_made_in_the_graph_break_it(name, caplog):
    """Without a break torch 2.13 raises an error for the LayerNorm, and 2.15 does not: it has no name for their length.
    The block that Dynamo compiles by itself then is given them."""
    block, exact = Block(), Block().double()
    exact.load_state_dict(block.state_dict())

    def made(block, a, b):
        return block(MADE_INSIDE[name](a, b)).values()

    rows = [torch.randn(40, WIDTH), torch.randn(70, WIDTH)]
    with contextlib.suppress(Exception):  # torch 2.11 has one of its own around it
        torch.compile(lambda x: block.norm(MADE_INSIDE["from_jagged"](x, x)), backend="eager")(rows[0])
    block.norm = exact.norm = nn.Identity()
    with caplog.at_level(logging.INFO, logger="fusion"):
        out, _ = compiled(made, block, *rows, fused=1, fullgraph=False)
    assert "made in the graph" in caplog.text
    assert_as_exact_as_eager(out, made(block, *rows), made(exact, *(row.double() for row in rows)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["query", "key"])
def test_what_is_not_finite_stays_in_its_sequence(name, bad):
    lengths = LENGTHS[0]
    given = operands(lengths)
    given[name == "key"][60, 0, 3] = bad
    q = of_offsets(given[0], lengths)
    k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets()) for x in given[1:])
    out, _ = compiled(attend, q, k, v)
    assert_as_exact_as_eager(out.values(), *(of_each(*tensors, lengths) for tensors in (given, wide(given))))


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
    assert "index[i] ≤ j ∧ j < index2[i]" in str(report)


def test_what_is_not_fused_is_computed_and_reported(monkeypatch):
    monkeypatch.setattr("fusion.codegen.cpu.unavailable", lambda: "torch-mlir is not installed")
    lengths = LENGTHS[1]
    given = operands(lengths)
    q = of_offsets(given[0], lengths)
    k, v = (torch.nested.nested_tensor_from_jagged(x, q.offsets()) for x in given[1:])
    for inner in ("eager", "inductor"):
        out, (report,) = compiled(attend, q, k, v, fused=0, inner=inner)
        assert "torch-mlir is not installed" in report.sites[0].reason
        assert_as_exact_as_eager(out.values(), *(of_each(*tensors, lengths) for tensors in (given, wide(given))))


IN_PLACE = {
    "method": lambda x: x.mul_(2.0),
    "operator": lambda x: operator.isub(x, x * 0.5),
    "argument": lambda x: F.dropout(x, 0.0, True, True),
    "activation": lambda x: F.relu(x, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_nested_tensors_that_are_changed_in_place_are_refused(name, caplog):
    """A product of what was taken out of them must not move behind the change."""
    lengths = LENGTHS[0]

    def changed(x, heads):
        x = x * 1.0
        values = x.values()
        scores = values @ values.mT
        IN_PLACE[name](x)
        return torch.softmax(scores, -1) @ values, attend(heads, heads, heads).values()

    x, heads = of_offsets(torch.randn(170, 16), lengths), of_offsets(torch.randn(170, HEADS, COLUMNS), lengths)
    (out, attended), (report,) = compiled(changed, x, heads, fused=0)
    assert "is changed in place" in report.notes[0] and "defect" not in caplog.text
    assert_same(out, changed(x, heads)[0])
    given = [(heads.values(),) * 3, (heads.values().double(),) * 3]
    assert_as_exact_as_eager(attended, *(of_each(*tensors, lengths) for tensors in given))


def test_values_that_are_changed_in_place():
    """Each x.values() is the same memory."""
    lengths = LENGTHS[0]

    def changed(x):
        x = x * 1.0
        q, k = x.values(), x.values()
        before = x.transpose(1, 2).transpose(1, 2)
        x.values().mul_(2.0)
        out = attend(before, x, x)
        q.mul_(3.0)
        return out.values(), q + k

    given = torch.randn(sum(lengths), HEADS, COLUMNS)
    (out, twice), _ = compiled(changed, of_offsets(given, lengths))
    doubled = [tuple(x * 2.0 for _ in range(3)) for x in (given, given.double())]
    assert_as_exact_as_eager(out, *(of_each(*tensors, lengths) for tensors in doubled))
    assert_same(twice, given * 12.0)


OFFSETS = torch.tensor([0, 50, 140, 170])


def other_sequences(x):
    """Of the same lengths, which nobody knows before."""
    return attend(x * 1.0, x, torch.nested.nested_tensor_from_jagged(x.values(), OFFSETS.clone()))


STAYS = {
    "float64": (lambda x: attend(x.double(), x.double(), x.double()), "float32, bfloat16 or float16"),
    "other sequences": (other_sequences, "the same sequences"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_torchs(name, caplog):
    function, reason = STAYS[name]
    given = of_offsets(torch.randn(170, HEADS, COLUMNS), LENGTHS[0])
    with caplog.at_level(logging.INFO, logger="fusion"):
        out, reports = compiled(function, given, fused=0, fullgraph=False)
    told = "".join(line for report in reports for line in report.graph_breaks)
    assert reason in caplog.text and "F.scaled_dot_product_attention" in told
    assert_same(out.values(), function(given).values())


def test_other_backends_are_as_they_were():
    x = of_offsets(torch.randn(170, HEADS, COLUMNS), LENGTHS[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_nested_tensor_from_tensor_list"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(x, x, x)


def test_what_is_beside_attention_is_refused(caplog):
    lengths = torch.tensor([30, 50, 7])
    holes = torch.nested.nested_tensor_from_jagged(torch.randn(170, WIDTH), OFFSETS, lengths)
    heads, weight = of_offsets(torch.randn(170, HEADS, COLUMNS), LENGTHS[0]), torch.randn(1, WIDTH, WIDTH)

    def both(x):
        return attend(heads, heads, heads).values(), x * 2

    def none(x):
        return torch.softmax(weight @ weight, -1) @ weight, x * 2

    for function, given, told in (
        (both, holes, "a nested tensor has holes between its sequences"), (none, heads, "the graph has nested tensors")
    ):  # fmt: skip
        (out, _), (report,) = compiled(function, given, fused=0)
        assert told in report.notes[0] and "defect" not in caplog.text
        exact = of_each(*(heads.values().double(),) * 3, LENGTHS[0]) if function is both else function(given)[0]
        assert_as_exact_as_eager(out, function(given)[0], exact)


def test_views_as_inputs():
    """Which torch 2.13 makes from their bases again, with sizes of their own."""
    rows = [torch.randn(n, WIDTH) for n in LENGTHS[0]]
    x = nested(rows)
    out, _ = compiled(attend, *(x.unflatten(-1, (HEADS, -1)) for _ in range(3)), inner="aot_eager")
    given = [torch.cat(rows).unflatten(-1, (HEADS, -1))] * 3
    assert_as_exact_as_eager(out.values(), *(of_each(*tensors, LENGTHS[0]) for tensors in (given, wide(given))))


def test_checkpointed_parts_stay_whole():
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def checkpointed(x):
        rows = torch.utils.checkpoint.checkpoint(lambda x: x @ weight, x, use_reentrant=False)
        return attend(*(rows.unflatten(-1, (HEADS, -1)) for _ in range(3)))

    x = nested(torch.randn(n, WIDTH) for n in LENGTHS[0])
    out, (report,) = compiled(checkpointed, x, fused=0)
    assert "part of the graph that is not analysed" in report.notes[0]
    rows = x.values() @ weight
    given = [rows.unflatten(-1, (HEADS, -1))] * 3
    exact = [(x.values().double() @ weight.double()).unflatten(-1, (HEADS, -1))] * 3
    assert_as_exact_as_eager(out.values(), of_each(*given, LENGTHS[0]), of_each(*exact, LENGTHS[0]))
