"""Other implementations of an attention: kernels of `scaled_dot_product_attention` and FlexAttention's, where these can
express a spec.

Autotune measures them beside the tiles of our own kernel. One is taken only where its results are as exact as eager's
on rows of this call, and where it takes less time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion.exactness import errors
from fusion.ir import integers
from fusion.ir.expr import Expr, I, J, const, coord
from fusion.ir.ops import apply
from fusion.ir.reads import is_strided, strided
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import dead_rows_matter, plain_scale

from ..reference.forward import Execution
from .flex import flex

SAMPLED = 16  # rows of a block that is compared with float64; the first, the middle and the last block are

Attend = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor], Sequence[int]], None]
"""(Q, K and V as [B, H, n, columns], the output [B, H, n, columns] to be filled, operands, values of the spec's sizes);
raises RuntimeError where there is no kernel for the tensors."""

View = Callable[[Tensor, Sequence[int]], Tensor]
"""(a tensor, extents of b0, b1, rows and columns) -> [B, H, n, columns] of it."""


def sdpa(kind: SDPBackend, spec: AttentionSpec, device: torch.device) -> Attend | None:
    """Kernels of `scaled_dot_product_attention`: for a scale, causal or not."""
    mask, score = spec.mask, spec.score
    if mask is not None:
        if mask.live is not apply("ile", J, I):
            return None
        score = next((part for part in score.args[1:] if part.op != "const"), score) if score.op == "where" else score
    if (scale := plain_scale(score)) is None or dead_rows_matter(spec) or len(spec.operands) != 3:
        return None

    def attend(qkv: Sequence[Tensor], out: Tensor, operands: Sequence[Tensor], sizes: Sequence[int]) -> None:
        grouped = qkv[0].shape[1] != qkv[1].shape[1]
        with sdpa_kernel(kind):
            out.copy_(F.scaled_dot_product_attention(*qkv, is_causal=mask is not None, scale=scale, enable_gqa=grouped))

    return attend


PEERS: dict[str, Callable[[AttentionSpec, torch.device], Attend | None]] = {
    "sdpa cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex flash": flex,
}
"""Implementations that may run in place of our own kernel, by their names in reports: (`plain` spec, device) ->
function, or None."""


def plain(spec: AttentionSpec) -> bool:
    """Whether a spec is nothing but softmax(program) @ V of two batch coordinates, in one dtype."""
    dtypes = {spec.dtype, spec.out_dtype, *(operand.dtype for operand in spec.operands[:3])}
    others = (*spec.sinks, *spec.aux_outputs, spec.row_scale, spec.mixing, spec.k_value, spec.v_value)
    usual = spec.normalizer in (Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX) and spec.weight is const(1.0)
    return usual and not any(other is not None for other in others) and len(dtypes) == 1 and len(spec.batch) == 2


Call = Callable[[Sequence[Tensor], Sequence[int], Sequence[int], Tensor], None]
"""(operands, values of the spec's sizes, extents of the batch, queries, keys and columns, the output to be filled)"""


def calls(spec: AttentionSpec, device: torch.device) -> Mapping[str, Call]:
    """Peers that compute a spec on a device, by name."""
    views = [_view(*spec.access(number)) for number in (0, 1, 2)]
    if None in views or not plain(spec):
        return {}
    dims = [spec.output.dims.index(name) for name in ("b0", "b1", "i", "e")]

    def call(
        attend: Attend, operands: Sequence[Tensor], sizes: Sequence[int], extents: Sequence[int], out: Tensor
    ) -> None:
        *batch, n_q, n_k, d, d_v = extents
        shapes = (*batch, n_q, d), (*batch, n_k, d), (*batch, n_k, d_v)
        with torch.no_grad():
            qkv = [view(x.detach(), shape) for view, x, shape in zip(views, operands, shapes, strict=False) if view]
            attend(qkv, out.permute(dims), operands, sizes)

    attends = {name: attend for name, of in PEERS.items() if (attend := of(spec, device)) is not None}
    return {name: functools.partial(call, attend) for name, attend in attends.items()}


def _view(index: Sequence[Expr], row: Expr, column: Expr) -> View | None:
    """Function that views a tensor read at these indices as [B, H, n, columns], if it is a strided view; fewer heads
    where groups of them share one."""
    atoms = [monomial[0] for part in index for monomial in integers.terms(part) if len(monomial) == 1]
    heads = next((atom for atom in atoms if atom.op == "floordiv" and atom.args[0] is coord("b1")), coord("b1"))
    own = (coord("b0"), heads, row, column)
    if not is_strided(index, own) or heads.args and not heads.args[1].is_const:
        return None
    group = heads.args[1].integer if heads.args else 1

    def view(tensor: Tensor, extents: Sequence[int]) -> Tensor:
        batch, every, *rest = extents
        return strided(tensor, index, own, (batch, every // group, *rest))

    return view


def as_exact_as_eager(spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], out: Tensor) -> bool:
    """Whether some rows of an output follow the rule for numbers (`fusion.exactness`)."""
    exact, eager = (Execution(spec, operands, sizes, dtype) for dtype in (torch.float64, getattr(torch, spec.dtype)))
    rows = out.permute([spec.output.dims.index(name) for name in ("b0", "b1", "i", "e")])
    held = exact.gathered(), eager.gathered()
    count = min(SAMPLED, exact.n_q)
    for first in {0, (exact.n_q - count) // 2, exact.n_q - count}:
        true, theirs = (
            each.results(first, count, *tensors)[0] for each, tensors in zip((exact, eager), held, strict=True)
        )
        if errors(rows[:, :, first : first + count], theirs, true, getattr(torch, spec.dtype)).share > 1:
            return False
    return True
