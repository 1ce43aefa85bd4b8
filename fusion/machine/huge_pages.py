"""Huge pages of Linux behind the memory of large tensors."""

from __future__ import annotations

import ctypes
import functools
import sys

from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
MADV_HUGEPAGE = 14


def in_huge_pages(tensor: Tensor) -> None:
    """Ask the operating system to back a fresh tensor of many MiB by huge pages: the first write to each page of 4 KiB
    takes longer than computing what is written. Where it does not know them, nothing happens."""
    size = tensor.numel() * tensor.element_size()
    if size < 4 * HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + size
    first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_HUGEPAGE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
