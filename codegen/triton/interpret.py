"""Generated modules in Triton's interpreter, on CPU tensors, without setting TRITON_INTERPRET for the whole process.

Triton decides when a function is decorated whether it will be interpreted. Modules are therefore loaded with the switch
on, and while a kernel runs, the reductions of Triton's own library (compiled functions in such a process) are replaced
by interpreted ones.

Other corrections: bounds of loops are read from arrays of shape [1], which numpy 2.4 no longer allows. The interpreter
multiplies the bits of bfloat16 as if they were integers, and truncates where devices round to the nearest. It leaves
products to BLAS, whose order of additions depends on the tile's shape, so that scores of a forward and of a backward
kernel would differ; a corrected product is rounded once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

_REDUCTIONS = ("max", "min", "sum", "cumsum")
_of_scalar = functools.lru_cache(maxsize=64)(interpreter._get_np_dtype)
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@contextlib.contextmanager
def decorating() -> Iterator[None]:
    """Context in which decorated functions will be interpreted."""
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        yield


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Context in which interpreted kernels can be called."""
    with (
        _language_restored(),
        _exact(),
        _plain_integers(),
        _replaced_once(),
        _without_discarded_checks(),
        _dtypes_once(),
    ):
        for name in _REDUCTIONS:
            function = getattr(tl, name)
            if isinstance(function, JITFunction):
                setattr(tl, name, InterpretedFunction(function.fn))
        yield


@contextlib.contextmanager
def _language_restored() -> Iterator[None]:
    """Context that restores Triton's language at its end. The interpreter does so itself for the kernel, but not for
    the device functions that a kernel calls, and then nothing compiles any more in this process."""
    modules = (tl, tl.core, tl.math, tl.standard)
    places = (*modules, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    before = [dict(vars(place)) for place in places]
    try:
        yield
    finally:
        for place, members in zip(places, before, strict=True):
            now = dict(vars(place))
            if place not in modules:  # what is new in a module is read by functions that were rewritten there
                for name in now.keys() - members.keys():
                    delattr(place, name)
            for name, member in members.items():
                if now.get(name) is not member:
                    setattr(place, name, member)


def _replaced_once() -> AbstractContextManager:
    """Context in which Triton's language is replaced for the functions of a module when one of them is called first.
    The interpreter does so whenever a function calls another, which takes longer than most functions."""
    call, seen = InterpretedFunction.__call__, dict[int, dict]()

    def called(self, *args, **kwargs):
        module = self.fn.__globals__
        if id(module) in seen:
            return self.rewrite()(*args, **kwargs)
        seen[id(module)] = module
        return call(self, *args, **kwargs)

    return mock.patch.object(InterpretedFunction, "__call__", called)


def _without_discarded_checks() -> AbstractContextManager:
    """Context in which sums and products of integers are not computed a second time, in 64 bits, for assertions that
    the interpreter leaves out: they took a sixth of its time."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    return mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False))


def _dtypes_once() -> AbstractContextManager:
    """Context in which the table of numpy's dtypes is not made for every operation."""
    return mock.patch.object(interpreter, "_get_np_dtype", _dtype_of)


def _dtype_of(type_: tl.dtype) -> np.dtype:
    return np.dtype(np.uint64) if type_.scalar.is_ptr() else _of_scalar(type_.scalar)


def _plain_integers() -> AbstractContextManager:
    """Context in which an interpreted scalar becomes a Python integer whether it is stored in an array of shape [] or
    [1]."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, *rest):
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    return mock.patch.object(interpreter, "_patch_lang_tensor", patched)


def _exact() -> AbstractContextManager:
    """Context in which products are rounded once, and not before an addition to them; numbers are rounded to the
    nearest bfloat16; float8 is widened to float16 as in torch (the interpreter takes infinities and NaN for
    numbers)."""
    builder = InterpreterBuilder
    dot, truncate, convert = builder.create_dot, builder.create_fp_trunc, builder.create_fp_to_fp

    def create_fma(self, x, y, z):
        exact = x.data.astype("float64") * y.data + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    def create_dot(self, a, b, d, *rest):
        if not {a.dtype.scalar, b.dtype.scalar} <= {tl.float32, tl.float16, tl.bfloat16}:
            return dot(self, a, b, d, *rest)
        exact = dot(self, *map(_widened, (a, b, d)), *rest)
        return TensorHandle(exact.data.astype(d.data.dtype), d.dtype.scalar)

    def create_fp_trunc(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return truncate(self, source, target)

    def create_fp_to_fp(self, source, target, rounding):
        stored = _FLOAT8.get(source.dtype.scalar)
        if stored is None or target.scalar != tl.float16:
            return convert(self, source, target, rounding)
        bits = torch.from_numpy(source.data.view("uint8"))
        return TensorHandle(bits.view(stored).to(torch.float16).numpy(), tl.float16)

    return mock.patch.multiple(
        builder, create_fma=create_fma, create_dot=create_dot, create_fp_trunc=create_fp_trunc,
        create_fp_to_fp=create_fp_to_fp,
    )  # fmt: skip


def _widened(handle: TensorHandle) -> TensorHandle:
    values = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return TensorHandle(values.astype(np.float64), tl.float64)
