"""Devices as fusion.torch_private.devices asks them."""

import pytest
import torch

from fusion.torch_private import devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_waits() -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    devices.keep_busy(1_000_000)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0.1


def test_the_wait_is_there_in_builds_without_a_device() -> None:
    assert callable(torch.cuda._sleep)
