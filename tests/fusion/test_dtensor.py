"""Attention of DTensors on two processes: the results and gradients of one process, each computing its own heads."""

import copy

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of torch has no distributed with gloo", allow_module_level=True)

from tests import processes
from tests.fusion.dtensor_cases import CASES, PROCESSES, gradients, work
from tests.numerics import assert_as_exact_as_eager


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    processes.run(work, (str(folder),), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.out is not None])
def test_every_process_finds_what_one_process_finds(found, name):
    case = CASES[name]
    inputs = case.inputs()
    eager = gradients(case.function, copy.deepcopy(inputs))
    exact = gradients(case.function, [t.double() if t.is_floating_point() else t for t in inputs])
    for process in found:
        result = process[name]
        assert "error" not in result, result["error"]
        assert result["fused"] >= 1, result["reasons"]
        assert result["out"] == case.out, "the work was not divided as it could have been"
        assert_as_exact_as_eager(result["tensors"], eager, exact)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.out is None])
def test_what_cannot_be_divided_is_left_alone(found, name):
    for process in found:
        assert "error" not in process[name], process[name]["error"]
        assert process[name]["fused"] == 0
        assert any("DTensor" in reason for reason in process[name]["reasons"] if reason)
