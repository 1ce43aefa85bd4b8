"""Training on CPUs: the forward kernel that also writes the rows' statistics, and the calls of the backward kernels.

One file over the usual length: a call fills in the parameters of the kernels that the class before it builds.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusion.codegen import reference
from fusion.codegen.mlir import launch
from fusion.codegen.mlir.backward import emit_backward
from fusion.codegen.mlir.backward_plan import (
    BackwardPlan,
    Form,
    Role,
    backward_plan,
    column_dimension,
    normalized,
    unsupported,
)
from fusion.codegen.mlir.builder import PTR, Value
from fusion.codegen.mlir.compile import MachineCode, compile_text
from fusion.codegen.mlir.kernel import AttentionKernel
from fusion.codegen.mlir.scope import MEMORY_TYPE, SIZE_LIMIT, Scope
from fusion.codegen.mlir.skeleton import KernelText
from fusion.codegen.mlir.softmax import GroupSoftmax
from fusion.codegen.mlir.target import Target
from fusion.codegen.mlir.tile import Tiling
from fusion.codegen.reference import gradients as pulled
from fusion.errors import LargeTableError
from fusion.ir.expr import C, E, Expr, I, J, coord, loads, walk
from fusion.ir.spec import AttentionSpec

#: Largest weight of a row from which on its delta is summed over the keys, see `_Call._settle`. Errors of delta go into
#: the gradients times weights: with small ones they average out. Rows of a thousand keys and random scores stay below.
CONCENTRATED = 1 / 8
#: elements of a table whose gradient every thread collects in a copy of its own
MAX_SCATTERED = 1 << 22


HUGE = 2 << 20
"""Bytes of a huge page."""
_ADVICE = 14


def in_huge_pages(tensor: Tensor) -> None:
    """Ask the operating system to back a fresh tensor of many MiB by huge pages: the first write to each page of 4 KiB
    takes longer than computing what is written. Where it does not know them, nothing happens."""
    size = tensor.numel() * tensor.element_size()
    if size < 4 * HUGE or not sys.platform.startswith("linux"):
        return
    first = -(-tensor.data_ptr() // HUGE) * HUGE
    _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t((tensor.data_ptr() + size - first) // HUGE * HUGE), _ADVICE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


# --- forward ----------------------------------------------------------------------------------------------------


class _ForwardWithStatistics(AttentionKernel):
    """The forward kernel; each row's `unit`, `shift` and `factor` (see `backward.STATISTICS`) are written with the
    output. A factor is written negative where a weight of the row is above CONCENTRATED."""

    def _tile_areas(self) -> None:
        self.peaks = self._area(self.tiling.groups * 4 * self.lanes, "peaks")
        super()._tile_areas()

    def _visit(self, scope, readers, first, count, groups, padded_groups, low, high, skipping=None) -> None:
        b = self.b
        with b.loop(0, padded_groups, hint="g") as g:
            b.store(b.constant(float("-inf"), self.vector), self._peak_of(g))
        super()._visit(scope, readers, first, count, groups, padded_groups, low, high, skipping)

    def _peak_of(self, g: Value) -> Value:
        return self.b.at(self.peaks, self.b.mul(g, self.lanes), "f32")

    def _take_maximum(self, softmax: GroupSoftmax, g: Value, highest: Value) -> None:
        at = self._peak_of(g)
        self.b.store(softmax.largest(highest, self.b.load(at, self.vector, "peak")), at)
        super()._take_maximum(softmax, g, highest)

    def _finish(self, scope: Scope, first: Value, count: Value, g: Value) -> None:
        self.finishing = g
        super()._finish(scope, first, count, g)

    def _row_factor(self, rows: Scope, raw: Value, total: Value) -> Value:
        factor = super()._row_factor(rows, raw, total)
        b = self.b
        unit, shift = self.exponent.coefficients(raw)
        flat: Value | int = 0
        for axis, extent in enumerate(self.spec.batch):
            flat = b.add(b.mul(flat, b.as_value(rows.integer(extent), "i64")), rows.value(coord(f"b{axis}")))
        assert rows.lanes is not None
        at = b.add(b.mul(flat, self.n_q), rows.lanes.first, "row")
        highest = b.load(self._peak_of(self.finishing), self.vector, "peak")
        largest = b.mul(self.context.math.exp2(b.fma(highest, unit, shift), 5), factor, "largest_weight")
        marked = b.select(b.compare("ogt", largest, CONCENTRATED), b.unary("arith.negf", factor), factor, "marked")
        for plane, value in enumerate((unit, shift, marked)):
            value = b.as_value(value, self.vector)
            start = b.add(at, b.mul(self.params[("statistics_rows",)], plane))
            place = b.at(self.params[("ptr", "statistics")], start, "f32")
            types = f"{value.type}, {rows.lanes.valid.type} into {PTR}"
            b.line(f"llvm.intr.masked.store {value}, {place}, {rows.lanes.valid} {{alignment = 4 : i32}} : {types}")
        return factor


class TrainingKernel:
    """`forward(operands, sizes) -> (output, statistics)` and `backward(...) -> gradients` of one spec."""

    def __init__(self, spec: AttentionSpec, tilings: Sequence[Tiling], target: Target):
        self.spec, self.tilings, self.target = spec, tuple(tilings), target
        self.extents = launch.extents_function(spec)
        self.plan: BackwardPlan = backward_plan(spec)
        self._compiled: dict[tuple, tuple[KernelText, MachineCode]] = {}
        self._lock = threading.Lock()

    def forward(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The output, and what the backward needs of each row: [3, b.., i], see `backward.STATISTICS`."""
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        statistics = torch.empty(3, *batch, n_q) if normalized(self.spec) else torch.empty(0)
        if 0 in (*batch, n_q, n_k, d, d_v):
            return reference.run(self.spec, operands, sizes), statistics
        self._check(n_q, n_k, sizes)
        extent_of = dict(zip([*(f"b{axis}" for axis in range(len(batch))), "i", "e"], [*batch, n_q, d_v], strict=True))
        order, dims = self.spec.output.order, self.spec.output.dims
        packed = torch.empty([extent_of[name] for name in order], dtype=getattr(torch, self.spec.out_dtype))
        out = packed.permute([order.index(name) for name in dims])
        values = operand_slots(self.spec, operands, sizes) | {("ptr", "out"): out.data_ptr()}
        values |= {("out_stride", name): out.stride(position) for position, name in enumerate(dims)}
        if statistics.numel():
            values |= {("ptr", "statistics"): statistics.data_ptr(), ("statistics_rows",): statistics[0].numel()}
        for choice in range(len(self.tilings)):
            text, code = self._forward_kernel(d, d_v, choice)
            blocks = -(-n_q // text.rows)
            items = math.prod(batch) * blocks
            own = values | {("items",): items, ("blocks",): blocks}
            if run_kernel(text, code, own, min(torch.get_num_threads(), items), n_k):
                return out, statistics
        raise AssertionError("multiply-add kernels raise no flag")

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        statistics: Tensor,
        operands: Sequence[Tensor],
        sizes: Sequence[int],
        needs: tuple[bool, ...],
    ) -> list[Tensor]:
        """The gradients of the operands that `needs` marks."""
        *batch, n_q, n_k, d, d_v = self.extents(sizes)
        if 0 in (*batch, n_q, n_k, d, d_v):
            return reference.backward(self.spec, grad, operands, sizes, needs)
        self._check(n_q, n_k, sizes)
        return _Call(self, grad, out, statistics, operands, sizes, needs).gradients()

    def _check(self, n_q: int, n_k: int, sizes: Sequence[int]) -> None:
        if (largest := max(n_q, n_k, *sizes)) >= SIZE_LIMIT:
            raise launch.UnsupportedSizeError(f"a size of {largest} was met; CPU kernels take sizes below {SIZE_LIMIT}")

    def _forward_kernel(self, d: int, d_v: int, choice: int) -> tuple[KernelText, MachineCode]:
        return self._build(
            ("forward", d, d_v, choice),
            lambda: _ForwardWithStatistics(self.spec, self.tilings[choice], self.target, d, d_v).text(),
        )

    def _build(self, key: tuple, write: Callable[[], KernelText]) -> tuple[KernelText, MachineCode]:
        with self._lock:
            if key not in self._compiled:
                text = write()
                self._compiled[key] = text, compile_text(text.source, "attention")
            return self._compiled[key]

    def compiled(
        self, role: Role, needs: tuple[bool, ...], d: int, d_v: int, choice: int, fused: bool
    ) -> tuple[KernelText, MachineCode]:
        """One backward kernel, compiled at first use."""
        own = (0, 1, 2) if fused else (0,) if role is Role.QUERIES else (1, 2)
        results = {n: self.result_memory(n) for n in own if needs[n]}
        tiling = backward_tiling(self.tilings[choice])
        return self._build(
            (role, needs, d, d_v, choice, fused),
            lambda: emit_backward(self.spec, self.plan, role, needs, results, tiling, self.target, d, d_v, fused),
        )

    def settling(self, d: int, d_v: int, choice: int) -> tuple[KernelText, MachineCode]:
        """The kernel that sums dx over the keys, see `_Call._settle`."""
        none, tiling = (False,) * len(self.spec.operands), backward_tiling(self.tilings[choice])
        return self._build(
            ("settling", d, d_v, choice),
            lambda: emit_backward(
                self.spec, self.plan, Role.QUERIES, none, {}, tiling, self.target, d, d_v, settles=True
            ),
        )

    def access(self, number: int) -> tuple[tuple[Expr, ...], Expr, Expr]:
        spec = self.spec
        return ((spec.q, I, C), (spec.k, J, C), (spec.v, J, E))[number]

    def direct(self, number: int) -> bool:
        """Whether every element of the operand is one of Q (K, V): its gradient is then written where it belongs."""
        index, row, column = self.access(number)
        wanted = {*(coord(f"b{axis}") for axis in range(len(self.spec.batch))), row, column}
        return len(index) == len(wanted) and set(index) == wanted

    def result_memory(self, number: int) -> str:
        return MEMORY_TYPE[self.spec.operands[number].dtype] if self.direct(number) else "f32"


