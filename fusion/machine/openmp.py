"""The OpenMP runtime whose threads kernels run on: the one that torch calls.

Several may be in a process: one that was preloaded, another package's. torch's libraries took the first that was there
when they were loaded, as any library does: what the process has in common, then what they bring themselves. The same
search finds the same function. It is looked up once; kernels ask OpenMP for nothing but threads.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


@functools.cache
def parallel() -> Callable[..., None] | None:
    """`GOMP_parallel(function, argument, threads, flags)`, which every OpenMP runtime for Linux and macOS has; None
    where torch has none."""
    function = next((result for library in _libraries() if (result := getattr(library, "GOMP_parallel", None))), None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
    return function


def _libraries() -> Iterator[ctypes.CDLL]:
    """The process, and torch's library for CPUs with all that it needs, which is loaded already."""
    yield ctypes.CDLL(None)
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.*")):
        yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


class _Place(ctypes.Structure):
    """Symbol information of an address, from `dladdr`."""

    _fields_: Any = [(name, ctypes.c_void_p) for name in ("path", "base", "symbol", "address")]


@functools.cache
def library() -> str | None:
    """The path of the runtime, for what is linked with it; None where there is none."""
    place, tell, function = _Place(), getattr(ctypes.CDLL(None), "dladdr", None), parallel()
    if function is None or tell is None:
        return None
    if not tell(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place)):  # pyright: ignore[reportArgumentType]
        return None
    return os.fsdecode(ctypes.string_at(place.path))
