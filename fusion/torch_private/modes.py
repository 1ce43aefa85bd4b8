"""Modes of a thread that see each call: `TorchFunctionMode`, and the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd import profiler
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Context in which no mode of the caller's (a default device, say) changes a call. `torch.overrides` can only add
    modes; without this, tensors of an analysis would be created on the caller's device."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def without_functions() -> contextlib.AbstractContextManager[None]:
    """Context in which neither modes nor subclasses see uses of a tensor. Without it, reading the form of tensors in a
    trace takes most of the time that copying a repeated call saves."""
    return torch._C.DisableTorchFunction()


def is_watched() -> bool:
    """Whether a profiler or a function mode has to see each operator that is called."""
    return profiler._is_profiler_enabled or torch._C._is_torch_function_mode_enabled()
