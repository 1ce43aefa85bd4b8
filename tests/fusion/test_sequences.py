"""Attention of a sequence that is sharded over processes: results and gradients of one process, by each schedule."""

import copy
import math

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of torch has no distributed with gloo", allow_module_level=True)

from torch.distributed.tensor import Replicate

import fusion
from fusion.codegen import reference
from fusion.codegen.reference import ReferenceGradient
from fusion.errors import ShardingError, StrictError
from fusion.planning.problem import Problem, attention_of
from fusion.runtime.kernels import differentiable
from fusion.sequences import partial
from tests.fusion.dtensor_cases import gradients
from tests.fusion.sequence_cases import CASES, COUNTED, DECODED, DROPOUT, DROPPED, SCHEDULES, SEED, deserted, work
from tests.fuzz.sharded_run import InShards
from tests.numerics import assert_as_exact_as_eager, assert_as_exact_over_draws, assert_same, assert_same_in_float64
from tests.processes import context, run

ON_FOUR = (
    "plain",
    "causal",
    "window, kernels",
    "rows without a live key, finite",
    "sinks",
    "fewer rows than processes",
)
RUNS = [pytest.param(2, name) for name in CASES]
RUNS += [pytest.param(4, name, marks=() if name in ON_FOUR else pytest.mark.long) for name in CASES]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """By number of processes: what each process found in the cases that were selected."""
    result = {}
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cells = [tuple(map(item.callspec.params.get, ("processes", "name", "schedule"))) for item in here]
    for processes in (2, 4):
        folder = tmp_path_factory.mktemp(f"processes{processes}")
        selected = [(name, schedule) for n, name, schedule in cells if n == processes and name in CASES and schedule]
        run(work, (str(folder), processes, [*dict.fromkeys(selected)]), nprocs=processes)
        result[processes] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]
    return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("processes", "name"), RUNS)
def test_every_process_finds_what_one_process_finds(found, processes, name, schedule):
    case = CASES[name].of(schedule)
    inputs = case.inputs()
    eager = gradients(case.function, copy.deepcopy(inputs))
    exact = gradients(case.function, [t.double() if t.is_floating_point() else t for t in inputs])
    for process in found[processes]:
        result = process[name, schedule]
        assert "error" not in result, result["error"]
        assert {result["out"], *result["gradients"]} == {case.placements()}
        assert result["ran"] == case.runs(schedule, processes)
        if case.dtype is torch.float64:
            for ours, theirs in zip(result["tensors"], exact, strict=True):
                assert_same_in_float64(ours, theirs)
        else:
            assert_as_exact_as_eager(result["tensors"], eager, exact)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropout_is_that_of_one_process_with_the_seed_of_the_first(found, schedule):
    def alone(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in DROPOUT.inputs()]
        options = {"emitter": "reference", "inner": "eager", "training": "always"}
        torch.manual_seed(SEED)
        out = torch.compile(DROPOUT.function, backend="fusion", options=options)(*leaves)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    single, exact = alone(torch.float32), alone(torch.float64)
    for process in found[2]:
        result = process[DROPPED, schedule]
        assert "error" not in result, result["error"]
        assert_as_exact_as_eager(result["tensors"], single, exact)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("processes", (2, 4))
