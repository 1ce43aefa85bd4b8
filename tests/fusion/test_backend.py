"""The backend as users meet it: options, fall-backs, counters, reports."""

import gc
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fusion
from fusion import backend
from fusion.codegen import cpu
from fusion.errors import OptionError
from fusion.ir import results
from fusion.options import Options
from fusion.passes.trace.normalize import may_hold_attention
from fusion.runtime import kernels
from fusion.runtime.guards import GuardedKernel, GuardedTraining
from tests.numerics import assert_as_exact_as_eager, assert_runs_as_exact_as_eager, assert_same, wide


def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def inputs():
    return [torch.randn(2, 3, 17, 16) for _ in range(3)]


def run(function=attend, given=None, **options):
    given = given or inputs()
    with torch.no_grad(), fusion.collect_reports() as reports:
        result = torch.compile(function, backend="fusion", options={"inner": "eager", **options})(*given)
    assert_as_exact_as_eager(result, function(*given), function(*wide(given)))
    return reports


def test_unknown_option_names_the_valid_ones():
    with pytest.raises(OptionError, match=r"unknown option 'iner'.*Did you mean 'inner'\?.*autotune, strict"):
        Options.parse({"iner": "eager"})
    with pytest.raises(
        Exception,
        match="Valid options: inner, emitter, tile_maps, transforms, training, linear, autotune, strict",
    ):
        torch.compile(attend, backend="fusion", options={"colour": "red"})(*inputs())


@pytest.mark.parametrize("given", [{"inner": 5}, {"emitter": 3}, {"strict": "yes"}])
def test_an_option_of_the_wrong_kind_says_what_it_may_be(given):
    with pytest.raises(OptionError, match="it must be"):
        Options.parse(given)


def test_options_are_left_alone():
    given = {"inner": "eager"}
    torch.compile(attend, backend="fusion", options=given)(*inputs())
    assert given == {"inner": "eager"}


def test_the_reference_emitter_uses_no_kernel():
    (report,) = run(emitter="reference")
    assert report.sites[0].fused and report.sites[0].source is None


def test_strict_raises_what_would_be_left_unfused():
    def two_results(q, k, v):
        s = q @ k.mT
        return torch.softmax(s, -1) @ v, s

    with pytest.raises(Exception, match="needed elsewhere"):
        torch.compile(two_results, backend="fusion", options={"inner": "eager", "strict": True})(*inputs())


def test_strict_says_nothing_of_graphs_without_attention():
    x = torch.randn(3)
    result = torch.compile(torch.relu, backend="fusion", options={"inner": "eager", "strict": True})(x)
    assert torch.equal(result, torch.relu(x))


def test_counters():
    counters.clear()
    run()
    assert counters["fusion"].items() >= {"sites": 1, "fused": 1, "unfused": 0}.items()


