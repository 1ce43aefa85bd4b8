"""Rows that nothing reads are not computed, and all others as before."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusion
from tests.models.build import build
from tests.numerics import assert_as_exact_as_eager

N, D, HEADS = 20, 32, 4


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation, beside residuals."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

    def forward(self, x):
        y = self.norms[0](x)
        out = self.attend(*(self.heads(f(y)) for f in (self.q, self.k, self.v)))
        x = x + self.out(out.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Two layers; `read` of the last one goes through a classifier."""

    def __init__(self, read, attend=F.scaled_dot_product_attention):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head, self.read = nn.Sequential(Layer(attend), Layer(attend)), nn.Linear(D, 5), read

    def forward(self, x):
        return self.head(self.read(self.layers(x)))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    n = q.shape[2]
    s = q @ k.mT / 3 + torch.arange(n)
    return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(2), -1e9).softmax(-1) @ v


def einsums(q, k, v):
    return torch.matmul(torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1), v)


READS = {
    "first": (lambda x: x[:, 0], 1),
    "last": (lambda x: x[:, -1], 1),
    "last, kept": (lambda x: x[:, -1:], 1),
    "last but one": (lambda x: x.select(1, -2), 1),
    "several": (lambda x: x[:, 2:7], 5),
    "to an end": (lambda x: x[:, -4:-1].mean(1), 3),
    "behind a normalisation": (lambda x: F.layer_norm(x, (D,))[:, 0].tanh(), 1),
    "behind a view": (lambda x: x.transpose(0, 1)[-1], 1),
    "of flattened rows": (lambda x: x.flatten(0, 1).softmax(-1).unflatten(0, x.shape[:2])[:, 3], 1),
    "twice": (lambda x: x[:, 0] + x[:, 0].exp(), 1),
    "of a slice": (lambda x: x[:, :10].tanh()[:, 3], 10),
    "behind a slice of all": (lambda x: x[:, :, 8:].repeat(1, 1, 2)[:, 3, :D], 1),
    "of windows of a slice": (lambda x: x[:, 10:].reshape(-1, 2, 5, D)[:, :, 1], 10),
}


def compiled(model, *inputs, dynamic=None, **options):
    """(result, the reports of its compilation)"""
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        run = torch.compile(
            model, backend="fusion", fullgraph=True, dynamic=dynamic, options={"strict": True, **options}
        )
        return run(*inputs), reports


def rows_of(reports):
    """The number of query rows of each attention."""
    return [plan.problem.n_q for report in reports for site in report.sites for plan in site.plans]


CASES = [(read, causal) for read in READS] + [("last", f) for f in (F.scaled_dot_product_attention, by_hand, einsums)]


