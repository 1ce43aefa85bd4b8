"""The graph's own operations on a sample of elements: eager's values, without the tensors.

`Replay.value(node, index)` is the value of a node at sampled indices. Pointwise operations, softmaxes and reductions
run unchanged (`node.target`, in its own dtype), on the elements of their arguments at those indices. It ends at the
tensors that the attention reads, whose elements are made up (`samples`). No expression of the analysis is read.

An index is a tuple of integer tensors [samples, ...] of equal rank, one per dimension. A contraction or reduction
appends an axis over the positions that it runs over: all of them where they are few, else a sample, which the spec's
program (`program`) takes as well. Views are run on a tensor without data: torch's own strides and offset then say which
element is which. Operations that copy elements along single dimensions (repeat, flip, roll) are run on the numbers of
one dimension at a time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.ir.results import packed_strides, size_value
from fusion.passes import marks, nodes
from fusion.passes.pullback import pointwise, views
from fusion.passes.pullback.heads import head_sum
from fusion.passes.pullback.loads import constant_value
from fusion.passes.trace.aliases import may_copy
from fusion.torch_private.tensors import FakeTensor, shares_storage
from fusion.validation.samples import Role, Samples

Index = tuple[Tensor, ...]
MOST_ELEMENTS = 1 << 24
"""Elements of the lines that an operation along a dimension is replayed on."""


class NotReplayable(Exception):
    """A call that cannot be run on a sample of its elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Replayed part of the graph for one site.

    root, anchor: the last node of the region, and the product with V.
    keys: [samples, keys], the sampled ones of n_k.
    leaves: tensors whose elements are made up.
    attended: those that are V, and neither Q nor K.
    interior: nodes that the analysis looked into.
    roles: of the leaves that are more than a bias or a mask.
    examples: example values of symbols.
    maps: of indices, per view.
    numbers: of the tensors that were read.
    unknown: operations within the region that cannot be replayed, and why. Their results are made up as well: programs
        that agree for any values agree for the true ones, but a difference then says nothing.
    """

    root: Node
    anchor: Node
    keys: Tensor
    n_k: int
    leaves: frozenset[Node]
    attended: frozenset[Node]
    interior: frozenset[Node]
    roles: Mapping[Node, Role]
    examples: Mapping[str, int]
    samples: Samples
    maps: dict[Node, Any] = field(default_factory=dict)
    numbers: dict[Node, int] = field(default_factory=dict)
    unknown: dict[Node, str] = field(default_factory=dict)

    def shape(self, node: Node) -> tuple[int, ...]:
        return tuple(size_value(extent, self.examples) for extent in nodes.shape(node))

    @property
    def precision(self) -> torch.dtype:
        """The dtype of the product of weights and V."""
        return nodes.dtype(self.anchor)

    def is_leaf(self, node: Node) -> bool:
        """Whether a tensor is read directly: an operand, or a value that its operation does not determine."""
        if node is self.root:  # before anything changes it
            return False
        changed = any(by < self.root for by in marks.mutations(node))  # what changes it later is not seen here
        changed = changed and (may_copy(node) or nodes.writes(node))  # a view of it is read
        made_elsewhere = changed or marks.is_seed(node) or node.op == "placeholder"
        return bool(node in self.leaves or made_elsewhere or marks.attention_root(node))

    def positions(self, extent: int) -> Tensor:
        """Positions of a contraction that are summed over: all or a sample, the same for all."""
        if extent <= 6:
            return torch.arange(extent)
        return torch.tensor([0, 1, extent // 3, (2 * extent) // 3 + 1, extent - 1]).unique()


@dataclass(slots=True, kw_only=True)
class Read:
    """Elements of a leaf that were read: their numbers, and their values, which autograd records."""

    leaf: Node
    numbers: Tensor
    values: Tensor


def within(positions: Tensor, extent: int) -> Tensor:
    """Positions along a dimension, counted from its start; drawn ones beyond it are brought into it."""
    return positions.to(torch.int64).remainder(extent)


class Replay:
    """One run. least: the dtype in which floats of narrower dtypes are computed. nudge: a number for each way of
    changing the last digits of Q, K and V; 0 for none."""

    def __init__(self, region: Region, least: torch.dtype = torch.float16, nudge: int = 0):
        self.region, self.least, self.nudge = region, least, nudge
        self.reads: list[Read] = []
        self._memo: dict[tuple, tuple[Tensor, Index]] = {}
        self.zero = torch.zeros((), dtype=torch.int64)
        self.number = functools.cache(torch.tensor)

    def value(self, node: Node, index: Index, rank: int) -> Tensor:
        """The elements of `node` at `index`, as a tensor of `rank` axes."""
        key = (node, rank, *map(id, index))
        if key not in self._memo:
            self._memo[key] = self._value(node, index, rank), index
        return self._memo[key][0]

    def _value(self, node: Node, index: Index, rank: int) -> Tensor:
        region = self.region
        if region.is_leaf(node):
            return self._leaf(node, index, rank)
        if (rule := rule_of(node)) is not None:
            try:
                result = rule(self, node, index, rank)
                return result.detach() if marks.stop_gradient(node) else result
            except NotReplayable:
                pass
        if nodes.is_tensor(node) and (constant := constant_value(node)) is not None:
            return self.cast(constant[index] if index else constant.view([1] * rank))
        if node.op == "call_function" and (rule is not None or node in region.interior):
            region.unknown.setdefault(node, f"{node.target} is not replayed")
        return self._leaf(node, index, rank)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which floats of a dtype are computed in this run."""
        narrower = dtype.is_floating_point and dtype.itemsize <= self.least.itemsize and self.least is not torch.float16
        return self.least if narrower else dtype

    def cast(self, value: Tensor) -> Tensor:
        return value.to(self.dtype(value.dtype))

    def _leaf(self, node: Node, index: Index, rank: int) -> Tensor:
        region = self.region
        number = region.numbers.setdefault(node, len(region.numbers))
        flat = number_of(index, region.shape(node))
        flat = flat.view([1] * (rank - flat.dim()) + list(flat.shape)) if flat.dim() < rank else flat
        dtype = nodes.dtype(node)
        role = region.roles.get(node, Role.OTHER)
        values = region.samples.values(number, flat, dtype, role)
        if self.nudge and role is Role.FACTOR and dtype.is_floating_point:
            drawn = region.samples.values(-self.nudge, flat, torch.float32, Role.FINITE)
            values = region.samples.nudged(values, torch.finfo(dtype).eps * drawn, node not in region.attended)
        values = values.to(self.dtype(dtype))
        if dtype.is_floating_point:
            if marks.requires_grad(node) and node not in region.unknown:
                values.requires_grad_()
            self.reads.append(Read(leaf=node, numbers=flat.expand(values.shape), values=values))
        return values

    # Arguments of a call

    def argument(self, value: Any, index: Index, extents: tuple[int, ...], rank: int) -> Any:
        """An argument of a pointwise call at `index` of its result, of shape `extents`."""
        if nodes.is_tensor(value):
            return self.value(value, self.broadcast(index, extents, self.region.shape(value)), rank)
        return self.plain(value)

    def plain(self, value: Any) -> Any:
        """An argument that is no tensor: sizes have the example's values, every device is the CPU."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.plain(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.dtype):
            return self.dtype(value)
        fake = nodes.fake(value)
        if isinstance(fake, torch.SymInt):
            return size_value(nodes.size_expr(fake), self.region.examples)
        if isinstance(fake, (torch.SymFloat, torch.SymBool)):
            return fake.node.hint
        if isinstance(value, Node) and not isinstance(fake, (int, float, bool)):
            raise NotReplayable
        return fake

    def broadcast(self, index: Index, new: tuple[int, ...], old: tuple[int, ...]) -> Index:
        """The index into a tensor of shape `old` that is broadcast to `new`."""
        own = index[len(new) - len(old) :]
        wide = new[len(new) - len(old) :]
        return tuple(self.zero if o == 1 != n else e for e, o, n in zip(own, old, wide, strict=True))

    def further(self, index: Index) -> Index:
        """Index with one more axis at the end."""
        return tuple(entry.unsqueeze(-1) if entry.dim() else entry for entry in index)


Rule = Callable[[Replay, Node, Index, int], Tensor]
RULES: dict[Any, Rule] = {}
"""Overload packet -> how a call of it is replayed."""
rule = nodes.rules(RULES)


def rule_of(node: Node) -> Rule | None:
    """Replay rule of a node; None where it has none."""
    if node.op == "get_attr":
        return RULES["literal"] if literal(node) is not None else None
    if node.op != "call_function" or not nodes.is_tensor(node):
        return None
    packet = nodes.packet(node)
    if head_sum(node) is not None:
        return RULES["heads"]
    if (rule := RULES.get(packet, RULES.get(node.target))) is not None:
        return rule
    if packet is not None and (packet in pointwise.BUILDERS or torch.Tag.pointwise in node.target.tags):  # type: ignore
        return RULES["pointwise"]
    return None


def literal(node: Node) -> Tensor | None:
    """The value of a constant of the graph, if a node is one."""
    tensor = nodes.lifted(node)
    return None if isinstance(tensor, FakeTensor) else tensor


@rule("literal")
def _literal(replay: Replay, node: Node, index: Index, rank: int) -> Tensor:
    tensor = literal(node)
    assert tensor is not None
    return replay.cast(tensor.detach().cpu()[index] if index else tensor.detach().cpu().view([1] * rank))


aten = torch.ops.aten
ALONG_DIMENSIONS = {aten.repeat, aten.tile, aten.repeat_interleave, aten.flip, aten.roll}
RESHAPES = {
    *views.RESHAPES, *views.EXPANSIONS, aten.permute, aten.transpose, aten.swapaxes, aten.swapdims, aten.t, aten.mT,
    aten.numpy_T, aten.adjoint, aten.movedim, aten.moveaxis, aten.unsqueeze, aten.squeeze, aten.slice, aten.narrow,
    aten.select, aten.unfold, aten.diagonal,
}  # fmt: skip


def number_of(index: Index, shape: Sequence[int]) -> Tensor:
    """The number of an element in a packed tensor."""
    return _sum([entry * stride for entry, stride in zip(index, packed_strides(shape), strict=True)])


def _sum(parts: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts) if parts else torch.zeros(1, dtype=torch.int64)


def of_view(run: Callable[[Tensor], Any], shape: Sequence[int], item: int | None) -> Callable[[Index], Index] | None:
    """Map from indices of a view to those of its input; None where the operation copies instead. run: the operation on
    a tensor of `shape`. item: the number of the result, where there are several."""
    base = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
    result = run(base)
    result = result if item is None else operator.getitem(result, item)
    if not shares_storage(result, base) or result.dtype is not base.dtype:
        return None
    entries = [
        _entry(extent, stride, result.shape, result.stride(), result.storage_offset())
        for extent, stride in zip(shape, packed_strides(shape), strict=True)
    ]
    return lambda index: tuple(entry(index) for entry in entries)


def _entry(
    extent: int, stride: int, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Callable[[Index], Tensor]:
    """Index along one dimension (its extent and stride) of a packed tensor, from indices of a view of it. Only the
    indices that it depends on are read: one that views broadcast would have the size of all others together."""
    whole = max(extent, 1) * stride
    terms = [(k, s) for k, s in enumerate(strides) if shape[k] > 1 and s % whole]
    offset %= whole
    if offset % stride + sum((shape[k] - 1) * s for k, s in terms if s % stride) < stride:  # carries nothing
        terms, offset = [(k, s // stride) for k, s in terms if s % stride == 0], offset // stride
        whole, stride = whole // stride, 1
    within = offset + sum((shape[k] - 1) * s for k, s in terms) < whole
    if within and (offset, stride) == (0, 1) and [s for _, s in terms] == [1]:
        return lambda index: index[terms[0][0]]

    def entry(index: Index) -> Tensor:
        number = _sum([index[k] * s for k, s in terms]) + offset
        place = torch.div(number, stride, rounding_mode="floor") if stride > 1 else number
        return place if within else place % max(extent, 1)

    return entry


def along_dimensions(run: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Callable[[Index], Index]:
    """Map from indices of the result to those of the input, where elements move along each dimension separately."""
    tables = []
    for dim, extent in enumerate(shape):
        numbers = torch.arange(extent).view([-1 if k == dim else 1 for k in range(len(shape))])
        tables.append(_line(run(numbers), dim - len(shape)))
    last = lambda index: index[len(index) - len(shape) :]
    return lambda index: tuple(table[entry] for table, entry in zip(tables, last(index), strict=True))


def _line(result: Tensor, dim: int) -> Tensor:
    """The elements of a result along one dimension, from the end, where all others are at 0."""
    for k in range(-result.dim(), 0):
        if k != dim:
            result = result.narrow(k, 0, 1)
    return result.flatten()
