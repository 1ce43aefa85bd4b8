"""Autograd: its records, tangents of forward mode, and operators that run below autograd or as if above it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""The call that a graph has for `torch.no_grad` and its kin."""
GET_DATA = torch._C._autograd._get_data_attr
"""The call that a graph has for `x.data`."""

_KEYS = torch._C.DispatchKey
_OF_RECORDING = (
    _KEYS.AutogradCPU, _KEYS.AutogradCUDA, _KEYS.AutogradOther, _KEYS.AutogradFunctionality, _KEYS.ADInplaceOrView,
    _KEYS.ZeroTensor, _KEYS.FuncTorchDynamicLayerFrontMode, _KEYS.FuncTorchDynamicLayerBackMode,
    _KEYS.FuncTorchGradWrapper,
)  # fmt: skip
"""Dispatch keys of autograd and the levels of torch.func: an operator, or a dispatch mode, is called below them."""


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Context in which autograd and torch.func record inside of an operator, and outer tangents are not propagated.
    Without it, an operator could not compute its gradient from a forward in torch."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in _OF_RECORDING:
        hidden = hidden.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, hidden), carrying_tangents(False):
        yield


def recorded_here(function: type[SingleLevelFunction], first: Any, *tensors: torch.Tensor) -> Any:
    """Apply a function that autograd records on the level of torch.func at which this is called, as operators in C++
    are. `torch.autograd.Function` refuses to run under torch.func without a `setup_context`, and with one is run on
    each level again."""
    with enable_single_level_autograd_function():
        return function.apply(first, *unwrap_dead_wrappers(tensors))


def below(operator: Any, keys: Any, arguments: Any) -> Any:
    """Call an operator below autograd, from a kernel that was registered for "Autograd" with its keys."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


carrying_tangents = forward_ad._set_fwd_grad_enabled
"""Context in which operators propagate tangents, or do not."""


carries_tangents = torch._C._is_fwd_grad_enabled
"""Whether operators propagate tangents."""


def is_within_dual_level() -> bool:
    """Whether a level of `forward_ad` is open: only there have tensors tangents of `forward_ad`."""
    return forward_ad._current_level >= 0


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """`forward_ad.make_dual`, also at a level that `forward_ad` did not open."""
    return torch._VF._make_dual(tensor, tangent, level=0)


def unpack_dual(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the tensor, its tangent), also at a level that `forward_ad` did not open, and unseen by a trace."""
    return torch._VF._unpack_dual(tensor, level=0)


@contextlib.contextmanager
def dual_level() -> Iterator[None]:
    """Level 0 of forward mode, the only one that there is; unchanged where it is open. Levels of torch.func keep their
    tangents apart."""
    level = None
    forward_ad._maybe_load_decompositions()  # the tangents of some gradients
    with contextlib.suppress(RuntimeError):  # it is open
        level = torch._C._enter_dual_level()
    try:
        yield
    finally:
        if level is not None:
            torch._C._exit_dual_level(level=level)


def is_dual_level_open() -> bool:
    """Whether level 0 of forward mode is open."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


@contextlib.contextmanager
def hooks_allowed() -> Iterator[None]:
    """Context in which `torch.autograd.graph.saved_tensors_hooks` may be used, also where `disable_saved_tensors_hooks`
    forbids them. The ban is restored afterwards."""
    hooks = torch._C._autograd
    banned = hooks._saved_tensors_hooks_get_disabled_error_message()
    hooks._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if banned is not None:
            hooks._saved_tensors_hooks_disable(banned, False)
