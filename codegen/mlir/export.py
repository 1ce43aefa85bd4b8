"""An attention as a function on MLIR tensors, for modules that others compile.

    func.func private @name(%q: tensor<2x4x100x16xf32>, ...) -> tensor<2x4x100x16xf32>

The function makes room for the result and the workspace, fills in the parameters of the kernel that runs in process
too, and calls it on the threads of libgomp. Shapes are static, tensors packed row-major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion.ir.results import packed_strides
from fusion.ir.spec import AttentionSpec
from fusion.planning.cpu import PER_THREAD

from .builder import PTR, Builder, Value
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
    name: str, spec: AttentionSpec, shapes: Sequence[Sequence[int]], extents: Sequence[int], sizes: Sequence[int],
    text: KernelText, plan: Mapping[str, int], thread_bytes: int, public: bool = False,
) -> AttentionFunction:  # fmt: skip
    """The function that calls a kernel. extents: batch sizes.., n_q, n_k, d, d_v. plan: the division of the call into
    work items. thread_bytes: of the workspace of a thread."""
    *batch, n_q, n_k, _, d_v = extents
    by_name = {f"b{axis}": extent for axis, extent in enumerate(batch)} | {"i": n_q, "e": d_v}
    out_shape = [by_name[dim] for dim in spec.output.dims]
    operands = tuple(tensor_type(s, o.dtype) for s, o in zip(shapes, spec.operands, strict=True))
    writer = _Writer(name, spec, shapes, dict(zip(spec.sizes, sizes, strict=True)), out_shape, text)
    body = writer.body(plan, n_k, thread_bytes)
    result = tensor_type(out_shape, spec.out_dtype)
    arguments = ", ".join(f"%t{number}: {type_}" for number, type_ in enumerate(operands))
    kernel = text.source.removeprefix(HEADER).removesuffix("}\n")
    kernel = kernel.replace("func.func @attention(", f"func.func private @{name}_kernel(") + _LAUNCH.format(name=name)
    visibility = "" if public else "private "
    function = f"func.func {visibility}@{name}({arguments}) -> {result} {{\n{body}}}\n"
    note = f"// {spec}\n"
    return AttentionFunction(name=name, text=f"{kernel}{note}{function}", operands=operands, result=result)


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

    def body(self, plan: Mapping[str, int], n_k: int, per_thread: int) -> str:
        b, text, steps = self.b, self.text, -(-n_k // self.text.key_step)
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
