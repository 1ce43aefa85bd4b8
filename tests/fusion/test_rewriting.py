"""`fusion.rewrite`: GraphModules and exported programs, run, exported, saved and loaded."""

import copy
import io
import operator
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import fusion
from fusion.errors import OptionError, RewriteError
from fusion.planning import pays
from tests.numerics import assert_as_exact_as_eager, assert_same


class Model(torch.nn.Module):
    """Has parameters, a buffer that is read, one that is written, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.project, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.register_buffer("bias", torch.randn(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, temperature: float = 2.0):
        self.calls.add_(1)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        i = torch.arange(x.shape[1])
        s = (q @ k.mT / temperature + self.bias * (i[None] - i[:, None])).masked_fill(i[None] > i[:, None], -torch.inf)
        out = (torch.softmax(s, -1) @ v).transpose(1, 2).flatten(2)
        return {"out": self.out(out), "pooled": out.mean(1)}


class Traceable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 16))
        self.register_buffer("scale", torch.tensor(0.3))

    def forward(self, x, y=None, factor=2.0):
        q = self.inner(x)
        return {"out": torch.softmax(q @ q.mT * self.scale * factor, -1) @ q}


def ops(module) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def traced() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(Traceable(), concrete_args={"y": None})


@pytest.fixture
def exported():
    shapes = ({0: Dim("batch", min=2), 1: Dim("length", min=2)},)
    return torch.export.export(Model().eval(), (torch.randn(2, 9, 16),), dynamic_shapes=shapes)


def in_float64(exported, x) -> dict[str, torch.Tensor]:
    """What the model of the fixture computes in float64, with its parameters."""
    model = Model().eval()
    model.load_state_dict(exported.state_dict)
    return model.double()(x.double())


# --- GraphModules -----------------------------------------------------------------------------------------------


def test_a_graph_module_keeps_what_it_is():
    module, x = torch.fx.symbolic_trace(Traceable()), torch.randn(2, 9, 16)
    before = module.code
    with torch.no_grad(), fusion.collect_reports() as reports:
        fused = fusion.rewrite(module, x, None, 2.0)
    assert [report.fused for report in reports] == [1]
    assert isinstance(fused, torch.fx.GraphModule) and module.code == before
    assert sum("fusion.attention" in op for op in ops(fused)) == 1 and not any("softmax" in op for op in ops(fused))
    assert set(fused.state_dict()) == set(module.state_dict())
    fused.load_state_dict(module.state_dict())
    exact = torch.fx.symbolic_trace(Traceable())
    exact.load_state_dict(module.state_dict())
    exact = exact.double()(x.double(), None, 2.0)["out"]
    assert_as_exact_as_eager(fused(x=x, y=None, factor=2.0)["out"], module(x)["out"], exact, torch.float32)


def test_other_inputs_than_it_was_rewritten_for_are_refused():
    module, x = torch.fx.symbolic_trace(Traceable()), torch.randn(2, 9, 16)
    fused = fusion.rewrite(module, x, None, 2.0)
    with pytest.raises(RewriteError, match=r"shape \[2, 9, 16\] and got torch.float32 of shape \[2, 10, 16\]"):
        fused(torch.randn(2, 10, 16), None, 2.0)
    with pytest.raises(RewriteError, match="got torch.float64"):
        fused(x.double(), None, 2.0)
    with pytest.raises(RewriteError, match=r"rewritten for factor = 2\.0 and got 3\.0; rewrite it again"):
        fused(x, None, 3.0)
    fused.graph.eliminate_dead_code()
    fused.recompile()
    with pytest.raises(RewriteError, match="got torch.float64"):
        fused(x.double(), None, 2.0)


def test_new_weights_count():
    """Buffers that the score program reads are not taken for constants."""
    module, x = torch.fx.symbolic_trace(Traceable()), torch.randn(2, 9, 16)
    fused = fusion.rewrite(module, x, None, 2.0)
    with torch.no_grad():
        for held in fused.state_dict().values():
            held.mul_(0.5)
    actual, eager = fused(x, None, 2.0), module(x, None, 2.0)
    assert_as_exact_as_eager(actual, eager, copy.deepcopy(module).double()(x.double(), None, 2.0))
    assert fused.get_parameter("inner.0.weight") is module.get_parameter("inner.0.weight")


def test_a_rewritten_graph_module_trains():
    module, x = torch.fx.symbolic_trace(Traceable()), torch.randn(2, 9, 16)
    fused = fusion.rewrite(module, x, None, 2.0)
    actual = torch.autograd.grad(fused(x, None, 2.0)["out"].square().sum(), list(fused.parameters()))
    eager = torch.autograd.grad(module(x, None, 2.0)["out"].square().sum(), list(module.parameters()))
    module.double()
    exact = torch.autograd.grad(module(x.double(), None, 2.0)["out"].square().sum(), list(module.parameters()))
    for ours, theirs, reference in zip(actual, eager, exact, strict=True):
        assert_as_exact_as_eager(ours, theirs, reference, torch.float32)


class Changing(torch.nn.Module):
    """Writes to an operand after the attention; eager mode's backward reads scaled copies."""

    def __init__(self, operand: int):
        super().__init__()
        self.operand = operand

    def forward(self, q, k, v):
        given = [x.clone()[..., 1:, :] for x in (q, k, v)]
        out = ((given[0] * 0.3) @ (given[1] * 0.5).mT).softmax(-1) @ (given[2] * 2.0)
        given[self.operand][..., ::2].mul_(2)
        return out + given[self.operand].detach()


