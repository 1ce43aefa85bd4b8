"""`verify="run"`: the first call is compared with eager, and eager's result stands where they differ."""

import pytest
import torch
from torch._dynamo.utils import counters

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
