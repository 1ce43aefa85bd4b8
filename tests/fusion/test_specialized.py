"""What Inductor's code calls: a function bound to its spec. test_warm_start.py looks at the next process."""

import threading

import pytest
import torch
from torch._inductor.utils import run_and_get_code

pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")

import fusion
from fusion.codegen import reference
from fusion.ir import AttentionSpec
from fusion.runtime import kernels, specialized
from fusion.runtime import op as _op  # noqa: F401
from tests.numerics import assert_as_exact_as_eager, assert_same, wide


def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def inputs(n: int = 17, m: int = 23) -> list[torch.Tensor]:
    return [torch.randn(2, 3, rows, 16) for rows in (n, m, m)]


def check(run, given) -> None:
    assert_as_exact_as_eager(run(*given), attend(*given), attend(*wide(given)))


@pytest.fixture
def spec() -> AttentionSpec:
    with torch.no_grad(), fusion.collect_reports() as reports:
        torch.compile(attend, backend="fusion", options={"inner": "eager"})(*inputs())
    (site,) = reports[0].sites
    return site.attentions[0].spec


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductors_code_calls_no_operator(dynamic: bool) -> None:
    run = torch.compile(attend, backend="fusion", dynamic=dynamic)
    with torch.inference_mode():
        _, (code,) = run_and_get_code(run, *inputs())
        assert code.count("= specialized_attention(") == 1 and "= torch.ops.fusion." not in code
        check(run, inputs())
        check(run, inputs(5, 40))


@pytest.mark.parametrize("dynamic", [False, True])
def test_nor_does_its_code_of_training(dynamic: bool) -> None:
    run, given = torch.compile(attend, backend="fusion", dynamic=dynamic), [x.requires_grad_() for x in inputs()]

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(run(*given).square().sum(), given))

    found, codes = run_and_get_code(step)
    assert [code.count("= specialized_attention(") for code in codes] == [1, 1]
    assert not any(f"= torch.ops.fusion.{name}." in code for code in codes for name in specialized.SPECIALIZED)
    exact = [x.detach().double().requires_grad_() for x in given]
    eager = [torch.autograd.grad(attend(*x).square().sum(), x) for x in (given, exact)]
    assert_as_exact_as_eager(found, *map(list, eager))
    with torch.profiler.profile() as profile:
        assert_same(step(), found)
    names = {event.key for event in profile.key_averages()}
    assert {"fusion::attention_forward", "fusion::attention_backward"} <= names


def test_layers_with_one_spec_share_a_function() -> None:
    run = torch.compile(lambda q, k, v: attend(attend(q, k, v), k, v), backend="fusion")
    with torch.no_grad():
        _, (code,) = run_and_get_code(run, *inputs())
    assert code.count("= specialized_attention(") == 1 and code.count("= attention_") == 2


def test_the_same_sizes_with_other_strides(spec: AttentionSpec) -> None:
    call = specialized.specialized_attention(spec.to_json(), "cpu", "auto")
    sizes = [2, 3, 17, 23]
    q, k, v = inputs()
    wider = torch.randn(2, 3, 23, 40)
    for key in (k, k.mT.contiguous().mT, k.transpose(0, 1).contiguous().transpose(0, 1), k[:1].expand_as(k)):
        check(lambda *operands: call(operands, sizes), [q, key, v])
    for part in (wider[..., 3:19], wider[..., ::2][..., :16]):
        check(lambda *operands: call(operands, sizes), [q, part, v])


def test_threads_call_one_function_at_a_time_each_with_its_own_tensors(spec: AttentionSpec) -> None:
    call = specialized.specialized_attention(spec.to_json(), "cpu", "auto")
    sizes, given = [2, 3, 17, 23], [inputs() for _ in range(4)]
    expected, found = [call(x, sizes) for x in given], {}

    def work(number: int) -> None:
        for _ in range(200):
            found[number] = call(given[number], sizes)
            if not torch.equal(found[number], expected[number]):
                return

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, result in enumerate(expected):
        assert_same(found[number], result)


def test_a_call_that_is_profiled_is_named(spec: AttentionSpec) -> None:
    call = specialized.specialized_attention(spec.to_json(), "cpu", "auto")
    given = inputs()
    with torch.profiler.profile() as profile, torch.no_grad():
        result = call(given, [2, 3, 17, 23])
    assert any("fusion::attention" in event.key for event in profile.key_averages())
    assert_same(result, call(given, [2, 3, 17, 23]))


def test_a_kernel_that_is_forgotten_is_looked_up_again() -> None:
    run, given, calls = torch.compile(attend, backend="fusion", dynamic=False), inputs(), []

    class Counting:
        """The reference interpreter's kernels, whose calls are counted."""

        def __getattr__(self, name: str):
            return getattr(reference, name)

        def compile(self, *arguments):
            kernel = reference.compile(*arguments)
            return type("Kernel", (), {"__call__": lambda self, *given: calls.append(1) or kernel(*given)})()

    with torch.no_grad():
        check(run, given)
        with kernels.emitting("counting", ("cpu",), Counting):
            check(run, given)
            assert len(calls) == 1
        check(run, given)
        assert len(calls) == 1
