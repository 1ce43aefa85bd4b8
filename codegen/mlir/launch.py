"""Calling a kernel: parameters, workspace, output, and a parallel region on torch's own OpenMP threads."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence

import torch

from fusion.codegen.mlir.compile import MachineCode, compile_text, openmp_library
from fusion.codegen.mlir.kernel import KernelText, Tiling, emit
from fusion.codegen.mlir.scope import SIZE_LIMIT
from fusion.codegen.mlir.target import Target
from fusion.errors import FusionError
from fusion.ir import Expr
from fusion.ir.spec import AttentionSpec


class UnsupportedSizeError(FusionError, ValueError):
    """A size at run time is beyond what the kernels' 32-bit lane arithmetic holds."""


@functools.cache
def _parallel() -> Callable[..., None]:
    function = ctypes.CDLL(openmp_library()).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


class _ThreadMemory(threading.local):
    """Workspace and parameter block of one calling thread; kept between calls, grown when needed."""

    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)
        self.params = ctypes.create_string_buffer(8 * 256)
        # The engine's entry points take an array of pointers to arguments; the one argument is the address of the
        # slots.
        self._argument = ctypes.c_void_p(ctypes.addressof(self.params))
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._argument))
        self.packed = ctypes.addressof(self._arguments)
        self.flag = ctypes.c_int64(0)

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes, on a cache line."""
        if self.workspace.numel() < size + 64:
            self.workspace = torch.empty(size + size // 4 + 64, dtype=torch.uint8)
        return -(-self.workspace.data_ptr() // 64) * 64


_memory = _ThreadMemory()


def integer_function(expr: Expr, names: Sequence[str]) -> Callable[[Sequence[int]], int]:
    """A size expression as a Python function of the run-time sizes, compiled once."""
    return eval(f"lambda s: {_python(expr, list(names))}")


def _python(expr: Expr, names: list[str]) -> str:
    if expr.op == "const":
        return str(int(expr.attr))  # type: ignore[arg-type]
    if expr.op == "size":
        return f"s[{names.index(str(expr.attr))}]"
    args = [_python(arg, names) for arg in expr.args]
    if expr.op in ("imin", "imax"):
        return f"{expr.op[1:]}({', '.join(args)})"
    sign = {"add": " + ", "mul": " * ", "floordiv": " // ", "mod": " % "}[expr.op]
    return f"({sign.join(args)})"


class Variant:
    """One compiled kernel: for given d and d_v, and one strategy of products."""

    def __init__(self, spec: AttentionSpec, tiling: Tiling, target: Target, d: int, d_v: int):
        self.text: KernelText = emit(spec, tiling, target, d, d_v)
        self.code: MachineCode = compile_text(self.text.source, "attention")
        self.tiling = tiling


class Kernel:
    """A spec's kernel: call it with the operand tensors and the values of `spec.sizes`; returns the output tensor.

    Another length compiles nothing. Another d or d_v (where the spec has them as run-time sizes) compiles another
    variant at its first call, and so do inputs too large for the split into bfloat16 planes, which are computed again
    with multiply-adds.
    """

    def __init__(self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target):
        self.spec, self.tilings, self.target = spec, tuple(tilings), target
        sizes = spec.sizes
        self._extents = integer_functions((*spec.batch, spec.n_q, spec.n_k, spec.d, spec.d_v), sizes)
        self._variants: dict[tuple[int, int, int], Variant] = {}
        self._lock = threading.Lock()
        names = [*(f"b{axis}" for axis in range(len(spec.batch))), "i", "e"]
        self._order = [names.index(name) for name in spec.output.order]
        self._dims = [spec.output.order.index(name) for name in spec.output.dims]
        self._out_dims = {name: position for position, name in enumerate(spec.output.dims)}
        self._out_dtype: torch.dtype = getattr(torch, spec.out_dtype)
        self._packers: dict[int, tuple[struct.Struct, Callable[..., tuple[int, ...]]]] = {}
        if spec.d.op == "const" and spec.d_v.op == "const":
            self.variant(int(spec.d.attr), int(spec.d_v.attr))  # type: ignore[arg-type]

    @property
    def source(self) -> str:
        """The MLIR text of the first variant; empty before the first call where d is known only then."""
        return next((variant.text.source for variant in self._variants.values()), "")

    def variant(self, d: int, d_v: int, choice: int = 0) -> Variant:
        """The variant for these sizes, compiled at first use."""
        key = (d, d_v, choice)
        if (found := self._variants.get(key)) is None:
            with self._lock:
                if (found := self._variants.get(key)) is None:
                    found = self._variants[key] = Variant(self.spec, self.tilings[choice], self.target, d, d_v)
        return found

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        extents = [f(sizes) for f in self._extents]
        *batch, n_q, n_k, d, d_v = extents
        extent_of = [*batch, n_q, d_v]
        out = torch.empty([extent_of[axis] for axis in self._order], dtype=self._out_dtype).permute(self._dims)
        if out.numel() == 0:
            return out
        if n_k == 0 or d == 0:
            return self._degenerate(operands, sizes)
        if max(n_q, n_k, *sizes) >= SIZE_LIMIT:
            raise UnsupportedSizeError(
                f"a size of {max(n_q, n_k, *sizes)} was met; CPU kernels take sizes below {SIZE_LIMIT}"
            )
        count = 1
        for extent in batch:
            count *= extent
        self._run(self.variant(d, d_v), operands, sizes, out, count, n_q, n_k)
        if self.variant(d, d_v).text.may_flag and _memory.flag.value:
            _memory.flag.value = 0
            self._run(self.variant(d, d_v, 1), operands, sizes, out, count, n_q, n_k)
        return out

    def _degenerate(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """No keys, or vectors without elements: nothing worth a kernel."""
        from fusion.codegen.reference import run

        return run(self.spec, operands, sizes)

    def _run(
        self,
        variant: Variant,
        operands: Sequence[torch.Tensor],
        sizes: Sequence[int],
        out: torch.Tensor,
        count: int,
        n_q: int,
        n_k: int,
    ) -> None:
        text = variant.text
        blocks = -(-n_q // text.rows)
        items = count * blocks
        threads = min(torch.get_num_threads(), items)
        steps = -(-n_k // text.key_step)
        per_thread = -(-(text.fixed_bytes + steps * text.step_bytes) // 4096) * 4096 + 128
        memory = _memory
        values = self._slot_values(text, operands, sizes, out)
        values |= {
            ("ptr", "workspace"): memory.reserve(threads * per_thread), ("workspace_bytes",): per_thread,
            ("key_steps",): steps, ("items",): items, ("blocks",): blocks, ("ptr", "flag"):
            ctypes.addressof(memory.flag),
        }  # fmt: skip
        struct.pack_into(f"{len(text.slots)}q", memory.params, 0, *(values[key] for key in text.slots))
        _parallel()(variant.code.address, memory.packed, threads, 0)

    def _slot_values(
        self, text: KernelText, operands: Sequence[torch.Tensor], sizes: Sequence[int], out: torch.Tensor
    ) -> dict[tuple, int]:
        values: dict[tuple, int] = {("ptr", "out"): out.data_ptr()}
        for number, operand in enumerate(operands):
            values[("ptr", number)] = operand.data_ptr()
            for dim, stride in enumerate(operand.stride()):
                values[("stride", number, dim)] = stride
        for name, value in zip(self.spec.sizes, sizes, strict=True):
            values[("size", name)] = value
        for name, position in self._out_dims.items():
            values[("out_stride", name)] = out.stride(position)
        return values


def integer_functions(exprs: Sequence[Expr], names: Sequence[str]) -> list[Callable[[Sequence[int]], int]]:
    return [integer_function(expr, names) for expr in exprs]
