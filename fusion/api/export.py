"""`fusion.export_mlir`: a model as one MLIR module, its attentions as functions in it.

torch-mlir brings the exported program into MLIR (linalg on tensors); every call of `fusion::attention` becomes a call
of a function on tensors whose kernel is the one that runs in process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from fusion.api.rewrite import rewrite
from fusion.codegen.cpu.export import attention_function
from fusion.codegen.mlir.export import DECLARATIONS, AttentionFunction
from fusion.errors import MlirExportError
from fusion.ir import AttentionSpec
from fusion.passes.assumptions import plain_kernels
from fusion.torch_private.tensors import tree_flatten, tree_unflatten

_TO_TORCH = "torchdynamo-export-to-torch-backend-pipeline"
_TO_LINALG = "torch-backend-to-linalg-on-tensors-backend-pipeline"
# Its last pass allows no call of a function. What torch-mlir cannot lower has been refused by the passes before it.
_CONTRACT = ",torch-verify-linalg-on-tensors-backend-contract"


@dataclass(frozen=True, kw_only=True)
class MlirProgram:
    """A model in MLIR.

    module: a `torch_mlir.ir.Module` whose function `main` takes and returns packed tensors.

    attentions: names of the functions that compute attention.
    results: shape and dtype of what `main` returns.
    """

    module: Any = field(repr=False)
    attentions: tuple[str, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def __str__(self) -> str:
        return str(self.module)

    def write(self, path: str | Path) -> Path:
        """Write it as text, or as bytecode where the name ends in .mlirbc; returns the path."""
        target = Path(path)
        if target.suffix == ".mlirbc":
            with target.open("wb") as file:
                self.module.operation.write_bytecode(file)
        else:
            target.write_text(str(self), encoding="utf-8")
        return target


def export_mlir(model: Callable[..., Any], *args: Any, **kwargs: Any) -> MlirProgram:
    """`model(*args, **kwargs)` for inputs of these shapes, without gradients, as an MLIR module.

    Parameters are constants in it. It needs libgomp and the C library's mathematics when it runs, and a processor with
    the instructions of this one. Raises MlirExportError where torch.export, torch-mlir or a kernel refuses.
    """
    bound = _Bound(model, args, kwargs)
    try:
        with torch.no_grad():
            program = torch.export.export(bound, tuple(bound.tensors))
    except Exception as problem:
        raise MlirExportError(f"torch.export refuses the model: {type(problem).__name__}: {problem}") from problem
    with torch.no_grad(), plain_kernels():
        fused = rewrite(program).run_decompositions({})
    signature = fused.graph_signature
    if changed := [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]:
        names = ", ".join(name.removeprefix("model.") for name in changed)
        raise MlirExportError(f"the model changes tensors in place that outlive a call ({names}); freeze them first")
    return _import(fused)


class _Bound(torch.nn.Module):
    """A call with everything but its tensors filled in, so that only tensors are arguments."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.model = model
        self.leaves, self.structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.model(*args, **kwargs)


def _import(program: ExportedProgram) -> MlirProgram:
    from torch_mlir import fx, ir
    from torch_mlir.compiler_utils import OutputType
    from torch_mlir.passmanager import PassManager

    try:
        module: Any = fx.export_and_import(program, output_type=OutputType.RAW)
        with module.context, ir.Location.unknown():
            # Running any pass of the bridge loads its dialect (torch_c), which has no binding of its own.
            PassManager.parse("builtin.module(torch-func-backend-type-conversion)").run(ir.Module.create().operation)
            functions = _replace_calls(module, ir)
            for pipeline in (_TO_TORCH, _TO_LINALG):
                text = str(PassManager.parse(f"builtin.module({pipeline})")).replace(_CONTRACT, "")
                PassManager.parse(text).run(module.operation)
            _define(module, functions, ir)
            module.operation.verify()
    except MlirExportError:
        raise
    except Exception as problem:
        raise MlirExportError(f"torch-mlir refuses the program: {type(problem).__name__}: {problem}") from problem
    outputs: Any = program.graph.output_node().args[0]
    values = [node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node)]
    results = tuple((tuple(map(int, value.shape)), value.dtype) for value in values)
    return MlirProgram(module=module, attentions=tuple(f.name for f in functions), results=results)


def _replace_calls(module: Any, ir: Any) -> list[AttentionFunction]:
    """Every operator call becomes a call of a function on builtin tensors, declared here and defined later."""
    calls: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == "torch.operator" and "torch.fusion.attention" in str(op.attributes["name"]):
            calls.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    functions: dict[tuple, AttentionFunction] = {}
    for op in calls:
        tensors, sizes, text, _ = op.operands
        operands = list(tensors.owner.operands)
        shapes = tuple(_shape(operand) for operand in operands)
        extents = tuple(_integer(size) for size in sizes.owner.operands)
        spec = AttentionSpec.from_json(ir.StringAttr(text.owner.attributes["value"]).value)
        key = (spec, shapes, extents)
        if key not in functions:
            function = functions[key] = attention_function(f"fusion_attention_{len(functions)}", spec, shapes, extents)
            declared = f"func.func private @{function.name}({', '.join(function.operands)}) -> {function.result}"
            module.body.append(ir.Module.parse(declared).body.operations[0].operation.clone())
        _replace(op, operands, functions[key], ir)
    return list(functions.values())


def _replace(op: Any, operands: Sequence[Any], function: AttentionFunction, ir: Any) -> None:
    at = ir.InsertionPoint(op)

    def create(name: str, result: Any, values: Sequence[Any], **attributes: Any) -> Any:
        outputs = ir.Operation.create(name, results=[result], operands=list(values), attributes=attributes, ip=at)
        return outputs.result

    given = [
        create("torch_c.to_builtin_tensor", ir.Type.parse(type_), [operand])
        for operand, type_ in zip(operands, function.operands, strict=True)
    ]
    callee = ir.FlatSymbolRefAttr.get(function.name)
    called = create("func.call", ir.Type.parse(function.result), given, callee=callee)
    result = op.results[0]
    result.replace_all_uses_with(create("torch_c.from_builtin_tensor", result.type, [called]))
    op.erase()


def _define(module: Any, functions: Sequence[AttentionFunction], ir: Any) -> None:
    """Put the functions and their kernels in the place of the declarations."""
    names = {function.name for function in functions}
    for op in list(module.body.operations):
        if op.operation.name == "func.func" and str(op.attributes["sym_name"]).strip('"') in names:
            op.operation.erase()
    if functions:
        defined = ir.Module.parse(DECLARATIONS + "".join(function.text for function in functions))
        present = {str(op.attributes["sym_name"]) for op in module.body.operations if "sym_name" in op.attributes}
        for op in list(defined.body.operations):
            if str(op.attributes["sym_name"]) not in present:
                module.body.append(op.operation.clone())


def _shape(value: Any) -> tuple[int, ...]:
    """The static shape of a torch tensor type."""
    result = re.search(r"\[([\d,]*)\]", str(value.type))
    if result is None:
        raise MlirExportError(f"an operand of an attention has the type {value.type}; export with static shapes")
    return tuple(int(extent) for extent in result[1].split(",") if extent)


def _integer(value: Any) -> int:
    owner = value.owner
    if owner.name != "torch.constant.int":
        raise MlirExportError(f"a size of an attention is computed ({owner.name}); export with static shapes")
    return int(str(owner.attributes["value"]).split(":")[0])
