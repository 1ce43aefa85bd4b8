"""Products by oneDNN, split into several calls where their sums are deep."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fusion.torch_private import devices
from fusion.torch_private.fake import unset_fake_temporarily
from fusion.torch_private.tracing import without_function_modes

CHAIN = 430
"""Terms that may be added one to the other, on average over a sum. MKL adds up 192 and then such sums; chains of 512
have errors of 1.3 times what the project's rule allows beside it, chains of 430 stay within."""
FEW = (2, 3)
"""Rows for which MKL has shorter chains: beside it oneDNN would round worse than the rule allows."""


@functools.cache
def lacks() -> str:
    """Reason why no product of this torch may go to oneDNN; "" where they may."""
    if not torch.backends.mkl.is_available():
        return "torch is built without MKL, the library that oneDNN was compared with"
    return devices.onednn_lacks()


def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`x: [m, k]` times `w: [n, k]`, transposed, plus `bias: [n]`. Operands may have any strides; one that oneDNN
    cannot read is copied for this call."""
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    if (part := width(x.shape[1])) == x.shape[1]:
        return devices.onednn_product(x, _dense(w), bias)
    parts = zip(x.split(part, 1), w.split(part, 1), strict=True)
    left, right = next(parts)
    out = devices.onednn_product(left, _dense(right), bias)
    for left, right in parts:
        out = devices.onednn_product_and(left, _dense(right), out)
    return out


@functools.lru_cache(65536)
def width(depth: int) -> int:
    """Number of terms per call for sums of `depth` terms, so that the chains of additions stay short."""
    count = 1
    while (part := -(-depth // count)) > CHAIN and _chain(part) > CHAIN:
        count += 1
    return part


def _chain(depth: int) -> float:
    """Length of the chains in which oneDNN adds up so many terms, averaged over the terms.

    In float32 2**24 + 1 is 2**24: a chain that begins with 2**24 loses the ones that follow.
    """
    with plainly():
        x, w = torch.ones(2, 64, depth, dtype=torch.float32, device="cpu")
        w[:, 0] = 2.0**24
        out = devices.onednn_product(x, w, None)
        longest = depth - int((out - 2.0**24).min())
    rest = depth % longest
    return (depth - rest) / depth * longest + rest / depth * rest


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
    parts = width(x.shape[1]) < x.shape[1]
    left = parts or not x.is_contiguous()
    right = not w.mT.is_contiguous() and (parts or not w.is_contiguous())
    return left * x.numel() + right * w.numel()


def _dense(w: Tensor) -> Tensor:
    return w if w.is_contiguous() or w.mT.is_contiguous() else w.contiguous()