def backward_tiling(tiling: Tiling) -> Tiling:
    """Blocks of the backward: lanes as in the forward, rows such that the tile's six matrices stay in the
    second-level cache."""
    return replace(tiling, keys=min(tiling.keys, 128))


def operand_slots(spec: AttentionSpec, tensors: Sequence[Tensor], sizes: Sequence[int]) -> dict[tuple, int]:
    """Parameters that say where the tensors lie, and the sizes."""
    values: dict[tuple, int] = {}
    for number, tensor in enumerate(tensors):
        values[("ptr", number)] = tensor.data_ptr()
        values |= {("stride", number, dim): stride for dim, stride in enumerate(tensor.stride())}
    return values | {("size", name): value for name, value in zip(spec.sizes, sizes, strict=True)}


def run_kernel(text: KernelText, code: MachineCode, values: dict[tuple, int], threads: int, rows: int) -> bool:
    """Run a kernel that packs `rows` rows per thread; False where it met values that its products cannot take."""
    steps = -(-rows // text.key_step)
    per_thread = -(-(text.fixed_bytes + steps * text.step_bytes) // 4096) * 4096 + 128
    memory = launch._memory
    memory.counter.value = 0
    values = values | {
        ("ptr", "counter"): memory.counter_address, ("chunks",): launch.CHUNKS_PER_THREAD * threads,
        ("ptr", "workspace"): memory.reserve(threads * per_thread), ("workspace_bytes",): per_thread,
        ("key_steps",): steps, ("ptr", "flag"): ctypes.addressof(memory.flag),
    }  # fmt: skip
    if len(text.slots) > len(memory.params) // 8:
        memory_slots = len(memory.params) // 8
        raise launch.UnsupportedSizeError(
            f"a kernel with {len(text.slots)} parameters; there is room for {memory_slots}"
        )
    struct.pack_into(f"{len(text.slots)}q", memory.params, 0, *(values[key] for key in text.slots))
    launch._parallel()(code.address, memory.packed, threads, 0)
    flagged = text.may_flag and memory.flag.value != 0
    memory.flag.value = 0
    return not flagged


class _Call:
    """One call of the backward kernels."""

    def __init__(self, kernel: TrainingKernel, grad, out, statistics, operands, sizes, needs):
        self.kernel, self.spec, self.plan = kernel, kernel.spec, kernel.plan
        self.grad, self.operands, self.sizes, self.needs = grad, operands, sizes, needs
        *self.batch, self.n_q, self.n_k, self.d, self.d_v = kernel.extents(sizes)
        self.rows = self._row_values(out, statistics)

    def _row_values(self, out: Tensor, statistics: Tensor) -> Tensor:
        """[4, rows + padding]: unit, shift, factor and delta of every query row; kernels read whole vectors."""
        if not normalized(self.spec):
            return torch.empty(0)
        count = math.prod(self.batch) * self.n_q
        rows = torch.zeros(4, count + 64)
        rows[:3, :count] = statistics.view(3, count)
        self.concentrated = rows[2, :count] < 0
        rows[2].abs_()
        order = [self.spec.output.dims.index(name) for name in (*(f"b{a}" for a in range(len(self.batch))), "i", "e")]
        product = self.grad.permute(order).float() * out.permute(order).float()
        torch.sum(product, -1, out=rows[3, :count].view(*self.batch, self.n_q))
        return rows

    def gradients(self) -> list[Tensor]:
        for choice in range(len(self.kernel.tilings)):
            found = self._attempt(choice)
            if found is not None:
                return found
        raise AssertionError("multiply-add kernels raise no flag")

    def _attempt(self, choice: int) -> list[Tensor] | None:
        """The gradients, or None where a kernel met values that its products cannot take."""
        self.results = {n: self._result(n) for n in (0, 1, 2) if self.needs[n]}
        self.sinks: dict[int, Tensor] = {}
        self.threads = torch.get_num_threads()
        for entry in self.plan.loads:
            if self.needs[entry.operand] and entry.form in (Form.DENSE, Form.SCATTERED):
                self._make_sink(entry)
        self.sums: dict[Expr, Tensor] = {}
        if not self._settle(choice):
            return None
        if self._is_fused(choice):
            found = self._run(Role.KEYS, choice, self.plan.of(Role.KEYS, self.needs), True)
            return self._assemble_all() if found else None
        for role in Role:
            own = (0,) if role is Role.QUERIES else (1, 2)
            collected = self.plan.of(role, self.needs)
            if (collected or any(self.needs[n] for n in own)) and not self._run(role, choice, collected):
                return None
            if role is Role.QUERIES and self.plan.corrects(self.needs) and (collected or self.needs[0]):
                self._correct(collected)
        return self._assemble_all()

    def _settle(self, choice: int) -> bool:
        """Make the deltas of rows with a large weight as exact as eager's; False where the kernel met values that its
        products cannot take.

        There dx = P (dP - delta) nearly cancels, and eager, whose delta is the sum of the very P dP, is more exact
        than a delta from dO and O can be. A kernel over the blocks with such rows (random scores have few, causal
        masks the first) sums dx as the others will compute it; what is not 0 of that is the error of delta.
        """
        if not normalized(self.spec) or not any(n for number, n in enumerate(self.needs) if number != 2):
            return True
        if not self.concentrated.any():
            return True
        text, code = self.kernel.settling(self.d, self.d_v, choice)
        blocks = -(-self.n_q // text.rows)
        marked = torch.zeros(math.prod(self.batch), blocks * text.rows, dtype=torch.bool)
        marked[:, : self.n_q] = self.concentrated.view(-1, self.n_q)
        wanted = marked.view(-1, text.rows).any(-1).long()
        drift = torch.zeros(*self.batch, self.n_q)
        values = self._slots(Role.QUERIES, (), self.n_q)
        values |= {("ptr", "sums", 0): drift.data_ptr(), ("ptr", "wanted"): wanted.data_ptr()}
        if not self._launch(text, code, values, self.n_q, self.n_k):
            return False
        delta, sums = self.rows[3, : drift.numel()], drift.flatten()
        if self.spec.sinks:  # these are sums of P dP, of marked blocks
            seen = wanted.bool().repeat_interleave(text.rows).view(marked.shape)[:, : self.n_q].flatten()
            torch.where(seen, sums, delta, out=delta)
        else:
            delta += sums
        return True

    def _assemble_all(self) -> list[Tensor]:
        return [self._assemble(n) for n in range(len(self.operands)) if self.needs[n]]

    def _is_fused(self, choice: int) -> bool:
        """Whether one kernel gives all gradients: every batch element is one thread's, and products are on tiles."""
        if not self.kernel.tilings[choice].planes or not self.needs[0] or not (self.needs[1] or self.needs[2]):
            return False
        return not self.plan.of(Role.QUERIES, self.needs) and not self._split(-(-self.n_k // 64))[0]

    def _split(self, blocks: int) -> tuple[bool, int]:
        """Whether threads share the blocks of all outer batch elements (there are too few of these), and the number
        of threads."""
        outer = math.prod(self.batch) // math.prod(self.batch[axis] for axis in self.plan.inner)
        threads = min(self.threads, outer * blocks)
        return outer % threads != 0 and outer < 4 * threads, threads

    def _correct(self, collected) -> None:
        """Where sums of dx are not 0, delta is off by that much (in exact arithmetic): put it right, and the sums
        made with it."""
        drift, *shares = self.extra
        self.rows[3, : drift.numel()] += drift.flatten()
        for entry, share in zip(collected, shares, strict=True):
            self.sums[entry.load] -= drift * share

    # --- memory -------------------------------------------------------------------------------------------------

    def _result(self, number: int) -> tuple[Tensor, Tensor]:
        """(tensor, view with dimensions b.., row, column): the operand's gradient itself, or one element per index."""
        n, width = (self.n_q, self.d) if number == 0 else (self.n_k, self.d if number == 1 else self.d_v)
        if not self.kernel.direct(number):
            tensor = torch.empty(*self.batch, n, width)
            return tensor, tensor
        index, row, column = self.kernel.access(number)
        names = [*(coord(f"b{axis}") for axis in range(len(self.batch))), row, column]
        operand, order = self.operands[number], self.spec.operands[number].order or tuple(range(len(index)))
        extents = dict(zip(names, (*self.batch, n, width), strict=True))
        covered = all(extents[e] == size for e, size in zip(index, operand.shape, strict=True))
        make = torch.empty if covered else torch.zeros
        packed = make([operand.shape[dim] for dim in order], dtype=operand.dtype)
        tensor = packed.permute([order.index(dim) for dim in range(len(index))])
        return tensor, tensor.permute([index.index(name) for name in names])

    def _make_sink(self, entry) -> None:
        """A float32 buffer of the operand's shape, the key's dimension innermost; a copy per thread where scattered.

        Zeroed unless the kernel writes all of it."""
        operand, shape = self.operands[entry.operand], self.operands[entry.operand].shape
        if entry.operand in self.sinks:
            return
        if entry.form is Form.SCATTERED and operand.numel() > MAX_SCATTERED:
            raise LargeTableError(
                f"the gradient of {self.spec.operands[entry.operand].name}, {tuple(shape)}, is asked for, which is "
                f"read at computed "
                f"indices; kernels keep a copy per thread of up to {MAX_SCATTERED} elements"
            )
        last = column_dimension(entry.load) if entry.form is Form.DENSE else None
        order = [dim for dim in range(operand.dim()) if dim != last] + ([] if last is None else [last])
        copies = self.threads if entry.form is Form.SCATTERED else 1
        packed = torch.empty(copies, *(shape[dim] for dim in order))
        in_huge_pages(packed)
        if not self._covers(entry):
            packed.zero_()
        self.sinks[entry.operand] = packed.permute(0, *(1 + order.index(dim) for dim in range(operand.dim())))

    def _covers(self, entry) -> bool:
        """Whether the kernel writes every element of a gradient: all tiles are visited, and all is read by them."""
        if not self.plan.written_once(entry) or self.spec.mask is not None:
            return False
        names = [*(coord(f"b{axis}") for axis in range(len(self.batch))), I, J]
        extents = dict(zip(names, (*self.batch, self.n_q, self.n_k), strict=True))
        shape = self.operands[entry.operand].shape
        return all(extents.get(index) == size for index, size in zip(entry.load.args, shape, strict=True))

    # --- the call -----------------------------------------------------------------------------------------------

    def _run(self, role: Role, choice: int, collected, fused: bool = False) -> bool:
        text, code = self.kernel.compiled(role, self.needs, self.d, self.d_v, choice, fused)
        lanes, rows = (self.n_q, self.n_k) if role is Role.QUERIES else (self.n_k, self.n_q)
        return self._launch(text, code, self._slots(role, collected, lanes), lanes, rows)

    def _launch(self, text: KernelText, code: MachineCode, values: dict[tuple, int], lanes: int, rows: int) -> bool:
        inner = math.prod(self.batch[axis] for axis in self.plan.inner)
        outer, blocks = math.prod(self.batch) // inner, -(-lanes // text.rows)
        split, threads = self._split(blocks)
        values |= {("outer",): outer, ("inner",): inner, ("blocks",): blocks, ("split",): int(split)}
        return run_kernel(text, code, values, threads, rows)

    def _slots(self, role: Role, collected, lanes: int) -> dict[tuple, int]:
        values = operand_slots(self.spec, (*self.operands, self.grad), self.sizes)
        if normalized(self.spec):
            values |= {
                ("ptr", name): self.rows[n].data_ptr() for n, name in enumerate(("unit", "shift", "factor", "delta"))
            }
        for number, (_, view) in self.results.items():
            values[("ptr", "result", number)] = view.data_ptr()
            names = [*(f"b{axis}" for axis in range(len(self.batch))), "row", "column"]
            values |= {("result_stride", number, name): view.stride(dim) for dim, name in enumerate(names)}
        for number, sink in self.sinks.items():
            values |= {("ptr", "sink", number): sink.data_ptr(), ("sink_elements", number): sink[0].numel()}
            values |= {("sink_stride", number, dim): sink.stride(dim + 1) for dim in range(sink.dim() - 1)}
        for k, entry in enumerate(collected):
            if entry.form in (Form.ROWS, Form.COLUMNS):
                self.sums[entry.load] = torch.empty(*self.batch, lanes)
                values[("ptr", "sums", k)] = self.sums[entry.load].data_ptr()
        self.extra = [torch.empty(*self.batch, lanes) for _ in range(self.plan.sums(role, self.needs) - len(collected))]
        values |= {("ptr", "sums", len(collected) + k): extra.data_ptr() for k, extra in enumerate(self.extra)}
        return values

    # --- from what the kernels wrote to gradients of operands ---------------------------------------------------

    def _assemble(self, number: int) -> Tensor:
        parts: list[Tensor] = []
        if number in self.results:
            tensor, _ = self.results[number]
            if self.kernel.direct(number):
                parts.append(tensor)
            else:
                parts.append(pulled.of_access(self.spec, self.operands, self.sizes, number, tensor))
        if number in self.sinks:
            parts.append(self.sinks[number].sum(0) if self.sinks[number].shape[0] > 1 else self.sinks[number][0])
        for load, sums in self.sums.items():
            if int(load.attr) == number:  # type: ignore[arg-type]
                axis = -1 if "j" not in {str(e.attr) for e in walk(load) if e.op == "coord"} else -2
                parts.append(
                    pulled.of_expression(self.spec, self.operands, self.sizes, load, sums.unsqueeze(axis), number)
                )
        for sink in self.spec.sinks:
            if (part := self._through_sink(sink, number)) is not None:
                parts.append(part)
        if not parts:
            return torch.zeros_like(self.operands[number])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _through_sink(self, sink: Expr, number: int) -> Tensor | None:
        """A sink's weight takes part in the sum of the row only: its gradient is -weight * delta, [b.., i]."""
        if all(int(load.attr) != number for load in loads(sink)):  # type: ignore[arg-type]
            return None
        count = math.prod(self.batch) * self.n_q
        unit, shift, factor, delta = (row[:count].view(*self.batch, self.n_q, 1) for row in self.rows)
        value = pulled.value(self.spec, self.operands, self.sizes, sink)
        scale = self.plan.programs.scale
        weight = torch.exp2(value / scale * unit + shift) * factor
        return pulled.of_expression(self.spec, self.operands, self.sizes, sink, -weight * delta, number)


def supports(spec: AttentionSpec) -> str | None:
    """Why there are no backward kernels for this spec, or None."""
    return unsupported(spec)
