"""oneDNN's matrix product, which torch has for frozen graphs, on tensors that are not packed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lacks", "may_run", "product", "product_and"]


def lacks() -> str:
    """Reason why this torch has no such product; "" where it has one."""
    if not torch.backends.mkldnn.is_available():
        return "torch is built without oneDNN"
    try:
        torch.ops.mkldnn._linear_pointwise.default  # noqa: B018
        torch.ops.mkldnn._linear_pointwise.binary  # noqa: B018
        may_run()
    except (AttributeError, RuntimeError) as problem:
        return f"torch {torch.__version__} has no product by oneDNN that is known here ({problem})"
    return ""


def may_run() -> bool:
    """Whether oneDNN is switched on, and products have to be in float32. (The public names of both switches take some
    microseconds.)"""
    precision = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    return torch._C._get_mkldnn_enabled() and precision in ("none", "ieee")


def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`x: [m, k]` times `w: [n, k]`, transposed, plus `bias: [n]`, which is contiguous. `w` is dense by rows or by
    columns; with other strides it would take a hundred times as long. k is not 0."""
    return torch.ops.mkldnn._linear_pointwise.default(x, w, bias, "none", [], "")


def product_and(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    """The product without a bias, plus `other: [m, n]`."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, w, None, "add")