def test_a_failing_pass_leaves_the_graph_to_the_inner_compiler(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr("fusion.backend.find_sites", broken)
    (report,) = run()
    assert report.notes == ["left to the inner compiler: RuntimeError: a defect"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_cycles_is_left_to_the_process(monkeypatch, enabled):
    """Other threads make garbage, too, while a model is analysed."""
    seen = []
    keep = backend.find_sites
    monkeypatch.setattr(backend, "find_sites", lambda *given: seen.append(gc.isenabled()) or keep(*given))
    (gc.enable if enabled else gc.disable)()
    try:
        run()
        assert seen == [enabled] and gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_kernel_that_cannot_be_built_is_a_reason(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction")

    kernels.forget()
    monkeypatch.setattr("fusion.codegen.cpu.compile", broken)
    (report,) = run()
    assert not report.sites[0].fused
    assert "could not be built (RuntimeError: no such instruction)" in report.sites[0].reason


def test_a_kernel_that_fails_later_is_replaced_by_the_reference(caplog):
    spec = run()[0].sites[0].spec
    guarded = GuardedKernel(spec, lambda operands, sizes: 1 / 0)
    with caplog.at_level(logging.ERROR, logger="fusion.runtime"):
        given = inputs()
        result = guarded(given, [2, 3, 17, 17])
    assert_as_exact_as_eager(result, attend(*given), attend(*wide(given)))
    assert "a kernel failed" in caplog.text


def test_a_kernel_for_training_that_fails_is_replaced_where_its_tensors_are(monkeypatch):
    """On the tensors' own device, here one without memory, where nothing can be computed."""
    monkeypatch.setattr(kernels.reference, "run", lambda spec, operands, sizes: operands[0].clone())
    spec = run()[0].sites[0].spec

    class Failing:
        def outputs(self, operands, sizes):
            raise RuntimeError("no such instruction")

    guarded = GuardedTraining(spec, Failing())
    given = [x.to("meta") for x in inputs()]
    out, statistics = guarded.outputs(given, [2, 3, 17, 17])
    assert guarded.broken and out.device == statistics.device == given[0].device
    shape = results.statistics_shape(guarded.spec, [2, 3, 17, 17])
    assert statistics.shape == torch.Size(shape) and statistics.dtype is results.statistics_dtype(given)


def test_a_call_that_the_reference_cannot_compute_either_breaks_no_kernel():
    guarded = GuardedTraining(run()[0].sites[0].spec, object())
    with pytest.raises(IndexError):
        guarded.outputs([], [2, 3, 17, 17])
    assert not guarded.broken


def test_without_torch_mlir_the_report_says_so(monkeypatch):
    monkeypatch.setattr("fusion.codegen.cpu.unavailable", lambda: "torch-mlir is not installed")
    kernels.forget()
    (report,) = run()
    assert report.sites[0].reason == "torch-mlir is not installed"


def test_graphs_without_attention_are_passed_through():
    def mlp(x):
        return torch.relu(torch.nn.functional.linear(x, x)) + 1

    (report,) = run(mlp, [torch.randn(4, 4)])
    assert report.notes == ["this graph holds no attention"]


def test_explain_tells_where_what_and_how():
    text = str(fusion.explain(attend, *inputs()))
    assert "1 of 1 attention site fused" in text
    assert "test_backend.py" in text and "return torch.softmax(q @ k.mT / 4, -1) @ v" in text
    assert "softmax(s / 4)" in text
    assert "bound" in text and "per head" in text and "kernel" in text


def test_explain_gives_the_reason():
    def two_results(q, k, v):
        s = q @ k.mT
        return torch.softmax(s, -1) @ v, s

    report = fusion.explain(two_results, *inputs())
    assert "reason" in str(report) and report.sites[0].reason.startswith("the attention scores are needed elsewhere")


def test_explaining_does_not_change_how_a_compiled_function_runs():
    compiled = torch.compile(attend, backend="fusion", options={"inner": "eager"})
    given = inputs()
    before = compiled(*given)
    report = fusion.explain(compiled, *given)
    assert report.fused == 1
    assert_same(compiled(*given), before)


def test_plain_networks_are_not_searched():
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    assert may_hold_attention(module)  # call_module nodes hide what they do


def test_a_second_length_compiles_no_second_kernel(monkeypatch):
    counted, compile = [], cpu.compile
    monkeypatch.setattr(cpu, "compile", lambda spec, *rest: (counted.append(spec), compile(spec, *rest))[1])
    kernels.forget()
    compiled = torch.compile(attend, backend="fusion", dynamic=False, options={"inner": "eager"})
    for n in (5, 9, 33):
        given = [torch.randn(1, 2, n, 24) for _ in range(3)]
        assert_runs_as_exact_as_eager(compiled, attend, *given)
    assert len(counted) == 1


def test_fusion_logs_prints_our_messages(monkeypatch, capsys):
    from fusion import process

    root = logging.getLogger("fusion")
    before = root.level, list(root.handlers)
    try:
        process.configure_log("info")
        root.info("a message")
        assert "fusion INFO: a message" in capsys.readouterr().err
        process.configure_log("loud")
        assert "'loud' is not a level; use one of debug, info" in capsys.readouterr().err
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]


def test_the_plan_is_that_of_the_kernel():
    def attend(q, k, v):  # a scale that no other test has: a kernel that exists keeps its tile where others are as good
        return torch.softmax(q @ k.mT / 3.875, -1) @ v

    site = fusion.explain(attend, *inputs()).sites[0]
    kernel = kernels.executor(site.spec.to_json(), "cpu").kernel
    choice = kernel.choice(list(site.sizes[0].values()))
    assert site.plan.choice == choice
    unaided = fusion.plan(site.spec, sizes=site.sizes[0])  # the planner alone knows the kernel's register tile
    assert (unaided.choice.tile, unaided.time) == (site.plan.choice.tile, site.plan.time)


class Scaled(torch.nn.Module):
    """Numbers as attributes, which are symbols with dynamic=True; an embedding has one too."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16)
        self.scale, self.temperature, self.cap, self.fill = 0.25, 1.5, 5.0, -1e9

    def forward(self, ids):
        x = self.embedding(ids)[:, None]
        s = torch.tanh(x @ x.mT * (self.scale / self.temperature) / self.cap) * self.cap
        i = torch.arange(ids.shape[-1])
        return torch.softmax(s.masked_fill(i > i[:, None], self.fill), -1) @ x


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_floats_of_modules_may_be_symbols(inner):
    model = Scaled()
    compiled = torch.compile(model, backend="fusion", dynamic=True, options={"inner": inner, "strict": True})
    seen = []
    for scale, n in ((0.25, 9), (0.25, 30), (0.5, 30), (0.5, 12)):
        model.scale = scale
        ids = torch.randint(0, 20, (2, n))
        with torch.no_grad(), fusion.collect_reports() as reports:
            assert_runs_as_exact_as_eager(compiled, model, ids)
        assert all(site.fused for report in reports for site in report.sites)
        seen.append(bool(reports))
    assert seen == [True, False, compiles_scales_in(inner), False]


def compiles_scales_in(inner):
    """Whether torch by itself compiles again for another scale, as version 2.11 does where AOTAutograd takes part."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager" if inner == "eager" else "aot_eager")
    model, counts = Scaled(), []
    compiled = torch.compile(model, backend=counter, dynamic=True)
    for model.scale in (0.25, 0.5):
        with torch.no_grad():
            compiled(torch.randint(0, 20, (2, 9)))
        counts.append(counter.frame_count)
    return counts[0] < counts[1]


def test_a_scale_may_be_an_argument():
    def attend(q, k, v, scale):
        return torch.nn.functional.scaled_dot_product_attention(q, k * scale, v, scale=scale)

    given = inputs()
    compiled = torch.compile(attend, backend="fusion", dynamic=True, options={"inner": "eager", "strict": True})
    for scale in (0.125, 0.75, 0.125):
        with torch.no_grad():
            assert_runs_as_exact_as_eager(compiled, attend, *given, scale)


def test_a_scale_read_from_data_is_left_alone_with_a_reason():
    def attend(q, k, v, scale):
        return torch.softmax(q @ k.mT * scale.item(), -1) @ v

    given = [*inputs(), torch.tensor(0.25)]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        reports = run(attend, given)
    assert [site.reason for site in reports[0].sites] == ["a scalar that is computed at run time (item)"]


def test_a_graph_that_dynamo_traces_again_has_one_report():
    """Inductor makes a number of a module's float and asks Dynamo for the graph again."""

    class Block(torch.nn.Module):
        scale = 0.25

        def forward(self, q, k, v):
            return (torch.softmax(q @ k.mT * self.scale, -1) @ v) * self.scale

    torch._dynamo.reset()
    counters.clear()
    with fusion.collect_reports() as reports, torch.no_grad():
        torch.compile(Block(), backend="fusion", dynamic=True)(*[torch.randn(1, 2, 9, 16) for _ in range(3)])
    assert [len(report.sites) for report in reports] == [1]
    assert counters["fusion"]["sites"] == counters["fusion"]["fused"] == 1
