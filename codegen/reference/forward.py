"""The attention of a spec in plain torch, for all query rows or for a block of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusion.ir.expr import HEAD, LOG_WEIGHT, ROW_MAX, ROW_SUM, SCORE, WEIGHT, C, E, Expr, I, J, coord, substitute, walk
from fusion.ir.ops import evaluate
from fusion.ir.results import REDUCE, leaves, result_names, size_value
from fusion.ir.spec import AttentionSpec, AuxOutput, Normalizer, Reduction
from fusion.lowering.rows import LIVE_LOG_SUM, LOG_SUM, depends_on_maximum, row_scale


def run(
    spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Attention of `spec` for its operand tensors and the values of `spec.sizes`: [`spec.output.dims`], in memory in
    the order `spec.output.order`. dtype: of the computation; by default float32, or float64 where an operand is."""
    return run_all(spec, operands, sizes, dtype)[0]


def run_all(
    spec: AttentionSpec, operands: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Result of `run`, followed by the auxiliary outputs of the spec."""
    execution = Execution(spec, operands, sizes, dtype)
    out, *aux_outputs = execution.results(0, execution.n_q, *execution.gathered())
    made = [x.to(getattr(torch, f.dtype)) for f, x in zip(spec.aux_outputs, aux_outputs, strict=True)]
    return [execution.store(out), *(execution.as_given(k, x).contiguous() for k, x in enumerate(made, 1))]


class Rows:
    """Weights of the keys in each row, for classes that evaluate the expressions of a spec."""

    spec: AttentionSpec
    dtype: torch.dtype
    device: torch.device
    n_k: int

    def value(self, expr: Expr, extra: dict[Expr, torch.Tensor]) -> torch.Tensor:
        """An expression of the spec. extra: leaves beside the coordinates and sizes."""
        raise NotImplementedError

    def columns(self, x: torch.Tensor, positions: dict[Expr, torch.Tensor]) -> torch.Tensor:
        """Scores and sinks side by side."""
        sinks = [self.value(sink, positions).to(self.dtype).expand(*x.shape[:-1], 1) for sink in self.spec.sinks]
        return torch.cat([x, *sinks], -1)

    def softmax(self, x: torch.Tensor, positions: dict[Expr, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        """Weights that V is multiplied by, [b.., rows, n_k], from the score program."""
        columns = self.columns(x, positions)
        if columns.shape[-1] == 0:  # no keys: an empty sum
            return x
        safe = self.spec.normalizer is Normalizer.SAFE_SOFTMAX
        zero = self.spec.normalizer is Normalizer.ZERO_SOFTMAX
        if self.spec.row_scale is None:
            p = torch.ops.aten._safe_softmax(columns, -1) if safe else torch.softmax(columns, -1)
            return (torch.where(p.isnan(), 0.0, p) if zero else p)[..., : self.n_k] * weight
        row_max = columns.amax(-1, keepdim=True)
        if not depends_on_maximum(self.spec):  # what flows through it cancels, but for rounding
            row_max = row_max.detach()
        dead = row_max == -torch.inf
        rows = {ROW_MAX: row_max, LOG_SUM: columns.logsumexp(-1, keepdim=True)}
        if safe:  # rows that are set to 0 at the end, through which no gradient flows, of infinities neither
            rows = {name: torch.where(dead, 0.0, value) for name, value in rows.items()}
        p = torch.exp(columns - rows[ROW_MAX])
        rows[ROW_SUM] = torch.where(dead, 1.0, p.sum(-1, keepdim=True)) if safe else p.sum(-1, keepdim=True)
        scale = self.value(row_scale(self.spec), positions | rows)
        p = p[..., : self.n_k] * scale
        return (torch.where(dead if safe else p.isnan(), 0.0, p) if safe or zero else p) * weight

    def of_aux_output(self, x: torch.Tensor, positions: dict[Expr, torch.Tensor]) -> dict[Expr, torch.Tensor]:
        """Leaves of auxiliary outputs: WEIGHT, LOG_WEIGHT, ROW_MAX and ROW_SUM."""
        if self.spec.normalizer is Normalizer.NONE:
            return {WEIGHT: x}
        known = {WEIGHT: self.softmax(x, positions, torch.ones((), dtype=self.dtype, device=x.device))}
        made_of = {*walk(*(f.value for f in self.spec.aux_outputs))}
        if LOG_WEIGHT in made_of:
            known[LOG_WEIGHT] = self.columns(x, positions).log_softmax(-1)[..., : x.shape[-1]]
        if {ROW_MAX, ROW_SUM} & made_of:
            columns = self.columns(x, positions)
            known[ROW_MAX] = columns.amax(-1, keepdim=True)
            known[ROW_SUM] = (columns - known[ROW_MAX]).exp().sum(-1, keepdim=True)
            known[LOG_SUM] = _log_sum(columns, known[ROW_MAX].detach())
        return known


def _log_sum(columns: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """`LIVE_LOG_SUM` of rows. What flows through the maximum cancels, and is left out; the gradient of
    `torch.logsumexp` would be exp(x - result), in which a large result has lost digits."""
    infinite = row_max.isinf()
    row_max, columns = torch.where(infinite, 0.0, row_max), torch.where(infinite, 0.0, columns)
    result = row_max + (columns - row_max).exp().sum(-1, keepdim=True).log()
    return torch.where(infinite, 0.0, result)


class Execution(Rows):
    """One execution. Every value is a tensor that broadcasts over the axes [b0, b1, ..., rows, columns]. With gradients
    enabled autograd records it; the steps are chosen such that gradients are those of the same operations in a model
    (softmax by `torch.softmax`, selections by `torch.where`)."""

    def __init__(
        self,
        spec: AttentionSpec,
        operands: Sequence[torch.Tensor],
        sizes: Sequence[int],
        dtype: torch.dtype | None = None,
    ):
        if dtype is None:
            dtype = torch.float64 if any(o.dtype is torch.float64 for o in operands) else torch.float32
        self.spec, self.operands, self.dtype = spec, operands, dtype
        self.device = operands[0].device
        self.sizes = dict(zip(spec.sizes, sizes, strict=True))
        self.batch = tuple(size_value(extent, self.sizes) for extent in spec.batch)
        self.n_q, self.n_k, self.d, self.d_v = (
            size_value(e, self.sizes) for e in (spec.n_q, spec.n_k, spec.d, spec.d_v)
        )
        self.axes = {coord(f"b{axis}"): self.arange(0, extent, axis) for axis, extent in enumerate(self.batch)}

    def arange(self, first: int, count: int, axis: int) -> torch.Tensor:
        shape = [1] * (len(self.batch) + 2)
        shape[axis] = count
        return torch.arange(first, first + count, device=self.device).view(shape)

    def value(self, expr: Expr, extra: dict[Expr, torch.Tensor]) -> torch.Tensor:
        known = self.axes | extra
        leaf = leaves(self.sizes, known, lambda part: self.loader(part, known), self.device)
        return evaluate(expr, leaf, self.dtype).to(self.device)

    def loader(self, part: Expr, known: dict[Expr, torch.Tensor]):
        tensor = self.operands[part.operand]
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        elif tensor.dtype is not torch.bool:
            tensor = tensor.to(torch.int64)
        if not part.args:
            return tensor
        view = self.slice(tensor, part.args, known)
        return (lambda *index: tensor[index]) if view is None else (lambda *index: view)

    def slice(self, tensor: torch.Tensor, index: tuple[Expr, ...], known: dict[Expr, torch.Tensor]):
        """`tensor[index]` over the axes, where every index is constant or a separate coordinate, which may be divided
        (heads that share keys), else None: the gradient of a gather is slower by far, and adds up in any order."""
        groups = [e.args[1].integer if e.op == "floordiv" and e.args[1].is_const else 1 for e in index]
        index = tuple(e.args[0] if group > 1 else e for e, group in zip(index, groups, strict=True))
        coords = [e for e in index if e.op == "coord"]
        if len(set(coords)) != len(coords) or any(e.op not in ("coord", "const") for e in index):
            return None
        axes = []
        for dim in reversed(range(len(index))):
            if index[dim].is_const:
                tensor = tensor.select(dim, index[dim].integer)
                continue
            positions = known[index[dim]]
            if positions.numel() == 0:
                return None
            axes.insert(0, next((a for a, extent in enumerate(positions.shape) if extent > 1), None))
            first, count, group = int(positions.flatten()[0]), positions.numel(), groups[dim]
            tensor = tensor.narrow(dim, first // group, (first + count - 1) // group - first // group + 1)
            if group > 1:
                tensor = tensor.repeat_interleave(group, dim).narrow(dim, first % group, count)
        named = [axis for axis in axes if axis is not None]
        tensor = tensor.reshape([n for n, axis in zip(tensor.shape, axes, strict=True) if axis is not None])
        tensor = tensor.permute(sorted(range(len(named)), key=named.__getitem__))
        shape = [1] * (len(self.batch) + 2)
        for axis, extent in zip(sorted(named), tensor.shape, strict=True):
            shape[axis] = extent
        return tensor.view(shape) if tensor.is_contiguous() else tensor.reshape(shape)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q [b.., i, c], K [b.., j, c] and V [b.., j, e], indexed as the spec says."""
        return self.gather(0), self.gather(1), self.gather(2)

    def gather(self, operand: int) -> torch.Tensor:
        """Q, K or V, by its number."""
        spec, axis = self.spec, len(self.batch)
        index, rows, n, columns, width = (
            (spec.q, I, self.n_q, C, self.d),
            (spec.k, J, self.n_k, C, self.d),
            (spec.v, J, self.n_k, E, self.d_v),
        )[operand]
        positions = {rows: self.arange(0, n, axis), columns: self.arange(0, width, axis + 1)}
        shape = (*self.batch, n, width)
        if (value := self.spec.values[operand]) is not None:
            return self.value(value, positions).to(self.dtype).expand(shape)
        tensor = self.operands[operand].to(self.dtype)
        view = self.slice(tensor, index, self.axes | positions)
        if view is not None:
            return view.expand(shape)
        return tensor[tuple(self.value(e, positions).expand(shape) for e in index)]

    def results(self, first: int, count: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Output of query rows first..first+count-1, [b.., count, d_v], and their contributions to each auxiliary
        output, [b.., rest]."""
        x, positions = self.program(first, count, q, k)
        weight = self.value(self.spec.weight, positions).to(self.dtype)
        plain = self.spec.normalizer is Normalizer.NONE
        weights = (x * weight) if plain else self.softmax(x, positions, weight)
        if (mixing := self.spec.mixing) is not None and mixing.weights is not None:
            mixed = self.mixed(weights, mixing.weights) + (weights if mixing.own_weight else 0.0)
            weights = self.value(mixing.weighted, positions | {WEIGHT: mixed}).to(self.dtype)
        found = [weights @ v]
        if self.spec.aux_outputs:
            known = positions | self.of_aux_output(x, positions)
            found += [self.aux_output(f, known) for f in self.spec.aux_outputs]
        return found

    def aux_output(self, aux: AuxOutput, known: dict[Expr, torch.Tensor]) -> torch.Tensor:
        """One auxiliary output over the rows of the block, its coordinates in the order b.., i, j."""
        live, over = substitute(aux.value, {LIVE_LOG_SUM: LOG_SUM}), aux.over
        value = self.value(live, known).to(self.dtype)
        rows, columns = known[I].shape[-2], self.n_k if "j" in (*aux.dims, over) else 1
        value = value.expand(*self.batch, rows, columns)
        if not over:
            return value if "j" in aux.dims else value.squeeze(-1)
        axis = -1 if over == "j" else -2
        return REDUCE[aux.reduction](value, axis)

    def blocks(self, elements: int) -> list[tuple[int, int]]:
        """(first row, number of rows) of blocks of at most so many scores; all rows are one where an auxiliary output
        is an extremum over them."""
        if any(f.over == "i" and f.reduction is not Reduction.SUM for f in self.spec.aux_outputs):
            return [(0, self.n_q)]
        rows = max(1, elements // max(1, math.prod(self.batch) * self.n_k))
        return [(first, min(rows, self.n_q - first)) for first in range(0, self.n_q, rows)] or [(0, 0)]

    def program(self, first: int, count: int, q: torch.Tensor, k: torch.Tensor):
        """Score program of these rows, [b.., count, n_k], and the positions that it was evaluated at."""
        axis = len(self.batch)
        score = q.narrow(-2, first, count) @ k.transpose(-1, -2)
        positions = {I: self.arange(first, count, axis), J: self.arange(0, self.n_k, axis + 1), SCORE: score}
        if (mixing := self.spec.mixing) is not None and mixing.scores is not None:
            scored = self.value(mixing.scored, positions).to(self.dtype).expand(score.shape)
            score = positions[SCORE] = self.mixed(scored, mixing.scores) + (scored if mixing.own_score else 0.0)
        return self.value(self.spec.score, positions).to(self.dtype).expand(score.shape), positions

    def mixed(self, values: torch.Tensor, matrix: Expr) -> torch.Tensor:
        """Sums over heads of [b.., i, j], each head times its element of the matrix."""
        assert self.spec.mixing is not None
        axis, rows = self.spec.mixing.axis, len(self.batch)
        heads = self.value(matrix, {HEAD: self.arange(0, self.batch[axis], rows)}).to(self.dtype)
        heads = heads.expand(*self.batch, self.batch[axis], 1).squeeze(-1).movedim(axis, -2)
        apart = values.movedim(axis, -3)
        return (heads @ apart.flatten(-2)).unflatten(-1, apart.shape[-2:]).movedim(-3, axis)

    def has_rows(self, number: int) -> bool:
        """Whether a result (number 0: the output, then auxiliary ones) has elements for each row; else it is a sum."""
        return not number or "i" in self.spec.aux_outputs[number - 1].dims

    def cut(self, number: int, tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Contribution of some rows to a result, or its gradient, as computed."""
        return tensor.narrow(len(self.batch), first, count) if self.has_rows(number) else tensor

    def as_computed(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """A result, or its gradient, with its coordinates in the order b.., i, e or b.., i, j."""
        names, dims = self._names(number)
        return tensor.to(self.dtype).permute([dims.index(name) for name in names])

    def as_given(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Result, from the computed dimensions to those that the spec asks for."""
        names, dims = self._names(number)
        return tensor.permute([names.index(name) for name in dims])

    def _names(self, number: int) -> tuple[list[str], tuple[str, ...]]:
        aux = self.spec.aux_outputs[number - 1] if number else None
        return result_names(self.spec, aux), (aux or self.spec.output).dims

    def store(self, out: torch.Tensor) -> torch.Tensor:
        """Output, from [b.., i, e] to the dimensions and memory order that the spec asks for."""
        names, dims, order = result_names(self.spec), self.spec.output.dims, self.spec.output.order
        packed = out.to(getattr(torch, self.spec.out_dtype)).permute([names.index(n) for n in order]).contiguous()
        return packed.permute([order.index(n) for n in dims])
