"""An attention as a function on MLIR tensors: which kernel it calls, and with what division of the work."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion.errors import MlirExportError
from fusion.ir.results import extents_function
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine
from fusion.planning.cpu_planner import FEW_QUERIES
from fusion.planning.register_tiles import AllHeads, ByRows, target_of, tilings_for

from ..mlir import export
from ..mlir.kernel import emit
from ..mlir.thread_function import KernelText
from . import supports
from .calling import bytes_per_thread
from .launch import batch_of_items, shared_rows, work_items


def attention_function(
    name: str, spec: AttentionSpec, shapes: Sequence[Sequence[int]], sizes: Sequence[int], public: bool = False
) -> export.AttentionFunction:
    """The function of a spec. shapes: of its operands. sizes: values of `spec.sizes`. Raises MlirExportError where
    there is no kernel for it."""
    machine = Machine.detect()
    if (reason := supports(spec, machine)) is not None:
        raise MlirExportError(f"no MLIR for {spec}: {reason}")
    if spec.reproducible:
        raise MlirExportError(
            f"no reproducible MLIR for {spec}: export it without the option, or call it in this process"
        )
    if (stored := next((o for o in spec.operands if o.dtype not in export.TYPES), None)) is not None:
        raise MlirExportError(
            f"no MLIR for {spec}: exported functions take {', '.join(export.TYPES)}, and {stored.name} is "
            f"{stored.dtype}; convert it before the export"
        )
    *batch, n_q, n_k, d, d_v = extents = extents_function(spec)(sizes)
    if min(math.prod(batch), n_q, n_k, d, d_v) < 1:
        raise MlirExportError(f"no MLIR for an attention without elements: {spec}, sizes {list(sizes)}")
    text = _kernel_text(spec, machine, n_q, d, d_v)
    batch = batch_of_items(spec, batch)
    plan = work_items(math.prod(batch) * n_q, shared_rows(text.across_heads, spec, batch, n_q), text.rows, n_k)
    room = bytes_per_thread(text, -(-n_k // text.key_step))
    return export.attention_function(name, spec, shapes, extents, sizes, text, plan, room, public)


def attention_module(spec: AttentionSpec, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> str:
    """A module of one attention: its public function is `attention`. Raises MlirExportError where it returns more than
    its output."""
    if spec.aux_outputs:
        raise MlirExportError("an attention whose weights are used elsewhere returns more than one tensor")
    function = attention_function("attention", spec, shapes, sizes, public=True)
    return f"module {{\n{export.DECLARATIONS}{function.text}}}\n"


def _kernel_text(spec: AttentionSpec, machine: Machine, n_q: int, d: int, d_v: int) -> KernelText:
    """The kernel for these sizes, of the first choice that never asks to be run again in another way."""
    target = target_of(machine)
    if spec.mixing is not None:
        return emit(spec, AllHeads(), target, d, d_v)
    if n_q <= FEW_QUERIES:
        return emit(spec, ByRows(rows_at_once=4), target, d, d_v)
    texts = (emit(spec, tiling, target, d, d_v) for tiling in tilings_for(spec, target))
    return next(text for text in texts if not text.may_flag)
