"""What a process has set for its own programs, and what does not hold while one is analysed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode


@contextlib.contextmanager
def by_autograd() -> Iterator[None]:
    """What the caller has set for its own gradients is not for the analysis: hooks on saved tensors, of which a
    checkpoint counts some, or their ban, and the search for NaN, which made-up values have."""
    hooks = torch._C._autograd
    banned = hooks._saved_tensors_hooks_get_disabled_error_message()
    hooks._saved_tensors_hooks_enable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same), torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        if banned is not None:
            hooks._saved_tensors_hooks_disable(banned, False)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def by_function_modes() -> Iterator[None]:
    """A default device, say, is for the tensors of the graph, which is traced again under it, and for none of ours."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
