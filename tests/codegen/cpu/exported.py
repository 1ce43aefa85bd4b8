"""MLIR modules as Python callables: what tests of exported modules run, slowly, since torch-mlir's linear layers become
plain loops."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from typing import Any

import torch

from fusion.api.export import MlirProgram
from fusion.codegen.cpu.machine_code import PIPELINE
from fusion.machine import openmp
from fusion.torch_private.tensors import tree_leaves

# torch-mlir's own operations (scans, sorts) know nothing of the analysis that would save copies.
_LOWERING = (
    "builtin.module(func.func(tm-tensor-bufferize),one-shot-bufferize{copy-before-write bufferize-function-boundaries "
    "function-boundary-type-conversion=identity-layout-map},buffer-results-to-out-params{modify-public-functions=true},"
    "buffer-deallocation-pipeline,convert-bufferization-to-memref,func.func(tm-tensor-to-loops),convert-linalg-to-loops,"
    "lower-affine,expand-strided-metadata,memref-expand,arith-expand,lower-affine,canonicalize,cse,convert-scf-to-cf,"
    "func.func(math-expand-ops),convert-math-to-llvm,convert-math-to-libm,convert-vector-to-llvm,"
    "finalize-memref-to-llvm,convert-func-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,"
    "convert-ub-to-llvm,reconcile-unrealized-casts)"
)


class Compiled:
    """A module's function as a Python callable. results: (shape, dtype) of what it returns. The module itself is not
    changed."""

    def __init__(self, module: Any, entry: str, results: Sequence[tuple[Sequence[int], torch.dtype]]):
        from torch_mlir import ir
        from torch_mlir.dialects import torch as _  # noqa: F401  registers torch-mlir's own passes
        from torch_mlir.execution_engine import ExecutionEngine
        from torch_mlir.passmanager import PassManager

        self.results = [(tuple(shape), dtype) for shape, dtype in results]
        with module.context, ir.Location.unknown():
            copy = io.BytesIO()
            module.operation.write_bytecode(copy)
            lowered = ir.Module.parse(copy.getvalue())
            for function in _functions(lowered.operation):
                if _symbol(function) == entry:
                    function.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
            aside = _split(lowered)
            PassManager.parse(_LOWERING).run(lowered.operation)
            PassManager.parse(PIPELINE).run(aside.operation)
            _merge(lowered, aside)
            self._engine = ExecutionEngine(lowered, opt_level=0, shared_libs=[openmp.library() or ""])
            self._address = self._engine.raw_lookup(f"_mlir_ciface_{entry}")

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run it on packed copies of the inputs."""
        packed = [tensor.detach().contiguous() for tensor in inputs]
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in self.results]
        descriptors = [_descriptor(tensor) for tensor in (*packed, *results)]
        # The engine's entry points take an array of pointers to arguments, which are pointers to descriptors here.
        arguments = (ctypes.c_void_p * len(descriptors))(*map(ctypes.addressof, descriptors))
        slots = [ctypes.addressof(arguments) + k * ctypes.sizeof(ctypes.c_void_p) for k in range(len(descriptors))]
        packed_arguments = (ctypes.c_void_p * len(slots))(*slots)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)(ctypes.addressof(packed_arguments))
        return tuple(results)


def _functions(module: Any) -> list[Any]:
    return [op for op in module.regions[0].blocks[0].operations if op.operation.name == "func.func"]


def _symbol(function: Any) -> str:
    return str(function.attributes["sym_name"]).strip('"')


def _split(module: Any) -> Any:
    """Move everything that sees no tensor to a module of its own, and leave declarations of its functions. Passes that
    place deallocations want to know the effects of every operation, and kernels work on bare pointers; and the rest may
    call a function of the C library by another kind of declaration than they do."""
    from torch_mlir import ir

    body, aside = module.body, ir.Module.create()
    for op in list(body.operations):
        kind = op.operation.name
        type_ = str(op.attributes["function_type"].value) if kind == "func.func" else ""
        if kind == "llvm.func" or (type_ and "tensor<" not in type_):
            aside.body.append(op.operation.clone())
            if type_:
                arguments, _, results = type_.partition(" -> ")
                declared = ir.Module.parse(f"func.func private @{_symbol(op)}{arguments} -> {results}")
                body.append(declared.body.operations[0].operation.clone())
            op.operation.erase()
    return aside


def _merge(module: Any, aside: Any) -> None:
    """Bring what was moved aside back; definitions replace declarations."""
    present = {_symbol(op): op for op in module.body.operations if "sym_name" in op.attributes}
    for op in list(aside.body.operations):
        known = present.get(_symbol(op))
        if known is None or op.regions[0].blocks:
            if known is not None:
                known.operation.erase()
            module.body.append(op.operation.clone())


def _descriptor(tensor: torch.Tensor) -> ctypes.Array:
    """Descriptor of a memref in MLIR's C interface: two pointers, an offset, sizes and strides."""
    fields = [tensor.data_ptr(), tensor.data_ptr(), 0, *tensor.shape, *tensor.stride()]
    return (ctypes.c_int64 * len(fields))(*fields)


def run(program: MlirProgram, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Results of the exported model, as a flat tuple."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return Compiled(program.module, "main", program.results)(*tensors)
