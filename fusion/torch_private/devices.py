"""Devices and processes: oneDNN's matrix product, which torch has for frozen graphs, on packed and on other tensors;
AMX's tile registers; time on a GPU; process groups by name; the directory of torch's caches, and the files that travel
with `torch.compiler.save_cache_artifacts`.

`import fusion` needs this module. Dynamo takes a second to import, and fails where the directory cannot be made.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from torch.fx import Node

__all__ = ["CacheArtifact", "CacheArtifactFactory", "CacheArtifactManager"]


def cache_dir() -> str:
    """Directory of Inductor's files, created where it does not exist. Compiled kernels lie beside them."""
    from torch._inductor.runtime import cache_dir_utils

    return cache_dir_utils.cache_dir()


def init_amx() -> bool:
    """Ask the operating system for AMX's tile registers; False where it refuses. Without it, matrix kernels of CPUs
    with AMX would end the process."""
    return bool(torch.cpu._init_amx())


def amx_has_float16() -> bool:
    """Whether AMX multiplies tiles of float16 (CPUID leaf 7, subleaf 1, bit 21 of EAX), which Linux does not list."""
    return bool(torch.cpu._is_amx_fp16_supported())


def onednn_lacks() -> str:
    """Reason why this torch has no such product; "" where it has one."""
    if not torch.backends.mkldnn.is_available():
        return "torch is built without oneDNN"
    try:
        torch.ops.mkldnn._linear_pointwise.default  # noqa: B018
        torch.ops.mkldnn._linear_pointwise.binary  # noqa: B018
        onednn_may_run()
    except (AttributeError, RuntimeError) as problem:
        return f"torch {torch.__version__} has no product by oneDNN that is known here ({problem})"
    return ""


def onednn_may_run() -> bool:
    """Whether oneDNN is switched on, and torch itself would compute products of float32 matrices in float32. With tf32
    allowed it does on processors without AMX's half precision; with bfloat16 allowed its products are oneDNN's."""
    precision = _precision()
    is_float32 = precision in _FULL or (precision == "tf32" and not amx_has_float16())
    return torch._C._get_mkldnn_enabled() and is_float32


def products_may_round_more() -> bool:
    """Whether less precision than float32's was asked for."""
    return _precision() not in _FULL


_FULL = ("none", "ieee")


def _precision() -> str:
    """The precision that was asked for. (The public names of this switch and of oneDNN's take some microseconds.)"""
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul")


def onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products in float32, or in bfloat16 on this processor."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def onednn_product(x: Tensor, w: Tensor, bias: Tensor | None, gelu: str = "") -> Tensor:
    """`x: [m, k]` times `w: [n, k]`, transposed, plus `bias: [n]`, which is contiguous. `w` is dense by rows or by
    columns; with other strides it would take a hundred times as long. k is not 0. gelu: the `approximate` of the GELU
    that the result is of, "" for none."""
    return torch.ops.mkldnn._linear_pointwise.default(x, w, bias, "gelu" if gelu else "none", [], gelu)


def onednn_product_and(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    """The product without a bias, plus `other: [m, n]`."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, w, None, "add")


def onednn_packed(w: Tensor, rows: int) -> Tensor:
    """`w: [n, k]`, dense, as oneDNN reads it fastest in products of so many rows; for `onednn_product`."""
    return torch.ops.mkldnn._reorder_linear_weight(w, rows)


def mkl_packed(w: Tensor, rows: int) -> Tensor:
    """`w: [n, k]`, contiguous, in float32, as MKL reads it fastest in products of just so many rows; for
    `mkl_product`."""
    return torch.ops.mkl._mkl_reorder_linear_weight(w, rows)


def mkl_product(x: Tensor, packed: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`x: [m, k]` times `w: [n, k]`, transposed, plus `bias: [n]`, from w packed for m rows."""
    return torch.ops.mkl._mkl_linear(x, packed, w, bias, x.shape[0])


def is_mkl_product(node: Node) -> bool:
    """Whether a node is a product that Inductor gave to MKL as it froze a graph. Arguments: `x: [m, k]`, the packed
    weight, `w: [n, k]`, the bias or None, m."""
    return torch.backends.mkl.is_available() and node.target in (
        torch.ops.mkl._mkl_linear,
        torch.ops.mkl._mkl_linear.default,
    )


def keep_busy(cycles: int) -> None:
    """Let the current CUDA device wait. Without it, measured times include the host's time to launch a kernel."""
    torch.cuda._sleep(cycles)


def in_context_parallel() -> bool:
    """Whether torch's `context_parallel`, or the switch behind it, handles attention of DTensors at the moment."""
    from torch.distributed.tensor import DTensor

    return torch.ops.aten._scaled_dot_product_flash_attention.default in DTensor._op_dispatcher._custom_op_handlers


def group_of(name: str) -> dist.ProcessGroup:
    """Process group with this `group_name`, which operators in a graph carry."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType]