@pytest.mark.parametrize("operand", range(3))
def test_operands_that_change_after_the_attention(operand: int):
    module = torch.fx.symbolic_trace(Changing(operand))
    given = [torch.randn(2, 9, 8, requires_grad=True) for _ in range(3)]
    with fusion.collect_reports() as reports:
        fused = fusion.rewrite(module, *given)
    assert [report.fused for report in reports] == [1]

    def gradients(function, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in given]
        return torch.autograd.grad(function(*inputs).square().sum(), inputs)

    eager, exact = gradients(module, torch.float32), gradients(module, torch.float64)
    assert_as_exact_as_eager(gradients(fused, torch.float32), eager, exact, torch.float32)


def test_a_rewritten_graph_module_can_be_exported_and_compiled():
    module, x = torch.fx.symbolic_trace(Traceable()), torch.randn(2, 9, 16)
    fused = fusion.rewrite(module, x, None, 2.0)
    program = torch.export.export(fused, (x, None, 2.0))
    assert any("fusion.attention" in op for op in ops(program))
    for run in (program.module(), torch.compile(fused, backend="aot_eager")):
        assert_same(run(x, None, 2.0), fused(x, None, 2.0))


def test_nothing_to_fuse_returns_the_program_itself():
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    assert fusion.rewrite(module, torch.randn(3)) is module


@pytest.mark.parametrize(
    ("program", "inputs", "message"),
    [
        (torch.nn.Linear(3, 3), (), "was given a Linear; give a torch.fx.GraphModule or a torch.export"),
        (traced(), (), r"0 example inputs for a graph that takes 3 \(x, y.*give one each"),
    ],
)
def test_what_cannot_be_rewritten(program, inputs, message):
    with pytest.raises(RewriteError, match=message):
        fusion.rewrite(program, *inputs)


def test_options_are_checked():
    with pytest.raises(OptionError, match="unknown option"):
        fusion.rewrite(traced(), options={"fast": True})


# --- exported programs ------------------------------------------------------------------------------------------


def test_an_exported_program_keeps_signature_state_and_dynamic_shapes(exported):
    fused = fusion.rewrite(exported)
    assert isinstance(fused, torch.export.ExportedProgram)
    assert sum("fusion.attention" in op for op in ops(fused)) == 1
    assert fused.graph_signature.input_specs == exported.graph_signature.input_specs
    assert set(fused.state_dict) == set(exported.state_dict) and fused.range_constraints == exported.range_constraints
    for shape in ((2, 9, 16), (3, 33, 16)):
        x = torch.randn(shape)
        eager = exported.module()(x)
        assert_as_exact_as_eager(fused.module()(x), eager, in_float64(exported, x))
        assert list(eager) == ["out", "pooled"]


def test_mutated_buffers_stay_mutated(exported):
    module = fusion.rewrite(exported).module()
    for _ in range(3):
        module(torch.randn(2, 9, 16))
    assert module.calls == 3


