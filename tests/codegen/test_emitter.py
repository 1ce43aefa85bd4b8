"""Emitters that are registered from outside of the package, and what a wrong name is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import fusion
from fusion.codegen import emitter, reference
from fusion.errors import EmitterError, OptionError
from fusion.ir import AttentionSpec
from fusion.ir.request import Approximation, Request
from fusion.machine import Machine, machine
from fusion.options import Options
from fusion.planning.choice import Choice, Tile
from fusion.refusals import Reason, Refusal
from fusion.runtime import kernels
from fusion.runtime.guards import GuardedKernel, GuardedTraining, failures_raised
from fusion.torch_private.tensors import is_out_of_memory
from tests.codegen.mlir.cases import case, draw
from tests.numerics import assert_as_exact_as_eager, assert_same


class Loop:
    """A kernel that attends to one query after the other, in float64."""

    def __init__(self, spec: AttentionSpec, machine: Machine, plan: emitter.Planning):
        self.spec, self.planner, self.calls = spec, plan(machine), 0

    def __call__(self, operands, sizes) -> torch.Tensor:
        self.calls += 1
        return reference.run(self.spec, operands, sizes)

    def choice(self, sizes) -> Choice:
        return Choice(schedule="flash", tile=Tile(rows=1, keys=8), keys=sizes[-1])

    def source(self, sizes) -> str:
        return self.choice(sizes).heading("#") + "for each query: softmax(q K^T) V"

    def prepare(self, sizes) -> None:
        """Nothing to compile."""


class Loops:
    """An emitter as a package outside of this one would write it."""

    def __init__(self) -> None:
        self.made: list[Loop] = []

    def supports(self, spec: AttentionSpec, machine: Machine) -> Refusal | None:
        return None if spec.dtype == "float32" else Refusal(Reason.DTYPE, f"loops know float32, not {spec.dtype}")

    def reads(self, dtype: torch.dtype, machine: Machine) -> bool:
        return False

    def compile(self, spec: AttentionSpec, machine: Machine, plan: emitter.Planning, measure: bool) -> Loop:
        self.made.append(Loop(spec, machine, plan))
        return self.made[-1]

    def compile_training(self, spec: AttentionSpec, machine: Machine, plan: emitter.Planning, measure: bool) -> None:
        """Gradients are left to the reference interpreter."""


def model(q, k, v):
    return torch.softmax(q @ k.mT * 0.37, -1) @ v


def run(loops: Loops, name: str, dtype=torch.float32, trained: bool = False):
    """(the site's report, its plan) of a model whose results are eager's, compiled for a registered emitter."""
    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, 9, 16, dtype=dtype, requires_grad=trained) for _ in range(3)]
    options = {"inner": "eager", "emitter": name}
    with kernels.emitting("loops", ("cpu",), lambda: loops, machine), fusion.collect_reports() as reports:
        out = torch.compile(model, backend="fusion", options=options)(*inputs)
        wide = [x.detach().double().requires_grad_(trained) for x in inputs]
        eager, exact = model(*inputs), model(*wide)
        assert_as_exact_as_eager(out, eager, exact)
        if trained:
            pairs = ((out, inputs), (eager, inputs), (exact, wide))
            assert_as_exact_as_eager(*(torch.autograd.grad(result.sum(), given) for result, given in pairs))
        site = reports[0].sites[0]
        return site, site.plan


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["loops", "auto"])
def test_a_model_runs_on_an_emitter_from_outside(name: str, trained: bool) -> None:
    """The one that was registered last is the device's own."""
    loops = Loops()
    site, plan = run(loops, name, trained=trained)
    (kernel,) = loops.made
    assert site.fused and kernel.calls == 1
    assert (site.source or "").splitlines() == ["# flash: tiles of 1 x 8", "for each query: softmax(q K^T) V"]
    assert (plan.schedule, plan.choice.tile.rows, plan.choice.tile.keys) == ("flash", 1, 8)
    assert kernel.planner.choose([1, 2, 9, 9][: len(kernel.spec.sizes)]).tile.rows >= 1
    assert "loops" not in emitter.names(), "forgotten afterwards"


def test_what_it_does_not_support_is_said() -> None:
    loops = Loops()
    site, _ = run(loops, "loops", torch.float64)
    assert not site.fused and not loops.made
    assert str(site.refusal) == "loops know float32, not float64"


def test_names_that_are_not_known_or_do_not_serve_the_device() -> None:
    with pytest.raises(OptionError, match="option 'emitter' is 'gcc'; it must be one of 'auto', 'mlir', 'reference'"):
        Options.parse({"emitter": "gcc"})
    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, 9, 16) for _ in range(3)]
    with pytest.raises(Exception, match="'triton' does not serve device 'cpu'; those that do: auto, ") as caught:
        torch.compile(model, backend="fusion", options={"emitter": "triton", "inner": "eager"})(*inputs)
    assert isinstance(caught.value.__cause__ or caught.value, EmitterError) or "EmitterError" in repr(caught.value)
    with pytest.raises(EmitterError, match="'gcc' is not known; known: auto, mlir, reference, triton"):
        emitter.find("gcc", "cpu")
    with pytest.raises(EmitterError, match="'mlir' does not serve device 'cuda'; those that do: auto, .*triton"):
        emitter.find("mlir", "cuda")
    assert emitter.find("auto", "xpu") is None
    assert str(kernels.unsupported(case("plain").spec, "xpu")) == "there is no emitter for device 'xpu'"


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request(), "auto"),
        (Request(emitter="mlir", tuned=True), "mlir/tuned"),
        (Request(approximation=Approximation(method="polynomial", epsilon=0.01)), "auto+polynomial:0.01"),
        (
            Request(tuned=True, approximation=Approximation(method="polynomial", epsilon=1e-3)),
            "auto/tuned+polynomial:0.001",
        ),
    ],
)
def test_requests_cross_the_op_as_text(request_: Request, text: str) -> None:
    assert str(request_) == text and Request.parse(text) == request_


