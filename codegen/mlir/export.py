"""An attention as a function on MLIR tensors, for modules that others compile.

    func.func private @name(%q: tensor<2x4x100x16xf32>, ...) -> tensor<2x4x100x16xf32>

The function makes room for the result and the workspace, fills in the parameters of the kernel that runs in process
too (`kernel`), and calls it on the threads of libgomp. Shapes are static, tensors packed row-major.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion.errors import MlirExportError
from fusion.ir.results import extents_function, packed_strides
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.cpu import PER_THREAD
from fusion.planning.cpu_planner import FEW_QUERIES
from fusion.planning.register_tiles import AllHeads, ByRows, target_of, tilings_for

from . import supports
from .builder import PTR, Builder, Value
from .calling import bytes_per_thread
from .kernel import emit
from .launch import batch_of_items, shared_rows, work_items
from .skeleton import HEADER
from .thread_function import KernelText

TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int64": "i64", "int32": "i32",
         "int16": "i16", "int8": "i8", "uint8": "i8", "bool": "i1"}  # fmt: skip

DECLARATIONS = HEADER.removeprefix("module {\n") + (
    "llvm.func @omp_get_max_threads() -> i32\nllvm.func @GOMP_parallel(!llvm.ptr, !llvm.ptr, i32, i32)\n"
)
"""Declarations of libgomp's functions and of the C library's mathematics, once per module."""


_LAUNCH = """func.func private @{name}_threads() -> i32 {{
  %threads = llvm.call @omp_get_max_threads() : () -> i32
  return %threads : i32
}}
func.func private @{name}_launch(%params: !llvm.ptr, %threads: i32) {{
  %function = func.constant @{name}_kernel : (!llvm.ptr) -> ()
  %kernel = builtin.unrealized_conversion_cast %function : (!llvm.ptr) -> () to !llvm.ptr
  %flags = arith.constant 0 : i32
  llvm.call @GOMP_parallel(%kernel, %params, %threads, %flags) : (!llvm.ptr, !llvm.ptr, i32, i32) -> ()
  return
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFunction:
    """A function in MLIR that computes one attention. operands, result: tensor types."""

    name: str
    text: str  # it and its kernel, without `DECLARATIONS`
    operands: tuple[str, ...]
    result: str


def tensor_type(shape: Sequence[int], dtype: str) -> str:
    return f"tensor<{''.join(f'{extent}x' for extent in shape)}{TYPES[dtype]}>"


def attention_function(
    name: str, spec: AttentionSpec, shapes: Sequence[Sequence[int]], sizes: Sequence[int], public: bool = False
) -> AttentionFunction:
    """The function of a spec. shapes: of its operands. sizes: values of `spec.sizes`. Raises MlirExportError where
    there is no kernel for it."""
    machine = Machine.detect()
    if (reason := supports(spec, machine)) is not None:
        raise MlirExportError(f"no MLIR for {spec}: {reason}")
    if spec.reproducible:
        raise MlirExportError(
            f"no reproducible MLIR for {spec}: export it without the option, or call it in this process"
        )
    if (stored := next((o for o in spec.operands if o.dtype not in TYPES), None)) is not None:
        raise MlirExportError(
            f"no MLIR for {spec}: exported functions take {', '.join(TYPES)}, and {stored.name} is {stored.dtype}; "
            "convert it before the export"
        )
    *batch, n_q, n_k, d, d_v = extents_function(spec)(sizes)
    if min(math.prod(batch), n_q, n_k, d, d_v) < 1:
        raise MlirExportError(f"no MLIR for an attention without elements: {spec}, sizes {list(sizes)}")
    text = _kernel_text(spec, machine, n_q, d, d_v)
    extents = {f"b{axis}": extent for axis, extent in enumerate(batch)} | {"i": n_q, "e": d_v}
    out_shape = [extents[dim] for dim in spec.output.dims]
    operands = tuple(tensor_type(s, o.dtype) for s, o in zip(shapes, spec.operands, strict=True))
    writer = _Writer(name, spec, shapes, dict(zip(spec.sizes, sizes, strict=True)), out_shape, text)
    body = writer.body(batch_of_items(spec, batch), n_q, n_k)
    result = tensor_type(out_shape, spec.out_dtype)
    arguments = ", ".join(f"%t{number}: {type_}" for number, type_ in enumerate(operands))
    kernel = text.source.removeprefix(HEADER).removesuffix("}\n")
    kernel = kernel.replace("func.func @attention(", f"func.func private @{name}_kernel(") + _LAUNCH.format(name=name)
    visibility = "" if public else "private "
    function = f"func.func {visibility}@{name}({arguments}) -> {result} {{\n{body}}}\n"
    note = f"// {spec}\n"
    return AttentionFunction(name=name, text=f"{kernel}{note}{function}", operands=operands, result=result)


def attention_module(spec: AttentionSpec, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> str:
    """A module of one attention: its public function is `attention`. Raises MlirExportError where it returns more than
    its output."""
    if spec.aux_outputs:
        raise MlirExportError("an attention whose weights are used elsewhere returns more than one tensor")
    function = attention_function("attention", spec, shapes, sizes, public=True)
    return f"module {{\n{DECLARATIONS}{function.text}}}\n"


def _kernel_text(spec: AttentionSpec, machine: Machine, n_q: int, d: int, d_v: int) -> KernelText:
    """The kernel for these sizes, of the first choice that never asks to be run again in another way."""
    target = target_of(machine)
    if spec.mixing is not None:
        return emit(spec, AllHeads(), target, d, d_v)
    if n_q <= FEW_QUERIES:
        return emit(spec, ByRows(rows_at_once=4), target, d, d_v)
    texts = (emit(spec, tiling, target, d, d_v) for tiling in tilings_for(spec, target))
    return next(text for text in texts if not text.may_flag)


@dataclass(frozen=True, slots=True)
class _Writer:
    """The body of the function that calls a kernel."""

    name: str
    spec: AttentionSpec
    shapes: Sequence[Sequence[int]]
    sizes: dict[str, int]
    out_shape: list[int]
    text: KernelText
    b: Builder = field(default_factory=Builder)

    def body(self, batch: Sequence[int], n_q: int, n_k: int) -> str:
        b, text, steps = self.b, self.text, -(-n_k // self.text.key_step)
        plan = work_items(math.prod(batch) * n_q, shared_rows(text.across_heads, self.spec, batch, n_q), text.rows, n_k)
        per_thread = bytes_per_thread(text, steps)
        threads = b.least(
            b.op(f"func.call @{self.name}_threads() : () -> i32", "i32", "most"), plan["items"], "threads"
        )
        wide = b.convert("arith.extsi", threads, "i64")
        room = b.convert("arith.index_cast", b.mul(wide, per_thread), "index", "room")
        workspace = b.op(f"memref.alloc({room}) {{alignment = 64 : i64}} : memref<?xi8>", "memref<?xi8>", "workspace")
        memref = tensor_type(self.out_shape, self.spec.out_dtype).replace("tensor", "memref")
        out = b.op(f"memref.alloc() {{alignment = 64 : i64}} : {memref}", memref, "out")
        # The last two are of keys that are cut into parts.
        memory = dict.fromkeys(("workspace", "partials", "arrivals"), workspace)
        memory |= {"counter": self.filled([0, 0], "counter"), "flag": self.filled([0, 0], "flag"), "out": out}
        numbers: dict[str, Value | int] = {**plan, "threads": wide, "portions": b.mul(wide, PER_THREAD)}
        numbers |= {"workspace_bytes": per_thread, "key_steps": steps, "unit": 1, "window": n_k}
        params = self.address(self.filled([self.slot(slot, memory, numbers) for slot in text.slots], "params"))
        pointer = b.op(f"llvm.inttoptr {params} : i64 to {PTR}", PTR, "block")
        b.line(f"func.call @{self.name}_launch({pointer}, {threads}) : ({PTR}, i32) -> ()")
        result = memref.replace("memref", "tensor")
        b.line(f"%result = bufferization.to_tensor {out} restrict writable : {memref} to {result}")
        b.line(f"return %result : {result}")
        return b.text() + "\n"

    def slot(self, slot: tuple, memory: Mapping[str, Value], numbers: Mapping[str, Value | int]) -> Value | int:
        """A parameter: a number of the call, memory, or what operands, sizes and the result's layout determine."""
        if len(slot) == 1:
            return numbers[slot[0]]
        kind, which = slot[0], slot[1]
        if which in memory:
            return self.address(memory[which])
        if kind == "ptr":
            type_ = tensor_type(self.shapes[which], self.spec.operands[which].dtype)
            memref = type_.replace("tensor", "memref")
            buffer = f"bufferization.to_buffer %t{which} read_only : {type_} to {memref}"
            return self.address(self.b.op(buffer, memref, "buffer"))
        if kind == "stride":
            return packed_strides(self.shapes[which])[slot[2]]
        if kind == "size":
            return self.sizes[which]
        return packed_strides(self.out_shape)[self.spec.output.dims.index(which)]

    def filled(self, values: Sequence[Value | int], hint: str) -> Value:
        """New memory with these numbers."""
        memref = f"memref<{len(values)}xi64>"
        place = self.b.op(f"memref.alloca() : {memref}", memref, hint)
        for n, value in enumerate(values):
            index, number = self.b.constant(n, "index"), self.b.as_value(value, "i64")
            self.b.line(f"memref.store {number}, {place}[{index}] : {memref}")
        return place

    def address(self, place: Value) -> Value:
        index = self.b.op(f"memref.extract_aligned_pointer_as_index {place} : {place.type} -> index", "index")
        return self.b.convert("arith.index_cast", index, "i64", "address")