def test_saved_and_loaded_in_another_process(exported, tmp_path: Path):
    x, fused = torch.randn(3, 17, 16), fusion.rewrite(exported)
    torch.export.save(fused, tmp_path / "model.pt2")
    torch.save((x, fused.module()(x)), tmp_path / "expected.pt")
    script = (
        "import sys, torch, fusion.runtime.op\n"
        "from tests.numerics import assert_same\n"
        "program = torch.export.load(sys.argv[1])\n"
        "x, expected = torch.load(sys.argv[2])\n"
        "assert_same(program.module()(x), expected)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "model.pt2"), str(tmp_path / "expected.pt")]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_decompositions_leave_the_attention_whole(exported):
    lowered = fusion.rewrite(exported).run_decompositions()
    assert any("fusion.attention" in op for op in ops(lowered))
    x = torch.randn(2, 9, 16)
    assert_as_exact_as_eager(lowered.module()(x), exported.module()(x), in_float64(exported, x))


def test_a_program_that_was_lowered_before(exported):
    lowered = fusion.rewrite(exported.run_decompositions())
    assert any("fusion.attention" in op for op in ops(lowered))
    x = torch.randn(2, 9, 16)
    assert_as_exact_as_eager(lowered.module()(x), exported.module()(x), in_float64(exported, x))


def test_a_size_that_would_be_fixed_leaves_the_program_alone():
    class Plain(torch.nn.Module):
        def forward(self, q):
            return torch.softmax(q @ q.mT, -1) @ q

    program = torch.export.export(Plain(), (torch.randn(2, 5, 8),), dynamic_shapes=({2: Dim("width", min=2)},))
    with fusion.collect_reports() as reports:
        assert fusion.rewrite(program) is program
    assert "would fix a size" in reports[0].notes[0]


def test_the_module_of_an_exported_program_is_refused(exported):
    with pytest.raises(RewriteError, match="packed; give the ExportedProgram"):
        fusion.rewrite(exported.module(), torch.randn(2, 9, 16))


def test_strict_raises_here_too():
    class Both(torch.nn.Module):
        def forward(self, q):
            s = q @ q.mT
            return torch.softmax(s, -1) @ q, s

    program = torch.export.export(Both(), (torch.randn(2, 5, 8),))
    with pytest.raises(fusion.FusionError, match="needed elsewhere"):
        fusion.rewrite(program, options={"strict": True})
    assert operator.is_(fusion.rewrite(program), program)


def test_a_program_can_be_kept_in_memory(exported):
    buffer = io.BytesIO()
    torch.export.save(fusion.rewrite(exported), buffer)
    buffer.seek(0)
    x = torch.randn(2, 4, 16)
    assert_as_exact_as_eager(torch.export.load(buffer).module()(x), exported.module()(x), in_float64(exported, x))


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_was_exported_with_views(strict):
    """The memory of these is as large as their base says, whose sizes an export may give names."""

    def of(x):
        return x[:, :24]

    class Documents(torch.nn.Module):
        def forward(self, q, k, v, document):
            other = document[:, :, None] != document[:, None]
            return torch.softmax((q @ k.mT).masked_fill(other, -torch.inf), -1) @ v

    inputs = *(of(torch.randn(2, 30, 16)) for _ in range(3)), of(torch.arange(60).view(2, 30) // 7)
    program = torch.export.export(Documents(), inputs, strict=strict)
    with fusion.collect_reports() as reports:
        rewritten = fusion.rewrite(program)
    assert [report.fused for report in reports] == [1] and not reports[0].notes
    exact = Documents()(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert_as_exact_as_eager(rewritten.module()(*inputs), Documents()(*inputs), exact)


class Short(torch.nn.Module):
    """Attention of so few rows that training it is left to the inner compiler on CPUs."""

    def __init__(self, p: float = 0.0):
        super().__init__()
        self.project, self.dropout = torch.nn.Linear(16, 48), torch.nn.Dropout(p)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return self.dropout(torch.softmax(q @ k.mT / 4, -1) @ v)


def _is_fused(program, *inputs, **options) -> bool:
    with fusion.collect_reports() as reports:
        fusion.rewrite(program, *inputs, options=options)
    (site,) = (site for report in reports for site in report.sites)
    return site.fused


@pytest.mark.parametrize("export_with_gradients", [True, False])
def test_parameters_alone_do_not_make_a_program_one_that_is_trained(export_with_gradients, monkeypatch):
    monkeypatch.setattr(pays, "TRAINING", dict.fromkeys(pays.TRAINING, (100, 100)))
    x = torch.randn(2, 24, 16)
    with torch.set_grad_enabled(export_with_gradients):
        program, trained = (torch.export.export(m, (x,)) for m in (Short(0.1).eval(), Short(0.1).train()))
    assert _is_fused(program)
    assert not _is_fused(trained) and _is_fused(trained, training="never")
    layer = torch.fx.symbolic_trace(Short().eval())
    assert _is_fused(layer, x) and not _is_fused(layer.train(), x)


def test_what_was_rewritten_for_inference_can_be_trained():
    torch.manual_seed(0)
    x, model = torch.randn(2, 24, 16), Short().eval()
    program = torch.export.export(model, (x,))
    fused = fusion.rewrite(program)
    assert fused is not program
    found = []
    for run, dtype in (
        (fused.module(), None),
        (program.module(), None),
        (copy.deepcopy(model).double(), torch.float64),
    ):
        given = x.to(dtype or x.dtype, copy=True).requires_grad_()
        out = run(given)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [given, *run.parameters()])])
    assert_as_exact_as_eager(*found)