def test_a_process_sends_the_elements_that_the_cost_model_says(found, processes, name, schedule):
    even = COUNTED[name].shapes[0][2] % processes == 0
    if not even and schedule not in ("ring", "mesh"):
        pytest.skip("the formulas are those of equal shards")
    results = [process[name, schedule, "counted"] for process in found[processes]]
    for result in results:
        assert "error" not in result, result["error"]
        assert result["sent"] == tuple(result["model"]), schedule
    if even:
        for n in (0, 1):
            assert sum(result["sent"][n] for result in results) == round(results[0]["formula"][n] * processes)


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("processes", (2, 4))
def test_decoding_over_a_cache_that_is_sharded_by_keys_gathers_sums_and_no_keys(found, processes, name):
    case = DECODED[name]
    eager = [case.function(*case.inputs())]
    exact = [case.function(*(t.double() if t.is_floating_point() else t for t in case.inputs()))]
    rows, width = math.prod(eager[0].shape[:-1]), eager[0].shape[-1]
    for process in found[processes]:
        result = process[name, "decoded"]
        assert "error" not in result, result["error"]
        assert_as_exact_as_eager(result["tensors"], eager, exact)
        assert result["out"] == (Replicate(),)
        assert result["gathered"] == [rows * (width + 2)]
        assert bool(result["sent"]) == bool(case.lacks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_process_that_died_is_an_error_on_the_others(schedule, tmp_path):
    pair = [context().Process(target=deserted, args=(rank, str(tmp_path), schedule)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(600)  # beyond the time-out of the group
        assert process.exitcode == 0, "a process hangs, or died of something else"
    assert (tmp_path / "raised").read_text()


def test_tensors_of_one_process_are_refused():
    attend = fusion.sequence_parallel(CASES["plain"].function)
    with pytest.raises(ShardingError, match=r"called with Tensor, Tensor, Tensor; give DTensors"):
        attend(*CASES["plain"].inputs())


def test_functions_that_cannot_be_computed_by_shards_are_refused(found):
    for process in found[2]:
        refused = process["refused"]
        assert isinstance(refused["weights"], ShardingError) and "weights beside the product" in str(refused["weights"])
        assert isinstance(refused["no attention"], StrictError) and "no attention" in str(refused["no attention"])


@pytest.mark.parametrize("processes", (2, 4))
def test_torch_handles_attention_in_its_context_parallel(found, processes):
    """It deals rows in zig-zag, which placements do not tell; on CPUs it has no kernel."""
    for process in found[processes]:
        result = process["in context parallel"]
        assert "error" not in result, result["error"]
        ours, eager, reasons = result["DTensors"]
        assert_same(ours, eager)
        assert reasons and all("in torch's context_parallel" in reason for reason in reasons)
        assert isinstance(result["function"], ShardingError) and "call it outside" in str(result["function"])
        assert isinstance(result["eager"], NotImplementedError)
        assert isinstance(result["buffers"], (NotImplementedError, RuntimeError))


@pytest.mark.parametrize("request_", ["reference", "auto/unproved"])
def test_a_block_with_nearly_all_weight_of_a_row_keeps_what_the_others_contribute(request_):
    """Gradients of the other weights are 1e6 times as large as those in the block."""
    spec = attention_of(Problem(n_q=9, n_k=16, d=4, d_v=4))

    def draw():
        q, k, v = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 16, 4), torch.randn(1, 1, 16, 4)
        q[..., 0] = 2
        k[..., :8, 0] += 10
        v[..., 8:, :] *= 1e6
        wide, grad, needs = [t.double() for t in (q, k, v)], torch.randn(q.shape), (True,) * 3
        ring = InShards(spec, 2, request_)
        out, statistics = ring.outputs([q, k, v], [])
        found = ring.backward(grad, out, statistics, [q, k, v], [], needs)
        eager = reference.backward(spec, grad, [q, k, v], [], needs, torch.float32)
        return found, eager, reference.backward(spec, grad.double(), wide, [], needs)

    torch.manual_seed(0)
    assert_as_exact_over_draws(draw)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "bias", "soft_cap", "bool_mask"])
def test_blocks_of_a_ring_have_kernels(name, dtype):
    """The reference interpreter computes the same, ten times as slowly."""
    pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")
    from tests.codegen.mlir.cases import case

    spec = case(name, dtype, 40, 24).spec
    assert partial.unsupported(spec) is None
    for block in (partial.of_output(spec), partial.of_gradient(spec)):
        assert not isinstance(differentiable(block.to_json(), "cpu").kernel, ReferenceGradient)
