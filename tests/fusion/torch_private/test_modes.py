"""Modes of a thread, as fusion.torch_private.tracing uses them."""

import torch
from torch.overrides import TorchFunctionMode

from fusion.torch_private import tracing


class _Count(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_wait_and_come_back_in_order() -> None:
    with torch.device("meta"), _Count() as count:
        with tracing.without_function_modes():
            assert torch.ones(2).device.type == "cpu" and not count.calls
        assert torch.ones(2).device.type == "meta" and count.calls


def test_no_use_of_a_tensor_is_seen() -> None:
    x = torch.ones(2)
    with _Count() as count:
        with tracing.without_functions():
            assert x.requires_grad is False and not count.calls
        assert x.requires_grad is False and count.calls == 1


def test_what_is_watched_is_told() -> None:
    assert not tracing.is_watched()
    with _Count():
        assert tracing.is_watched()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert tracing.is_watched()
    assert not tracing.is_watched()
