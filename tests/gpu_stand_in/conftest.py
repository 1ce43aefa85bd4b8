"""The device of these tests: a GPU that is not there (`make test-gpu`). Elsewhere they are skipped."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def installed() -> Any:
    if "STAND_IN_DEVICES" not in os.environ:
        pytest.skip("these tests need the runtime that stands in for CUDA's: make test-gpu")
    from tests.gpu_stand_in.host import install

    return install()


@pytest.fixture
def device(installed: Any) -> Iterator[Any]:
    """What the test launches, and no other. A kernel that fails fails the test, behind torch.compile, too."""
    import torch

    from fusion.runtime.guards import failures_raised

    device, _ = installed
    device.launched.clear()
    device.replays = 0
    torch._dynamo.reset()
    torch.manual_seed(0)
    with failures_raised():
        yield device
    assert not device.faults, device.faults.pop()
