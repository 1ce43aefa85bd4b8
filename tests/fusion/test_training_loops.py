"""What training code does around a model: switching modes, accumulating gradients, recomputing, torch.func."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion
from tests.numerics import assert_as_exact_as_eager, assert_same

WIDTH, HEADS, N = 32, 4, 24


class Block(torch.nn.Module):
    """Causal attention with a bias that is trained, [H, N, N], and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.bias = torch.nn.Parameter(torch.randn(HEADS, N, N))
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.bias
        s = s.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf)
        weights = F.dropout(torch.softmax(s, -1), self.dropout, self.training)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Recomputed(torch.nn.Module):
    """Two blocks, of which the first or both are checkpointed."""

    def __init__(self, both, dropout=0.0):
        super().__init__()
        self.first, self.second, self.both = Block(dropout), Block(dropout), both

    def forward(self, x):
        x = checkpoint(self.first, x.sin(), use_reentrant=False).cos()
        return checkpoint(self.second, x, use_reentrant=False) if self.both else self.second(x)


def compiled(function, inner):
    return torch.compile(function, backend="fusion", options={"inner": inner, "strict": True}, fullgraph=True)


def gradients(model, run, batches):
    """Outputs, and the sum over all batches of the gradients of each parameter."""
    model.zero_grad()
    outputs = []
    for x in batches:
        out = run(x)
        (out.square().mean() / len(batches)).backward()
        outputs.append(out.detach())
    return {"outputs": outputs} | {name: p.grad.clone() for name, p in model.named_parameters()}


def check(model, run, batches):
    exact = copy.deepcopy(model).double()
    reference = gradients(exact, exact, [x.double() for x in batches])
    eager, actual = gradients(model, model, batches), gradients(model, run, batches)
    assert_as_exact_as_eager(actual, eager, reference)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gradients_accumulate_over_micro_batches(inner):
    model = Block()
    batches = [torch.randn(2, N, WIDTH) for _ in range(4)]
    check(model, compiled(model, inner), batches)


def test_switching_between_training_and_evaluation():
    """Each mode has its own kernels: neither drops what the other would, and gradients stay right."""
    model = Block(dropout=0.5)
    run = compiled(model, "aot_eager")
    x = torch.randn(2, N, WIDTH)
    for _ in range(2):
        model.eval()
        check(model, run, [x])
        evaluated = model(x).detach()
        model.train()
        torch.manual_seed(1)
        trained = gradients(model, run, [x])
        assert (trained["outputs"][0] != evaluated).float().mean() > 0.9, "nothing was dropped"
        torch.manual_seed(1)
        assert_same(gradients(model, run, [x]), trained)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("both", [True, False])
def test_checkpointed_parts_are_fused(both, inner):
    model = Recomputed(both)
    with fusion.collect_reports() as reports:
        check(model, compiled(model, inner), [torch.randn(2, N, WIDTH)])
    assert [report.fused for report in reports] == [2]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_checkpointed_parts_drop_the_same_elements_again(inner):
    """With values that are unit vectors the output is the weights, so the mask of the forward can be read off."""

    def attend(q, k, v):
        return F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.5) @ v

    def recomputed(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False) * 2

    q, k = (torch.randn(2, HEADS, N, 8, requires_grad=True) for _ in range(2))
    v = torch.eye(N).expand(2, HEADS, N, N).clone().requires_grad_()
    with fusion.collect_reports() as reports:
        out = compiled(recomputed, inner)(q, k, v)
    assert reports[0].fused == 1
    upstream = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), upstream)
    kept = (out.detach() != 0) * 2.0
    assert 0.4 < kept.mean() / 2 < 0.6

    def explicit(dtype):
        tensors = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        weights = torch.softmax(tensors[0] @ tensors[1].transpose(-1, -2), -1) * kept
        return torch.autograd.grad(weights @ tensors[2] * 2, tensors, upstream.to(dtype))

    assert_as_exact_as_eager(actual, explicit(torch.float32), explicit(torch.float64))


def test_a_checkpointed_part_without_attention_stays():
    def function(x):
        return checkpoint(torch.sin, x, use_reentrant=False) @ x

    x = torch.randn(4, 4, requires_grad=True)
    with fusion.collect_reports() as reports:
        found = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})(x)
    assert not reports[0].sites
    assert_same(found, function(x))


def test_the_operator_inside_of_function_transforms():
    model = Block().requires_grad_(False)
    rewritten = fusion.rewrite(torch.export.export(model, (torch.randn(2, N, WIDTH),))).module()
    assert "fusion.attention" in str(rewritten.graph)
    x = torch.randn(2, N, WIDTH)

    def results(run, dtype):
        given = x.to(dtype)
        out, pull, *_ = torch.func.vjp(run, given)
        return [out, pull(given)[0], torch.func.grad(lambda y: (run(y) * y).sum())(given)]

    exact = copy.deepcopy(model).double()
    assert_as_exact_as_eager(
        results(rewritten, torch.float32), results(model, torch.float32), results(exact, torch.float64)
    )


@pytest.mark.parametrize("around", [
    lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    torch.autograd.graph.save_on_cpu,
    lambda: torch.autograd.detect_anomaly(check_nan=True),
], ids=["no_hooks", "save_on_cpu", "detect_anomaly"])  # fmt: skip
def test_what_is_set_for_gradients_is_not_for_the_analysis(around):
    """The compiler evaluates made-up values, among them NaN, and their gradients."""
    model = Block()
    run = compiled(model, "aot_eager")
    with around(), fusion.collect_reports() as reports:
        check(model, run, [torch.randn(2, N, WIDTH)])
    assert reports[0].sites[0].validated.startswith("values in"), reports[0]


def test_the_backward_of_compiled_autograd_stays_as_it_is(caplog):
    """It holds the gradients of what its forward was compiled to."""
    model = Block()

    def gradients_of(x):
        out = model(x)
        out.square().mean().backward()
        return out.detach()

    x = torch.randn(2, N, WIDTH)
    with torch._dynamo.config.patch(compiled_autograd=True), fusion.collect_reports() as reports:
        run = torch.compile(gradients_of, backend="fusion", options={"inner": "aot_eager"})
        for _ in range(2):
            model.zero_grad()
            out = run(x)
    actual = {"outputs": [out]} | {name: p.grad.clone() for name, p in model.named_parameters()}
    exact = copy.deepcopy(model).double()
    assert_as_exact_as_eager(actual, gradients(model, model, [x]), gradients(exact, exact, [x.double()]))
    assert sum(report.fused for report in reports) == 1
    assert "of compiled autograd" in str([report.notes for report in reports]) and not caplog.records
