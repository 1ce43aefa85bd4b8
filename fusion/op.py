"""`torch.ops.fusion.attention`: one attention, whole in its arguments.

    attention(Tensor[] operands, SymInt[] sizes, str spec, str emitter) -> Tensor

`spec` is `AttentionSpec.to_json()`, so that graphs, caches and other processes carry everything that is needed to
build the kernel again. `emitter` is that of the options. Operands may have any strides (the op is tagged so that
Inductor copies nothing).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion import runtime
from fusion.ir import AttentionSpec
from fusion.ir.expr import Expr

_library = torch.library.Library("fusion", "DEF")
_library.define(
    "attention(Tensor[] operands, SymInt[] sizes, str spec, str emitter) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)


def _fake(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, emitter: str) -> Tensor:
    parsed = AttentionSpec.from_json(spec)
    extents = output_extents(parsed, sizes)
    packed = operands[0].new_empty([extents[d] for d in parsed.output.order], dtype=getattr(torch, parsed.out_dtype))
    return packed.permute([parsed.output.order.index(d) for d in parsed.output.dims])


def output_extents(spec: AttentionSpec, sizes: Sequence[int]) -> dict[str, int | torch.SymInt]:
    """The extent of each coordinate of the output."""
    known = dict(zip(spec.sizes, sizes, strict=True))

    def value(expr: Expr) -> int | torch.SymInt:
        return int(expr.attr) if expr.op == "const" else known[str(expr.attr)]  # type: ignore[arg-type]

    batch = {f"b{axis}": value(extent) for axis, extent in enumerate(spec.batch)}
    return batch | {"i": value(spec.n_q), "e": value(spec.d_v)}


torch.library.register_fake("fusion::attention", _fake, lib=_library)
_library.impl("attention", runtime.attention, "CPU")
_library.impl("attention", runtime.attention, "CUDA")
