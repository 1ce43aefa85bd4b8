"""Products by oneDNN, split into several calls where their sums are deep."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.torch_private import devices
from fusion.torch_private.tensors import unset_fake_temporarily
from fusion.torch_private.tracing import without_function_modes

CHAIN = 430
"""Terms that may be added one to the other, on average over a sum. MKL adds up 192 and then such sums; chains of 512
have errors of 1.3 times what the project's rule allows beside it, chains of 430 stay within."""
FEW = 32
"""Rows from which on MKL adds all products in one way. With fewer its chains may be much shorter."""
STEP = 256
"""Widths of parts that differ: a sum of 1024 terms is best computed as 768, and 256, of which oneDNN adds 512 and then
two times 256."""


@functools.cache
def lacks() -> str:
    """Reason why no product of this torch may go to oneDNN; "" where they may."""
    if not torch.backends.mkl.is_available():
        return "torch is built without MKL, the library that oneDNN was compared with"
    return devices.onednn_lacks()


Pack = Callable[[int], Iterable[Tensor]]


def product(x: Tensor, w: Tensor, bias: Tensor | None, gelu: str = "", pack: Pack | None = None) -> Tensor:
    """`x: [m, k]` times `w: [n, k]`, transposed, plus `bias: [n]`, and its GELU where `gelu` names one. Operands may
    have any strides; one that oneDNN cannot read is copied for this call. Where less precision than float32's was
    asked for, no sum is split. pack: the parts of w of a width, packed."""
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    part = x.shape[1] if devices.products_may_round_more() else width(x.shape[1], x.dtype)
    # Copied one by one, into memory that was freed just now and is in the caches.
    weights = pack(part) if pack else map(_dense, w.split(part, 1))
    if part == x.shape[1]:
        return devices.onednn_product(x, next(iter(weights)), bias, gelu)
    parts = zip(x.split(part, 1), weights, strict=True)
    left, right = next(parts)
    out = devices.onednn_product(_dense(left), right, bias)
    for left, right in parts:
        out = devices.onednn_product_and(_dense(left), right, out)
    return F.gelu(out, approximate=gelu) if gelu else out


@functools.lru_cache(65536)
def width(depth: int, dtype: torch.dtype = torch.float32) -> int:
    """Number of terms per call for sums of `depth` terms, so that the chains of additions stay short. In bfloat16
    torch's own products are oneDNN's, too."""
    if dtype is not torch.float32 or depth <= CHAIN:
        return depth
    for count in range(1, depth):
        least = -(-depth // count)
        for part in (least, (least // STEP + 1) * STEP):
            rest = depth % part
            if depth // part + (rest > 0) != count:
                continue
            terms = (depth - rest) * _chain(part) + (rest * _chain(rest) if rest else 0)  # in chains of so many
            if terms / depth <= CHAIN:
                return part
    return 1


def stays(rows: int) -> bool:
    """Whether a product of so many rows is left to MKL, whose chains are so short there that oneDNN would round worse
    than the rule allows. On Zen 5 that is so with 2 and 3 rows, on Intel's processors with AMX with 1 to 15."""
    return isinstance(rows, int) and 0 < rows < FEW and not devices.products_may_round_more() and _is_short(rows)


@functools.lru_cache(FEW)
def _is_short(rows: int) -> bool:
    own, many = (_longest(torch.mm, count, 768, 1024) for count in (rows, FEW))
    return 2 * own < many and 1.5 * own < _longest(_onednn, rows, 768, 1024)


def _chain(depth: int) -> float:
    """Length of the chains in which oneDNN adds up so many terms, averaged over the terms."""
    longest = _longest(_onednn, 64, depth, 64)
    rest = depth % longest
    return (depth - rest) / depth * longest + rest / depth * rest


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    return devices.onednn_product(x, w.mT, None)


def _longest(multiply: Callable[[Tensor, Tensor], Tensor], rows: int, depth: int, columns: int) -> int:
    """Longest chain in which a product's terms are added one to the other. In float32 2**24 + 1 is 2**24: a chain
    that begins with 2**24 loses the ones that follow."""
    with plainly():
        x, w = (torch.ones(n, depth, dtype=torch.float32, device="cpu") for n in (rows, columns))
        w[:, 0] = 2.0**24
        return depth - int((multiply(x, w.mT) - 2.0**24).min())


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Run operations on real tensors, whatever the graph is compiled or run under."""
    with (
        unset_fake_temporarily(),
        without_function_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def copied(x: Tensor, w: Tensor) -> int:
    """Number of elements of the operands that a product copies."""
    parts = width(x.shape[1], x.dtype) < x.shape[1]
    left = parts or not x.is_contiguous()
    right = not w.mT.is_contiguous() and (parts or not w.is_contiguous())
    return left * x.numel() + right * w.numel()


def _dense(w: Tensor) -> Tensor:
    return w if w.is_contiguous() or w.mT.is_contiguous() else w.contiguous()