class Failing:
    """A kernel that fails in one way."""

    source, choice, prepare = "", None, None

    def __init__(self, error: Exception):
        self.error = error

    def __call__(self, *arguments):
        raise self.error

    outputs = backward = __call__


OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: ...")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_is_the_users_error(error: Exception) -> None:
    """The reference interpreter stores N x N scores: it would need more. The kernel is taken again at the next call."""
    c = case("plain", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 4, "Nk": 4})
    forward, training = GuardedKernel(c.spec, Failing(error)), GuardedTraining(c.spec, Failing(error))
    for call in (
        lambda: forward(operands, sizes),
        lambda: training.outputs(operands, sizes),
        lambda: training.backward(operands[0], operands[0], operands[0], operands, sizes, (True,) * 3),
    ):
        with pytest.raises(type(error)):
            call()
    assert is_out_of_memory(error) and not forward.broken and not training.broken


def test_other_failures_are_answered_by_the_reference(caplog) -> None:
    c = case("plain", d=16)
    operands, sizes = draw(c, {"B": 1, "H": 1, "Nq": 4, "Nk": 4})
    guarded = GuardedKernel(c.spec, Failing(RuntimeError("no such instruction")))
    with failures_raised(), pytest.raises(RuntimeError, match="no such instruction"):
        guarded(operands, sizes)
    assert not guarded.broken
    with caplog.at_level(logging.ERROR, logger="fusion.runtime"):
        assert_same(guarded(operands, sizes), reference.run(c.spec, operands, sizes))
    assert guarded.broken and "a kernel failed" in caplog.text


def test_every_emitter_has_the_functions_of_the_protocol() -> None:
    for name in ("reference", "mlir", "triton"):
        device = "cuda" if name == "triton" else "cpu"
        found = emitter.find(name, device)
        assert found is not None
        made = found.load()
        assert all(
            callable(getattr(made, function)) for function in ("supports", "reads", "compile", "compile_training")
        )


def test_one_registration_at_a_time_is_undone() -> None:
    before = emitter.serving("cpu")
    first: object = SimpleNamespace()
    with emitter.registered("first", ("cpu",), lambda: first):  # type: ignore[arg-type,return-value]
        assert emitter.find("auto", "cpu").name == "first"  # type: ignore[union-attr]
        with emitter.registered("second", ("cpu",), lambda: first):  # type: ignore[arg-type,return-value]
            assert emitter.find("auto", "cpu").name == "second"  # type: ignore[union-attr]
    assert emitter.serving("cpu") == before
