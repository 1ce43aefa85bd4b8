"""Levels of torch.func: their calls in Dynamo's graphs, and the open levels.

torch 2.11 and 2.13 write different functions into graphs for the same purpose (one of `torch._C._functorch`, and one of
Python around it). This module treats them alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import eager_transforms, predispatch
from torch.autograd import forward_ad

from fusion.torch_private import autograd
from fusion.torch_private.tensors import tree_leaves, tree_map, tree_map_only

KINDS = ("grad", "jvp", "vmap")
_PLACES = (predispatch, eager_transforms, forward_ad, torch._C._functorch, torch._C._autograd, torch._C, torch)
_MODULES = ("torch._functorch", "torch._C._functorch", "torch._C._autograd", "torch.autograd.forward_ad")


def _functions(*names: str) -> tuple[Any, ...]:
    """All functions of these names."""
    return tuple({id(f): f for place in _PLACES for name in names if (f := getattr(place, name, None))}.values())


_ENTER = {kind: _functions(f"_{kind}_increment_nesting") for kind in KINDS} | {"dual": _functions("_enter_dual_level")}
_LEAVE = {kind: _functions(f"_{kind}_decrement_nesting") for kind in KINDS} | {"dual": _functions("_exit_dual_level")}
FORBID_HOOKS = _functions("_saved_tensors_hooks_disable")
"""The calls that forbid hooks on saved tensors, as a gradient does around its level."""
ALLOW_HOOKS = _functions("_saved_tensors_hooks_enable")
ASK_AUTOGRAD = _functions("_autograd_grad")
"""The calls that compute gradients by autograd, as the function that `torch.func.vjp` returns does."""
UNPACK_DUAL = _functions("_unpack_dual")
"""The calls that return a tensor and its tangent."""
AUTOGRAD_FUNCTION = torch.ops.higher_order.autograd_function_apply
"""The call of a `torch.autograd.Function`."""
_INSIDE = _functions("_make_dual", "_unpack_dual", "_set_fwd_grad_enabled")
VMAP = (
    predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting,
    predispatch._add_batch_dim, predispatch._remove_batch_dim,
)  # fmt: skip
"""The calls of `vmap` in a graph: it opens a level and closes it, puts a tensor on it and takes one off."""
_BEHIND = {id(f): getattr(torch._C._functorch, f.__name__) for f in VMAP}
_BEHIND |= {id(f): f for f in _BEHIND.values()}


def enters(target: Any, *kinds: str) -> bool:
    """Whether a call opens a level, of these kinds or any: "grad", "jvp", "vmap", or "dual", that of forward mode."""
    return any(target in _ENTER[kind] for kind in kinds or _ENTER)


def leaves(target: Any, *kinds: str) -> bool:
    """Whether a call closes a level, of these kinds or any."""
    return any(target in _LEAVE[kind] for kind in kinds or _LEAVE)


def is_of_levels(target: Any) -> bool:
    """Whether a call belongs to a transform, and not to the function that is transformed."""
    where = str(getattr(target, "__module__", ""))
    return where.startswith(_MODULES) or enters(target) or leaves(target) or target in _INSIDE


def of_vmap(target: Any) -> Any:
    """Function behind a call that opens or closes a level of vmap, or puts a tensor on it, whose wrapper would be
    traced; None for other calls."""
    return _BEHIND.get(id(target))


def off_batch(given: Any) -> tuple[Any, int, Callable[[Any], Any]]:
    """Nested arguments of a kernel at the dispatch key "Batched", that of `torch.autograd.grad(is_grads_batched=True)`:
    their tensors with the batch as first dimension, its size, and the function that puts results on it again."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()

    def off(count: int) -> Any:
        return tree_map_only(torch.Tensor, lambda x: torch._remove_batch_dim(x, level, count, 0), given)

    # A tensor that is not of the batch is expanded to its size; of none, its first dimension is empty.
    size = max(len(x) for x in tree_leaves(off(0)) if isinstance(x, torch.Tensor))
    return off(size), size, lambda results: tree_map(lambda x: torch._add_batch_dim(x, 0, level), results)


def depth() -> int:
    """Number of the innermost open level; -1 where there is none."""
    level = torch._C._functorch.maybe_current_level()
    return -1 if level is None else level


@contextlib.contextmanager
def closed_on_error() -> Iterator[None]:
    """Context that closes, on an error, the levels that were opened in it. An open level would affect everything that
    the process runs or compiles next."""
    functions = torch._C._functorch
    before, moving = functions.get_dynamic_layer_stack_depth(), autograd.is_dual_level_open()
    recording, carrying = torch.is_grad_enabled(), autograd.carries_tangents()
    try:
        yield
    except BaseException:
        while functions.get_dynamic_layer_stack_depth() > before:
            kind = functions.peek_interpreter_stack().key().name.lower()
            getattr(functions, f"_{kind}_decrement_nesting")()
        if not moving and autograd.is_dual_level_open():
            torch._C._exit_dual_level(level=0)
        torch.set_grad_enabled(recording)
        autograd.carrying_tangents(carrying)  # set when it is made
        raise


@contextlib.contextmanager
def tangent_level() -> Iterator[int]:
    """The level of `torch.func.jvp`, also where a level of forward mode is open that `torch.func` did not open."""
    functions = torch._C._functorch
    level = functions._jvp_increment_nesting()
    try:
        with autograd.carrying_tangents(True), autograd.dual_level():
            yield level
    finally:
        functions._jvp_decrement_nesting()


taken_off = torch._C._functorch._unwrap_for_grad
"""Tensor behind a tensor of a level, outside of that level."""
