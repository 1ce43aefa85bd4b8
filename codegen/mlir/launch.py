"""Calling a kernel: parameters, workspace, output, and a parallel region on torch's own OpenMP threads."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fusion.codegen import reference
from fusion.codegen.mlir.compile import MachineCode, compile_text, openmp_library
from fusion.codegen.mlir.kernel import emit
from fusion.codegen.mlir.row_kernel import emit_rows
from fusion.codegen.mlir.scope import SIZE_LIMIT
from fusion.codegen.mlir.skeleton import KernelText
from fusion.codegen.mlir.skipping import emit_selective
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.tile import Tiling
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
        self.flag_address = ctypes.addressof(self.flag)
        self.counter = ctypes.c_int64(0)
        self.counter_address = ctypes.addressof(self.counter)

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes, on a cache line."""
        if self.workspace.numel() < size + 64:
            self.workspace = torch.empty(size + size // 4 + 64, dtype=torch.uint8)
        return -(-self.workspace.data_ptr() // 64) * 64


_memory = _ThreadMemory()


def _python(expr: Expr, names: Sequence[str]) -> str:
    """A size expression as Python text over the sequence `s` of run-time sizes."""
    if expr.op == "const":
        return str(int(expr.attr))  # type: ignore[arg-type]
    if expr.op == "size":
        return f"s[{names.index(str(expr.attr))}]"
    args = [_python(arg, names) for arg in expr.args]
    if expr.op in ("imin", "imax"):
        return f"{expr.op[1:]}({', '.join(args)})"
    return f"({OPERATORS[expr.op].join(args)})"


OPERATORS = {"add": " + ", "mul": " * ", "floordiv": " // ", "mod": " % "}


def extents_function(spec: AttentionSpec) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Run-time sizes -> (batch sizes.., n_q, n_k, d, d_v), written out once per spec: a call has microseconds."""
    texts = [_python(expr, spec.sizes) for expr in (*spec.batch, spec.n_q, spec.n_k, spec.d, spec.d_v)]
    return eval(f"lambda s: ({', '.join(texts)})")  # the text holds integers and indices only


def slots_function(text: KernelText, spec: AttentionSpec) -> Callable[..., tuple[int, ...]]:
    """(operands, sizes, output, workspace, bytes per thread, key steps, items, blocks, flag, chunks, counter,
    selection) -> parameter slots."""
    computed = {
        ("ptr", "workspace"): "workspace",
        ("ptr", "flag"): "flag",
        ("ptr", "counter"): "counter",
        ("ptr", "out"): "out.data_ptr()",
        ("workspace_bytes",): "per_thread",
        ("key_steps",): "steps",
        ("items",): "items",
        ("blocks",): "blocks",
        ("chunks",): "chunks",
        ("ptr", "marks"): "selection[0]",
        ("ptr", "skipped"): "selection[1]",
        ("share",): "selection[2]",
    }

    def term(slot: tuple) -> str:
        if slot in computed:
            return computed[slot]
        kind, which = slot[0], slot[1]
        if kind == "ptr":
            return f"o[{which}].data_ptr()"
        if kind == "stride":
            return f"t{which}[{slot[2]}]"
        if kind == "size":
            return f"s[{spec.sizes.index(which)}]"
        return f"u[{spec.output.dims.index(which)}]"  # a stride of the output

    strided = sorted({slot[1] for slot in text.slots if slot[0] == "stride"})
    lines = [f"    t{number} = o[{number}].stride()" for number in strided]
    body = "\n".join([*lines, "    u = out.stride()", f"    return ({', '.join(map(term, text.slots))},)"])
    namespace: dict[str, Callable[..., tuple[int, ...]]] = {}
    exec(
        f"def slots(o, s, out, workspace, per_thread, steps, items, blocks, flag, chunks, counter, selection):\n{body}",
        namespace,
    )
    return namespace["slots"]


class Variant:
    """One compiled kernel: for given d and d_v, and one strategy of products, or (no tiling) for few queries.
    selective: only tiles that are marked are computed."""

    def __init__(
        self, spec: AttentionSpec, tiling: Tiling | None, target: Target, d: int, d_v: int, selective: bool = False
    ):
        self.text: KernelText = (
            emit_rows(spec, target, d, d_v)
            if tiling is None
            else (emit_selective if selective else emit)(spec, tiling, target, d, d_v)
        )
        self.code: MachineCode = compile_text(self.text.source, "attention")
        self.tiling = tiling
        self.slots = slots_function(self.text, spec)
        self.layout = struct.Struct(f"{len(self.text.slots)}q")
        self.run_alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.code.address)

    def __call__(
        self,
        operands: Sequence[torch.Tensor],
        sizes: Sequence[int],
        out: torch.Tensor,
        shape: Shape,
        selection: tuple[int, ...] = (),
    ) -> None:
        """Write the attention to `out`. selection: what a selective kernel is given (see `skipping`)."""
        text, memory = self.text, _memory
        blocks = -(-shape.n_q // text.rows)
        items = shape.count * blocks
        steps = -(-shape.n_k // text.key_step)
        work = items * min(text.rows, shape.n_q + 15) * steps * text.key_step * shape.width
        threads = min(torch.get_num_threads(), items, work // WORK_PER_THREAD[self.tiling is not None] + 1)
        per_thread = -(-(text.fixed_bytes + steps * text.step_bytes) // 4096) * 4096 + 128
        workspace = memory.reserve(threads * per_thread)
        chunks = chunks_of(shape.count, blocks, threads)
        memory.counter.value = 0
        values = self.slots(
            operands,
            sizes,
            out,
            workspace,
            per_thread,
            steps,
            items,
            blocks,
            memory.flag_address,
            chunks,
            memory.counter_address,
            selection,
        )
        self.layout.pack_into(memory.params, 0, *values)
        if threads == 1:
            self.run_alone(memory.packed)
        else:
            _parallel()(self.code.address, memory.packed, threads, 0)


class Shape(NamedTuple):
    """Sizes of one call: number of batch elements, n_q, n_k, and d + d_v."""

    count: int
    n_q: int
    n_k: int
    width: int


#: Padded multiply-adds that are worth waking a thread for (some 20 microseconds), in tiles and row by row
WORK_PER_THREAD = {True: 1 << 20, False: 1 << 18}
CHUNKS_PER_THREAD = 4
FEW_BLOCKS = 4  # work items that share packed keys and values: with so few of them, packing twice is felt
FEW_QUERIES = 8
ROWS = -1  # the number of the variant for few queries, among the tilings


@functools.lru_cache(maxsize=256)
def chunks_of(count: int, blocks: int, threads: int) -> int:
    """In how many chunks threads take the `blocks` items of each of `count` heads: a few per thread, so that blocks of
    unequal work even out; whole heads where a head has few blocks."""
    if threads == 1:
        return 1
    most = CHUNKS_PER_THREAD * threads
    if blocks <= FEW_BLOCKS:
        whole = [chunks for chunks in range(threads, most + 1) if count % chunks == 0]
        if whole:
            return whole[-1]
    return min(count * blocks, most)


class Kernel:
    """A spec's kernel: call it with the operand tensors and the values of `spec.sizes`; returns the output tensor.

    Another length compiles nothing. Another d or d_v (where the spec has them as run-time sizes) compiles another
    variant at its first call, and so do inputs too large for the split into bfloat16 planes, which are computed again
    with multiply-adds.
    """

    def __init__(self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target):
        self.spec, self.tilings, self.target = spec, tuple(tilings), target
        self._extents = extents_function(spec)
        self._variants: dict[tuple[int, int, int], Variant] = {}
        self._lock = threading.Lock()
        names = [*(f"b{axis}" for axis in range(len(spec.batch))), "i", "e"]
        self._dims = [names.index(name) for name in spec.output.dims]
        self._packed = spec.output.dims == spec.output.order
        self._slowest_last = [spec.output.dims.index(name) for name in reversed(spec.output.order)]
        self._out_dtype: torch.dtype = getattr(torch, spec.out_dtype)
        if spec.d.op == "const" and spec.d_v.op == "const":
            self.variant(int(spec.d.attr), int(spec.d_v.attr))  # type: ignore[arg-type]

    @property
    def tile(self) -> tuple[int, int]:
        """(B_r, B_c) of the first choice: query rows of a work item, keys of a block."""
        return self.tilings[0].groups * self.target.lanes, self.tilings[0].keys

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
                    tiling = None if choice == ROWS else self.tilings[choice]
                    found = self._variants[key] = Variant(self.spec, tiling, self.target, d, d_v)
        return found

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        *batch, n_q, n_k, d, d_v = self._extents(sizes)
        count = math.prod(batch)
        out = self._output([*batch, n_q, d_v])
        if not (count and n_q and d_v):
            return out
        if n_k == 0 or d == 0:  # no keys, or vectors without elements: nothing worth a kernel
            return reference.run(self.spec, operands, sizes)
        if max(n_q, n_k, *sizes) >= SIZE_LIMIT:
            raise UnsupportedSizeError(
                f"a size of {max(n_q, n_k, *sizes)} was met; CPU kernels take sizes below {SIZE_LIMIT}"
            )
        shape = Shape(count, n_q, n_k, d + d_v)
        choice = ROWS if n_q <= FEW_QUERIES else 0
        variant = self._variants.get((d, d_v, choice)) or self.variant(d, d_v, choice)
        variant(operands, sizes, out, shape)
        if variant.text.may_flag and _memory.flag.value:
            _memory.flag.value = 0
            self.variant(d, d_v, 1)(operands, sizes, out, shape)
        return out

    def _output(self, extents: list[int]) -> torch.Tensor:
        """An uninitialised result in the layout of the spec; extents of the batch coordinates, i and e."""
        shape = [extents[axis] for axis in self._dims]
        if self._packed:
            return torch.empty(shape, dtype=self._out_dtype)
        strides, step = [0] * len(shape), 1
        for position in self._slowest_last:
            strides[position] = step
            step *= max(shape[position], 1)
        return torch.empty_strided(shape, strides, dtype=self._out_dtype)
