"""Operations that are traced as their decompositions, which the analysis knows.

Some may return their input, or views of it, of which their schemas say nothing. Others work element by element on
tensors that they cut or reshape before, or sum afterwards: gates, losses. Their decompositions are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusion.torch_private.operators import schema

aten = torch.ops.aten

_SILENT = (aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_tensors, aten.cartesian_prod,
           aten.chain_matmul, aten.conj_physical, aten.meshgrid, aten.sum_to_size)  # fmt: skip
_OF_OTHERS = (aten.prelu, aten.float_power, aten.l1_loss, aten.kl_div, aten.poisson_nll_loss, aten.margin_ranking_loss,
              aten.hinge_embedding_loss)  # fmt: skip
_BY_TORCH = (aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss, aten.soft_margin_loss,
             aten.binary_cross_entropy_with_logits)  # fmt: skip
"""With gradients of their own in torch, which those of the decompositions equal. (Those of `binary_cross_entropy` are
others where its logarithms are cut off.)"""


def _by_torch(overload: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _table()[overload](*args, **kwargs)


@functools.cache
def _table() -> Any:
    return torch.export.default_decompositions()


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Gated linear unit, computed in float32 and rounded once, as torch does."""
    gated, gate = x.float().chunk(2, dim) if x.dtype in (torch.bfloat16, torch.float16) else x.chunk(2, dim)
    return (gated * gate.sigmoid()).to(x.dtype)


def _overloads(packet: Any) -> list[Any]:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in overloads if not schema(overload).is_mutable]


MADE_OF_OTHERS: dict[Any, Callable[..., Any]] = {
    aten.glu.default: _glu,
    **{overload: overload.decompose for packet in (*_SILENT, *_OF_OTHERS) for overload in _overloads(packet)},
    **{overload: _by_torch(overload) for packet in _BY_TORCH for overload in _overloads(packet)},
}
"""Overload -> what is traced in its place."""
