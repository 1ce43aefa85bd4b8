"""What else computes an attention: kernels of `scaled_dot_product_attention`, where it can say what a spec says.

Autotune measures them beside the tiles of our own kernel. One is taken only where its results are as exact as eager's
on rows of this call, and where it takes less time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion.codegen.reference.forward import Execution
from fusion.exactness import errors
from fusion.ir.expr import C, E, Expr, I, J, coord
from fusion.ir.ops import apply
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.dead_rows import dead_rows_matter
from fusion.lowering.score_programs import plain_scale

KERNELS = {
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""By the names that reports give them."""

SAMPLED = 16
"""Rows of a block that is compared with float64; the first, the middle and the last block are."""


View = Callable[[Tensor, Sequence[int]], Tensor]
"""(a tensor, extents of b0, b1, rows and columns) -> [B, H, n, columns] of it."""


class Said(NamedTuple):
    """An attention in SDPA's words. views: of Q, K and V."""

    scale: float
    causal: bool
    views: tuple[View, ...]


def said(spec: AttentionSpec) -> Said | None:
    """A spec in SDPA's words, or None where it has none for it."""
    mask, plain = spec.mask, spec.score
    if mask is not None:
        if mask.live is not apply("ile", J, I):
            return None
        plain = next((part for part in plain.args[1:] if part.op != "const"), plain) if plain.op == "where" else plain
    if (scale := plain_scale(plain)) is None:
        return None
    usual = spec.normalizer in (Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX) and not dead_rows_matter(spec)
    if not usual or spec.sinks or spec.row_scale is not None or spec.weight.op != "const" or spec.weight.attr != 1:
        return None
    dtypes = {spec.dtype, spec.out_dtype, *(operand.dtype for operand in spec.operands[:3])}
    if len(spec.operands) != 3 or len(dtypes) != 1 or len(spec.batch) != 2:
        return None
    views = [_view(index, axes) for index, axes in ((spec.q, (I, C)), (spec.k, (J, C)), (spec.v, (J, E)))]
    return None if None in views else Said(scale, mask is not None, tuple(view for view in views if view is not None))


def _view(index: Sequence[Expr], axes: tuple[Expr, Expr]) -> View | None:
    """How a tensor that is read at these indices becomes [B, H, n, columns], where they are sums of multiples of
    coordinates; fewer heads where groups of them share one."""
    forms = [form for part in index if (form := _affine(part)) is not None]
    variables = {variable for form in forms for variable in form} - {None}
    heads = next((part for part in variables if part is not None and part.op == "floordiv"), coord("b1"))
    group = heads.args[1].integer if heads.args else 1
    own = (coord("b0"), heads, *axes)
    if len(forms) < len(index) or not variables <= set(own):
        return None

    def view(tensor: Tensor, extents: Sequence[int]) -> Tensor:
        def step(variable: Expr | None) -> int:
            return sum(form.get(variable, 0) * stride for form, stride in zip(forms, tensor.stride(), strict=True))

        batch, every, *rest = extents
        shape = (batch, every // group, *rest)
        return tensor.as_strided(shape, [step(variable) for variable in own], tensor.storage_offset() + step(None))

    return view


def _affine(expr: Expr) -> dict[Expr | None, int] | None:
    """The multiples of coordinates (None: of 1) whose sum an index is; a quotient of heads by their group counts as a
    coordinate."""
    if expr.op == "const":
        return {None: expr.integer}
    if expr.op == "coord" or expr.op == "floordiv" and expr.args[0] is coord("b1") and expr.args[1].op == "const":
        return {expr: 1}
    if expr.op == "mul" and len(expr.args) == 2 and expr.args[0].op == "const":
        inner = _affine(expr.args[1])
        return inner and {variable: expr.args[0].integer * count for variable, count in inner.items()}
    if expr.op != "add":
        return None
    total: dict[Expr | None, int] = {}
    for arg in expr.args:
        if (inner := _affine(arg)) is None:
            return None
        for variable, count in inner.items():
            total[variable] = total.get(variable, 0) + count
    return total


def calls(spec: AttentionSpec, words: Said) -> Mapping[str, Callable[[Sequence[Tensor], Sequence[int], Tensor], None]]:
    """(operands, extents of the batch, queries, keys and columns, output) -> None by name: each fills the output. They
    raise where torch has no such kernel for the tensors."""
    dims = [("b0", "b1", "i", "e").index(name) for name in spec.output.dims]

    def call(kind: SDPBackend, operands: Sequence[Tensor], extents: Sequence[int], out: Tensor) -> None:
        *batch, n_q, n_k, d, d_v = extents
        shapes = (*batch, n_q, d), (*batch, n_k, d), (*batch, n_k, d_v)
        q, k, v = (view(*given) for view, *given in zip(words.views, operands, shapes, strict=True))
        grouped = k.shape[1] != q.shape[1]
        with sdpa_kernel(kind):
            found = F.scaled_dot_product_attention(
                q, k, v, is_causal=words.causal, scale=words.scale, enable_gqa=grouped
            )
        out.copy_(found.permute(dims))

    return {name: functools.partial(call, kind) for name, kind in KERNELS.items()}


def as_exact_as_eager(spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int], out: Tensor) -> bool:
    """Whether some rows of an output follow the rule for numbers (`fusion.exactness`)."""
    exact, eager = (Execution(spec, operands, sizes, dtype) for dtype in (torch.float64, getattr(torch, spec.dtype)))
    rows = out.permute([spec.output.dims.index(name) for name in ("b0", "b1", "i", "e")])
    held = exact.gathered(), eager.gathered()
    count = min(SAMPLED, exact.n_q)
    for first in {0, (exact.n_q - count) // 2, exact.n_q - count}:
        true, theirs = (each.rows(first, count, *tensors) for each, tensors in zip((exact, eager), held, strict=True))
        if errors(rows[:, :, first : first + count], theirs, true, getattr(torch, spec.dtype)).share > 1:
            return False
    return True
