"""`verify="run"`: the first call is compared with eager, and eager's result stands where they differ."""

import threading

import pytest
import torch
from torch._dynamo.utils import counters

from fusion import inner_compiler
from fusion.codegen.reference.forward import Execution
from tests.fusion.validation import faults
from tests.numerics import assert_as_exact_as_eager

OPTIONS = {"inner": "eager", "emitter": "reference", "verify": "run"}


def _written(q, k, v):
    """Changes an input in place as well."""
    v.mul_(2)
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("program", [faults.plain, _written])
def test_the_first_call(monkeypatch, caplog, program, wrong):
    given, same, wide = faults.inputs(), faults.inputs(), [x.double() for x in faults.inputs()]
    before = counters["fusion"]["invalid"]
    if wrong:
        results = Execution.results
        monkeypatch.setattr(Execution, "results", lambda *arguments: [x + 1 for x in results(*arguments)])
    compiled = torch.compile(program, backend="fusion", options=OPTIONS)
    with torch.no_grad():
        for _ in range(2):
            assert_as_exact_as_eager(compiled(*given), program(*same), program(*wide), torch.float32)
            assert_as_exact_as_eager(given, same, wide, torch.float32)
    assert counters["fusion"]["invalid"] == before + wrong
    assert any("first call differs" in record.message for record in caplog.records) == wrong


def test_a_comparison_that_fails_leaves_eager(monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("put in")

    monkeypatch.setattr(inner_compiler, "errors", fail)
    before = counters["fusion"]["skipped"]
    compiled, given = torch.compile(faults.plain, backend="fusion", options=OPTIONS), faults.inputs()
    ran = []
    results = Execution.results
    monkeypatch.setattr(Execution, "results", lambda *arguments: ran.append(1) or results(*arguments))
    with torch.no_grad():
        assert torch.equal(compiled(*given), faults.plain(*given))
        once = len(ran)
        assert torch.equal(compiled(*given), faults.plain(*given))
    assert once == len(ran) == 1 and counters["fusion"]["skipped"] == before + 1
    assert any("put in" in record.getMessage() for record in caplog.records)


def test_one_thread_whose_first_call_differs_decides_for_all():
    """Another's first call began before that was known, and agreed."""
    began, wrong = threading.Event(), threading.Event()
    module = torch.fx.symbolic_trace(lambda x: x + 1)

    def compiled(x):
        if x.numel() == 1:
            began.set()
            wrong.wait(60)
            return x + 1
        return x + 2

    run = inner_compiler.compared(compiled, module, module)
    thread = threading.Thread(target=run, args=(torch.ones(1),))
    thread.start()
    began.wait(60)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    wrong.set()
    thread.join()
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