@pytest.mark.parametrize(("read", "attend"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_the_last_layer_computes_what_is_read(read, attend):
    function, rows = READS[read]
    model, x = Model(function, attend), torch.randn(2, N, D)
    with torch.no_grad():
        actual, reports = compiled(model, x, inner="eager")
        assert_as_exact_as_eager(actual, model(x), copy.deepcopy(model).double()(x.double()), check_strides=True)
    assert rows_of(reports) == [N, rows]
    assert any(f"{rows} of {N} rows are computed" in note for note in reports[0].notes)


@pytest.mark.parametrize("attend", [causal, by_hand], ids=lambda f: f.__name__)
def test_gradients_are_those_of_all_rows(attend):
    model, x = Model(READS["last"][0], attend), torch.randn(2, N, D)
    found = []
    for dtype, backend in ((torch.float32, "fusion"), (torch.float32, None), (torch.float64, None)):
        own, given = copy.deepcopy(model).to(dtype), x.to(dtype, copy=True).requires_grad_()
        if backend is None:
            out = own(given)
        else:
            out, reports = compiled(own, given, training="always", inner="aot_eager")
            assert rows_of(reports) == [N, 1]
        out.square().sum().backward()
        found.append((out, given.grad, [p.grad for p in own.parameters()]))
    assert_as_exact_as_eager(*found)


def test_one_graph_serves_all_lengths():
    model = Model(READS["last"][0], causal)
    with torch.no_grad(), fusion.collect_reports() as reports:
        run = torch.compile(
            model, backend="fusion", fullgraph=True, dynamic=True, options={"strict": True, "inner": "eager"}
        )
        for n in (20, 33, 70):
            x = torch.randn(3, n, D)
            assert_as_exact_as_eager(run(x), model(x), copy.deepcopy(model).double()(x.double()))
    assert len(reports) == 1 and rows_of(reports)[1] == 1


def pulled_towards(x):
    return torch.lerp(x, x.exp(), x[:, :, :1].sigmoid())[:, 3]


def test_sizes_may_be_dynamic_where_torch_computes_shapes_in_python():
    model, x = Model(pulled_towards, causal), torch.randn(2, N, D)
    with torch.no_grad():
        actual, reports = compiled(model, x, inner="eager", dynamic=True)
        assert_as_exact_as_eager(actual, model(x), copy.deepcopy(model).double()(x.double()))
    assert rows_of(reports)[1] == 1


def test_as_many_heads_as_sequences():
    """Torch writes one of the two dimensions of the product as s * s // s."""

    def function(q, k, v, w):
        return (checkpoint(by_hand, q, k, v, use_reentrant=False) @ w)[:, :, 3].tanh()

    given = *(torch.randn(2, 2, N, 8) for _ in range(3)), torch.randn(8, 5)
    with torch.no_grad():
        actual, reports = compiled(function, *given, inner="eager", dynamic=True)
        assert_as_exact_as_eager(actual, function(*given), function(*(x.double() for x in given)))
    assert reports[0].fused == 1


def in_place(x):
    x = x * 1
    x[:, 1:].mul_(x[:, :1])
    return x[:, -1]


class AllReturned(Model):
    def forward(self, x):
        x = self.layers(x)
        return self.head(self.read(x)), x


class RowsReturned(Model):
    def forward(self, x):
        return self.layers(x)[:, 0]


WHOLE = {
    "dropout": Model(lambda x: F.dropout(x, 0.5)[:, 0]),
    "returned": AllReturned(lambda x: x[:, 0]),
    "a view is returned": RowsReturned(None),
    "other rows too": Model(lambda x: x[:, 0] + x[:, -1]),
    "their mean": Model(lambda x: x[:, 0] + x.mean(1)),
    "most rows": Model(lambda x: x[:, 1:].mean(1)),
    "every other row": Model(lambda x: x[:, ::2].sum(1)),
    "a norm over rows": Model(lambda x: F.normalize(x, dim=1)[:, 0]),
    "an operation of rows": Model(lambda x: x.cumsum(1)[:, -1]),
    "windows of a piece": Model(lambda x: x.chunk(2, 1)[1].reshape(-1, 2, 5, D)[:, :, 1].sum(1)),
    "repeated": Model(lambda x: x.repeat_interleave(2, 1, output_size=2 * N)[:, 6:8].sum(1)),
    "none": Model(lambda x: x[:, :0].sum(1)),
    "turned around": Model(lambda x: x.flip(1)[:, 0]),
    "written to": Model(in_place),
    "chosen at run time": Model(lambda x: x[torch.arange(2), x[:, 0].argmax(-1) % N]),
}


@pytest.mark.parametrize("why", WHOLE)
def test_all_rows_are_computed_where_more_is_read(why):
    model, x = WHOLE[why], torch.randn(2, N, D)
    with torch.no_grad():
        torch.manual_seed(0)
        actual, reports = compiled(model, x, inner="eager")
        found = [actual]
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            found.append(copy.deepcopy(model).to(dtype)(x.to(dtype)))
    if why == "dropout":  # which draws other numbers in float64
        found[2] = found[1]
    assert_as_exact_as_eager(*found, check_dtype=why != "dropout", check_strides=True)
    assert rows_of(reports) == [N, N] and not any("rows are computed" in note for note in reports[0].notes)


def test_the_report_tells_both_plans():
    text = str(fusion.explain(Model(READS["last"][0]), torch.randn(2, N, D)))
    assert f"N_q={N} " in text and "N_q=1 " in text


def test_nothing_is_said_of_a_graph_that_stays():
    def relative(q, k, v):  # scores in another form than attention has them
        return F.linear((q @ k.mT).softmax(-1).sort(-1).values @ v, torch.ones(8, 8))[:, :, -1:].relu()

    report = fusion.explain(relative, *(torch.randn(1, 2, 9, 8) for _ in range(3)))
    assert not report.fused and not any("rows are computed" in note for note in report.notes)


MODELS = {
    "bert": (transformers.BertForSequenceClassification, {}),
    "vit": (transformers.ViTForImageClassification, {}),
    "llama": (transformers.LlamaForCausalLM, {"logits_to_keep": 1}),
    "gpt2": (transformers.GPT2LMHeadModel, {"logits_to_keep": 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_of_a_model(name):
    kind, given = MODELS[name]
    model = build(kind)
    config = model.config
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
    else:
        inputs = {"input_ids": torch.randint(5, 100, (2, N))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, :3] = 0
    with torch.no_grad(), fusion.collect_reports() as reports:
        run = torch.compile(model, backend="fusion", options={"strict": True, "inner": "eager"})
        actual, eager = run(**inputs, **given).logits, model(**inputs, **given).logits
        double = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        assert_as_exact_as_eager(actual, eager, copy.deepcopy(model).double()(**double, **given).logits)
    *before, last = rows_of(reports)
    assert last == 1 and all(n > 1 for n in before)
