"""One call of the backward kernels: memory for what they write, the kernels in turn, gradients from what they wrote."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusion.errors import LargeTableError
from fusion.ir.expr import Expr, I, J, coordinates, loads
from fusion.ir.results import result_names
from fusion.lowering.backward_plan import (
    ROW_VALUES,
    SUM_OF_DX,
    BackwardPlan,
    Form,
    LaneAxis,
    LoadGradient,
    RowSum,
    column_dimension,
    normalized,
)
from fusion.lowering.rows import lost_logarithms
from fusion.planning.cpu_backward import MOST_PIECES

from ..emitter import Backward
from ..mlir.backward.delta import DELTA_ERRORS, DELTAS
from ..mlir.backward.fused import QUERY_GRADIENT_SPAN
from ..mlir.backward.lanes import AUX_SUMS
from ..mlir.backward.tile import Kind
from ..mlir.values import round_up
from ..reference import gradients as pulled
from .calling import CompiledKernel, Launch, address, in_huge_pages, operand_values
from .derived import Derived, Step, copies_of, result, step_of, steps_of
from .launch import WORK_PER_THREAD, window_of

if TYPE_CHECKING:
    from .training import TrainingKernel

MAX_SCATTERED = 1 << 22  # elements of a table whose gradient every thread collects in a copy of its own

NOTHING: Mapping[tuple, Tensor] = {}


class _Flagged(Exception):
    """A kernel met values that its products cannot take."""


class BackwardCall:
    """One call of the backward kernels. arriving: the gradients of the output and of the auxiliary outputs of the
    plan."""

    def __init__(self, kernel: TrainingKernel, plan: BackwardPlan, given: Backward):
        self.kernel, self.spec, self.plan = kernel, plan.spec, plan
        self.operands, self.sizes, self.needs = given.operands, given.sizes, given.needs
        self.arriving = (given.grad, *(g for g in given.aux_outputs if g is not None))
        self.read, self.statistics = (*self.operands, *self.arriving, given.out), given.statistics.contiguous()
        layouts = [part for x in self.read for part in (x.shape, x.stride())]
        key = (id(plan), self.needs, torch.get_num_threads(), *self.sizes, *layouts)
        self.derived = kernel.derived.get(key) or kernel.derived.store(key, self._derive())
        *self.batch, self.n_q, self.n_k, self.d, self.d_v = self.derived.extents
        self.log_sum_term: Tensor | None = None
        self.rows = self._row_values(given.out, given.statistics)
        self.complete = False

    def _derive(self) -> Derived:
        plan, extents = self.plan, self.kernel.extents(self.sizes)
        *batch, n_q, n_k, d, d_v = extents
        shapes = (*batch, n_q, d), (*batch, n_k, d), (*batch, n_k, d_v)
        tile = self.kernel.target.lanes
        work = 3 * math.prod(batch) * round_up(n_q, tile) * round_up(n_k, tile) * (d + d_v)  # three products of each
        simple = self._wants_delta() and (self.spec.row_scale, plan.at_weight, plan.at_log_sum) == (None, None, None)
        return Derived(
            extents=extents,
            threads=min(torch.get_num_threads(), work // WORK_PER_THREAD[True] + 1),
            results={n: result(plan, n, self.operands[n], shapes[n], self.sizes) for n in (0, 1, 2) if self.needs[n]},
            simple=simple,
        )

    def _row_values(self, out: Tensor, statistics: Tensor) -> Tensor:
        """[6, rows + padding]: `ROW_VALUES` of every query row. `DELTAS` writes the first four where it can, and
        the others are not read then; kernels read whole vectors."""
        if not normalized(self.spec):
            return torch.empty(0, dtype=torch.float32)
        count = math.prod(self.batch) * self.n_q
        rows = torch.zeros(len(ROW_VALUES), count + 64, dtype=torch.float32)
        if self.derived.simple:
            return rows
        rows[:3, :count] = statistics[:3].view(3, count)
        unit, _, _, delta, lost, off = (row.view(*self.batch, self.n_q) for row in rows[:, :count])
        unit.abs_()
        order = [self.spec.output.dims.index(name) for name in result_names(self.spec)]
        product = self.arriving[0].permute(order).float() * out.permute(order).float()
        torch.sum(product, -1, out=delta)
        if self.spec.row_scale is not None:
            _, self.slope, self.lost = pulled.of_rows(self.spec, self.operands, self.sizes, *statistics[3:])
            delta *= self.slope
            lost.copy_(self.lost)
        if self.plan.at_log_sum is not None:
            read = (*self.operands, *self.arriving)
            at_log_sum = pulled.value(self.spec, read, self.sizes, self.plan.at_log_sum).squeeze(-1)
            self.log_sum_term = at_log_sum * lost_logarithms(*statistics[3:])
            off.copy_(self.log_sum_term)
        return rows

    def gradients(self) -> list[Tensor]:
        for choice in self.kernel.choices():
            try:
                result = self._attempt(choice)
            except _Flagged:
                continue
            if choice not in self.derived.right:
                self.kernel.prove_gradients(self, choice)
                self.derived.right.add(choice)
            return result
        raise AssertionError("multiply-add kernels raise no flag")

    def _attempt(self, choice: int) -> list[Tensor]:
        """The gradients, by the `choice`-th tiling. Raises _Flagged."""
        self.choice = choice
        self.results = {n: result.memory.make() for n, result in self.derived.results.items()}
        self.sinks: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        if (steps := self.derived.steps.get(choice)) is None:
            steps = self.derived.steps[choice] = steps_of(self)
        for entry in self.plan.loads:
            if self.needs[entry.operand] and entry.form in (Form.DENSE, Form.SCATTERED):
                self._make_sink(entry, steps[-1].shares)
        self.sums: dict[Expr, Tensor] = {}
        self.located: dict[tuple, Tensor] = {("ptr", n): x for n, x in enumerate(self.read)}
        self.located |= {("ptr", "rows"): self.rows, ("ptr", "statistics"): self.statistics}
        starts = {n: self.derived.results[n].start(made) for n, made in self.results.items()}
        for name, tensors in (("result", starts), ("sink", self.sinks), ("kept", self.kept)):
            self.located |= {("ptr", name, n): x for n, x in tensors.items()}
        if self.derived.simple:
            self._launch(DELTAS)
        elif self._wants_delta():
            self._add_aux_sums()
            self._recompute_deltas()
        for step in steps:
            sums = [self._row_sum(entry) for entry in step.sums]
            self._launch(step.kind, {("ptr", "sums", k): total for k, total in enumerate(sums)}, step)
            self._correct(dict(zip(step.sums, sums, strict=True)))
        return [self._assemble(n) for n in range(len(self.operands)) if self.needs[n]]

    def _add_aux_sums(self) -> None:
        """Put what auxiliary outputs give into delta, once. From then on sums of dx are `log_sum_term`, the gradient of
        the log-sum-exp, in place of 0."""
        if self.complete:
            return
        delta = self.delta
        if self.plan.at_weight is not None:
            sums, _ = self._row_sums(AUX_SUMS)
            delta += sums if self.spec.row_scale is None else sums * self.slope
        if self.log_sum_term is not None:
            delta -= self.log_sum_term
        self.complete = True

    def _wants_delta(self) -> bool:
        """Whether delta is read: by all gradients but that of V."""
        return normalized(self.spec) and any(n for number, n in enumerate(self.needs) if number != 2)

    def _row_sums(self, kind: Kind) -> Tensor:
        """Sums of a kernel over the keys, [b.., i], and where it did."""
        sums = torch.zeros(2, *self.batch, self.n_q, dtype=torch.float32)
        self._launch(kind, {("ptr", "sums", 0): sums})
        return sums

    def _recompute_deltas(self) -> None:
        """Make deltas as exact as eager's where they are not.

        In rows with a large weight dx = P (dP - delta) nearly cancels, and eager, whose delta is the sum of the very
        P dP, is more exact than a delta from dO and O can be. So it is where rows of V have much in common: O is
        rounded with that in it. A kernel over such rows sums dx as the others will compute it; what is not 0 of that is
        the error of delta.
        """
        sums, seen = self._row_sums(DELTA_ERRORS)
        self.delta.add_(torch.where(seen != 0, self._drift(sums), 0.0))

    def _common(self) -> int:
        """At which squared mean of V's rows the deltas of all rows are made exact: 1 / `common` of the variance.

        A delta's error is shared by the weights of its row. In the gradient of a table one bucket takes many of these,
        in each row, where eager's errors average out; most in narrow dtypes, which O is rounded to."""
        if not any(self.needs[entry.operand] and entry.form is Form.SCATTERED for entry in self.plan.loads):
            return 0
        return 4 if self.spec.out_dtype == "float32" else max(self.n_k // 4, 4)

    @property
    def delta(self) -> Tensor:
        """Delta of every query row, [b.., i]: part of `rows`."""
        return self.rows[3, : math.prod(self.batch) * self.n_q].view(*self.batch, self.n_q)

    def _drift(self, sums: Tensor) -> Tensor:
        """Error of deltas by these sums (`SUM_OF_DX`), [b.., i]. Nothing is said of rows in which delta is none."""
        term = 0.0 if self.log_sum_term is None else self.log_sum_term
        if self.spec.sinks:
            return sums - term - self.delta
        if self.spec.row_scale is None:
            return sums - term
        return torch.where(self.lost > -1, self.slope * sums - self.lost * self.delta - term, 0.0)

    def _correct(self, results: Mapping[RowSum, Tensor]) -> None:
        """Take over the sums of a kernel.

        They tell how far delta is off: put it right, and the sums made with it. Rows of NaN, which a mask keeps out of
        sums, stay out."""
        of_loads = {entry: x for entry, x in results.items() if entry.of.op == "load"}
        self.sums |= {entry.of: x for entry, x in of_loads.items() if not entry.share}
        if (drift := results.get(SUM_OF_DX)) is None:
            return
        drift = self._drift(drift)
        self.delta.add_(drift)
        for entry, share in of_loads.items():
            if entry.share:
                self.sums[entry.of] -= (drift * share).nan_to_num_(0.0, 0.0, 0.0)

    def _make_sink(self, entry: LoadGradient, shares: int) -> None:
        """A buffer of the operand's shape, the key's dimension innermost; copies for each share where scattered.

        Zeroed unless the kernel writes all of it. What it adds up before that is kept in one per thread."""
        operand, shape = self.operands[entry.operand], self.operands[entry.operand].shape
        if entry.operand in self.sinks:
            return
        if entry.form is Form.SCATTERED and operand.numel() > MAX_SCATTERED:
            raise LargeTableError(
                f"the gradient of {self.spec.operands[entry.operand].name}, {tuple(shape)}, is asked for, which is "
                f"read at computed indices; kernels keep a copy per thread of up to {MAX_SCATTERED} elements"
            )
        order = list(range(operand.dim()))
        if entry.form is Form.DENSE:
            last = column_dimension(entry.load)  # rows before it: those of one batch element lie side by side
            order.sort(key=lambda dim: (dim == last, "i" in coordinates(entry.load.args[dim])))
        exclusive, elements = self.plan.exclusive(entry), operand.numel()
        copies = shares * copies_of(operand) if entry.form is Form.SCATTERED else 1
        memory = torch.empty(copies, round_up(elements, 16), dtype=operand.dtype if exclusive else torch.float32)
        in_huge_pages(memory)
        if not self._covers(entry):
            memory.zero_()
        packed = memory[:, :elements].view(copies, *(shape[dim] for dim in order))
        self.sinks[entry.operand] = packed.permute(0, *(1 + order.index(dim) for dim in range(operand.dim())))
        if exclusive:
            keys = self.kernel.backward_tilings[self.choice].groups * self.kernel.target.lanes
            elements = round_up(self.n_k, keys) * self.n_q if self.inner > 1 else 0
            self.kept[entry.operand] = torch.empty(self.derived.threads, elements, dtype=torch.float32)
            in_huge_pages(self.kept[entry.operand])

    @property
    def inner(self) -> int:
        """Number of batch elements that dense gradients are summed over."""
        return math.prod(self.batch[axis] for axis in self.plan.inner)

    def _covers(self, entry: LoadGradient) -> bool:
        """Whether the kernel writes every element of a gradient: all tiles are visited, and all is read by them."""
        if not self.plan.exclusive(entry) or self.spec.mask is not None:
            return False
        extents = dict(zip((*self.spec.axes, I, J), (*self.batch, self.n_q, self.n_k), strict=True))
        shape = self.operands[entry.operand].shape
        return all(extents.get(index) == size for index, size in zip(entry.load.args, shape, strict=True))

    def _row_sum(self, entry: RowSum) -> Tensor:
        length = self.n_q if entry.axis is LaneAxis.QUERIES else self.n_k
        return torch.empty(*self.batch, length, dtype=torch.float32)

    def _launch(self, kind: Kind, own: Mapping[tuple, Tensor] = NOTHING, step: Step | None = None) -> None:
        """Run a kernel; own: what it alone reads or writes. Raises _Flagged."""
        key = kind, self.choice
        if (launch := self.derived.launchers.get(key)) is None:
            launch = self.derived.launchers[key] = self._launcher(kind, own, step)
        if not launch([*map(address, self.located.values()), *map(address, own.values())]):
            raise _Flagged

    def _launcher(self, kind: Kind, own: Iterable[tuple], step: Step | None) -> Launch:
        kernel = self.compiled(kind, self.choice)
        values = operand_values(self.spec, (x.stride() for x in self.read), self.sizes)
        for number, of_operand in self.derived.results.items():
            values |= {("result_stride", number, name): n for name, n in of_operand.by_name.items()}
        for number, sink in self.sinks.items():
            values |= {("sink_stride", number, dim): sink.stride(dim + 1) for dim in range(sink.dim() - 1)}
            values["sink_elements", number] = sink.stride(0)
            values["sink_copy_stride", number] = sink.stride(0) * copies_of(self.operands[number])
        values |= {("kept_elements", number): kept.shape[1] for number, kept in self.kept.items()}
        if normalized(self.spec):
            values |= {("statistics_rows",): self.statistics[0].numel(), ("row_value_stride",): self.rows.stride(0)}
        lanes, rows = (self.n_q, self.n_k) if kind.axis is LaneAxis.QUERIES else (self.n_k, self.n_q)
        inner, text = self.inner, kernel.text
        outer, blocks = math.prod(self.batch) // inner, -(-lanes // text.rows)
        if step is None:  # rows of a batch element differ in what there is to do
            step = step_of(self, kind, min(blocks, -(-MOST_PIECES * self.derived.threads // outer)))
        size = -(-blocks // step.parts)
        threads = min(self.derived.threads, step.shares)
        values |= {("outer",): outer, ("inner",): inner, ("blocks",): blocks, ("shares",): step.shares}
        values |= {("parts",): step.parts, ("part_blocks",): size, ("common",): self._common()}
        records, steps, window = outer * inner * step.parts, -(-rows // text.key_step), window_of(text, rows, threads)
        if step.parts == 1:  # sums of spans, where there are several
            several = self.spec.out_dtype == "float32" and blocks * text.rows > QUERY_GRADIENT_SPAN
            records = threads if several else 0
        values |= {("query_steps",): steps, ("records",): records, ("window",): window}
        shared = (records + threads) * steps * text.part_bytes
        return kernel.launcher(values, [*self.located, *own], threads, min(rows, window), shared)

    def compiled(self, kind: Kind, choice: int) -> CompiledKernel:
        """One of its kernels."""
        needs = self.needs if kind.gradients else (False,) * len(self.needs)
        return self.kernel.backward_kernel(kind, self.plan, needs, self.sizes, choice)

    def _assemble(self, number: int) -> Tensor:
        parts: list[Tensor] = []
        if number in self.results:
            tensor, added = self.results[number], self.derived.results[number].sum
            if self.plan.writes(number):
                parts.append(tensor)
            elif added is not None:
                parts.append(added.of(tensor))
            else:
                parts.append(pulled.of_access(self.spec, self.operands, self.sizes, number, tensor))
        if number in self.sinks:
            sink, copies = self.sinks[number], copies_of(self.operands[number])  # the last one has the sums
            parts.append(sink[copies - 1 :: copies].sum(0) if len(sink) > 1 else sink[0])
        for load, sums in self.sums.items():
            if load.operand == number:
                upstream = sums.unsqueeze(-2 if "j" in coordinates(load) else -1)
                parts.append(pulled.of_expression(self.spec, self.operands, self.sizes, load, upstream, number))
        for sink in self.spec.sinks:
            if any(x.operand == number for x in loads(sink)):  # its weight takes part in the sum of the row only
                upstream = -self._weight_of(sink) * self.delta.unsqueeze(-1)
                parts.append(pulled.of_expression(self.spec, self.operands, self.sizes, sink, upstream, number))
        return functools.reduce(torch.add, parts) if parts else torch.zeros_like(self.operands[number])

    def _weight_of(self, sink: Expr) -> Tensor:
        """A sink's share of the sum of each row, [b.., i, 1]."""
        count = math.prod(self.batch) * self.n_q
        unit, shift, factor = (row[:count].view(*self.batch, self.n_q, 1) for row in self.rows[:3])
        value = pulled.value(self.spec, self.operands, self.sizes, sink)
        exponent = value / self.plan.programs.scale * unit + shift
        # Far above all scores of a row, or alone in it, sinks share it among themselves: its factor is 0 or nearly.
        sinks = [pulled.value(self.spec, self.operands, self.sizes, other) for other in self.spec.sinks]
        share = torch.exp(value - torch.logsumexp(torch.stack(torch.broadcast_tensors(*sinks)), 0))
        return torch.where((exponent > 64) | (factor == 0), share, torch.exp2(exponent) * factor)
