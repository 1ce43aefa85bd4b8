"""Roundings that a model asks for, by a cast to a dtype with fewer digits than that of the product of weights and V.

Other narrow dtypes are those that the model computes in, and kernels are more exact. These roundings are part of the
program: `x.to(torch.float8_e4m3fn).to(x.dtype)` everywhere, `x.bfloat16().float()` in float32 and float16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from fusion.ir.expr import Expr, walk
from fusion.ir.ops import apply, where
from fusion.ir.primitives import ROUNDED
from fusion.refusals import Reason

from .. import marks, nodes
from .reductions import depends_on_product

Held = Callable[[Expr], torch.dtype]
"""The dtype of the tensor that a load reads."""


def is_coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a dtype is a floating one with fewer digits than another one."""
    if not dtype.is_floating_point:
        return False
    return dtype.itemsize == 1 or torch.finfo(dtype).eps > torch.finfo(than).eps


def rounded_at(here: Node, value: Expr, precision: torch.dtype, held: Held) -> Expr | None:
    """Float rounded to the dtype that a node narrows it to; None where no kernel rounds to that. Values computed from
    such floats in the dtype are rounded likewise, except for scores and weights, which are more exact than the model's.
    precision: the dtype of the product of weights and V."""
    dtype = nodes.dtype(here)
    if not is_coarser(dtype, precision):
        return value
    dtypes = (nodes.dtype(x) for x in here.all_input_nodes if nodes.is_tensor(x))
    narrowed = any(origin.is_floating_point and is_coarser(dtype, origin) for origin in dtypes)
    of_scores = depends_on_product(value)
    if not narrowed and (of_scores or all(part.op != ROUNDED.get(dtype) for part in walk(value))):
        return value
    if marks.requires_grad(here) and not of_scores:
        return None  # its gradient is rounded when all of it has been added up
    return narrowed_to(value, dtype, precision, held)


def narrowed_to(value: Expr, dtype: torch.dtype, precision: torch.dtype, held: Held) -> Expr | None:
    """Float rounded to a coarser dtype; None where no primitive rounds to that. Raises Unsupported for scores of
    float64: no kernel rounds them, and scores of -1e9 that differ are equal after that."""
    if precision is torch.float64 and depends_on_product(value):
        raise nodes.Unsupported(Reason.DTYPE, f"scores of float64 are rounded to {dtype}", value)
    return _rounded(value, dtype, held)


def _rounded(value: Expr, dtype: torch.dtype, held: Held) -> Expr | None:
    if value.is_const or value.op == ROUNDED.get(dtype) or (value.op == "load" and held(value) is dtype):
        return value
    if value.op == "where":
        arms = [_rounded(arm, dtype, held) for arm in value.args[1:]]
        return None if None in arms else where(value.args[0], *arms)  # type: ignore[arg-type]
    return apply(ROUNDED[dtype], value) if dtype in ROUNDED else None
