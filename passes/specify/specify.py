"""From a recognised attention, in terms of graph nodes, to an `AttentionSpec` and the arguments of its call."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fusion.ir import AttentionSpec, Operand, Output
from fusion.ir.expr import ONE, ROW_SUM, SCORE, Expr, I, J, Kind, coord, load, rebuild, size, walk
from fusion.ir.records import mapped
from fusion.ir.results import size_value
from fusion.ir.spec import AuxOutput, Normalizer
from fusion.lowering.rows import depends_on_maximum
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported
from ..pullback.indexing import KeySet
from ..pullback.loads import Numbers, Table
from ..pullback.operands import Access, is_row_scale
from ..pullback.pullback import Product, PullBack
from ..recognize.core import Attention, NormalizedScores
from ..recognize.find import Site
from ..recognize.infinities import filled_by_selection
from ..recognize.mixed_heads import mixing_of, with_named_heads
from .aux_outputs import AuxUse
from .masks import fold_comparisons, understand

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredKeys:
    """An attention over a set of keys, which are read through a table. table: the number of the operand that holds the
    positions. dense: the same attention with a mask of all keys."""

    table: int
    dense: AttentionCall


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """A spec and the arguments of its call.

    device: the type of the device that it runs on.
    sizes: the spec's sizes in the graph's own terms.
    tables: numbers of operands that are positions in others, which are checked before they are read.
    uses: the nodes that the auxiliary outputs replace.
    reached: numbers of the operands that autograd reaches, be it with a gradient of zero, as through `sign`.
    key_sets: `KeySet` of operands that are masks computed from positions, by number.
    differentiable: whether a gradient of an operand is needed.
    gathered: set where it reads only the keys of each row's set.
    dense_reason: why it does not, though it could.
    """

    spec: AttentionSpec
    device: str
    operands: tuple[Node, ...]
    sizes: tuple[Expr, ...]
    differentiable: bool
    tables: tuple[tuple[int, Table], ...] = ()
    uses: tuple[AuxUse, ...] = ()
    reached: frozenset[int] = frozenset()
    key_sets: tuple[tuple[int, KeySet], ...] = ()
    gathered: GatheredKeys | None = None
    dense_reason: str = ""

    def has_fixed_lengths(self) -> bool:
        """Whether the numbers of queries and keys are the same in every call."""
        values = dict(zip(self.spec.sizes, self.sizes, strict=True))
        read = [part for part in walk(self.spec.n_q, self.spec.n_k) if part.op == "size"]
        return all(values[part.name].is_const for part in read)

    def example_sizes(self, examples: Mapping[str, int]) -> dict[str, int]:
        """The example value of each size of the spec."""
        return {name: size_value(extent, examples) for name, extent in zip(self.spec.sizes, self.sizes, strict=True)}


def specify(site: Site, attention: Attention, uses: Sequence[AuxUse] = ()) -> AttentionCall:
    """The spec of one attention, with outputs for `uses`; raises `Unsupported`."""
    core = _with_scaled_values(attention, marks.requires_grad(site.root))
    products = attention.pullback.products
    main = products[_main_product(core, products)]
    accesses = (main.query, main.key, attention.value)
    for dtype in (access.dtype for access in accesses):
        if dtype not in _FLOATS:
            raise Unsupported(Reason.DTYPE, f"attention over {str(dtype).removeprefix('torch.')} tensors")
    operands = [access.node for access in accesses]
    resolve = _Resolver(products, main, attention.pullback, operands)
    accesses = tuple(resolve.access(number, access) for number, access in enumerate(accesses))
    core = _resolved(core, site, attention, resolve)
    core, accesses, head = with_named_heads(core, accesses, attention.pullback.bounds)
    aux = tuple(fold_comparisons(resolve(use.value), site.bounds | {J: attention.keys}) for use in uses)
    differentiable = marks.requires_grad(site.root) and any(marks.requires_grad(o) for o in operands)
    batch = tuple(site.bounds[coord(name)] for name in site.dims if name.startswith("b"))
    rename = _Sizes(batch, site.bounds[I], attention.keys)
    described = _describe(operands, differentiable, resolve.of_elements | resolve.tables.keys())
    spec = _spec(site, core, accesses, (main.extent, attention.d_v), described, rename, differentiable)
    spec = replace(spec, aux_outputs=tuple(_aux_outputs(spec, u, rename(e)) for u, e in zip(uses, aux, strict=True)))
    spec = _with_mixed_heads(spec, core, head, rename)
    if differentiable:
        spec = _with_gradients(spec, attention.pullback)
    names, values = rename.table(spec)
    return AttentionCall(
        spec=replace(spec, sizes=names),
        uses=tuple(uses),
        reached=_reached(site, uses, operands) if differentiable else frozenset(),
        device=nodes.fake(site.root).device.type,
        operands=tuple(operands),
        sizes=values,
        differentiable=differentiable,
        tables=tuple(resolve.tables.items()),
        key_sets=resolve.key_sets(),
    )


def _reached(site: Site, uses: Sequence[AuxUse], operands: Sequence[Node]) -> frozenset[int]:
    """Operands from which a path of nodes that autograd records leads to the results."""
    ends = {*operands}
    parents = lambda here: [] if here in ends else [node for node in here.all_input_nodes if marks.requires_grad(node)]
    reached = {*nodes.walk_up([site.root, *(use.node for use in uses)], parents)}
    return frozenset(number for number, operand in enumerate(operands) if operand in reached)


def _with_gradients(spec: AttentionSpec, walked: PullBack) -> AttentionSpec:
    """Spec for training; raises `Unsupported` where its gradients would not be those of eager mode. Rows of NaN that
    are set to zero are those without a live key where only a mask's selection makes them: a safe softmax, whose
    gradient is zero there. Else it is NaN."""
    if spec.normalizer is Normalizer.ZERO_SOFTMAX:
        if not filled_by_selection(spec.score):
            message = "weights that are NaN are set to zero after the softmax, and the gradient of such rows is NaN"
            raise Unsupported(Reason.NAN_GRADIENT, message)
        spec = replace(spec, normalizer=Normalizer.SAFE_SOFTMAX)
    if SCORE in walk(spec.weight):
        raise Unsupported(Reason.NOT_LINEAR, "weights are multiplied by a function of their scores, in training")
    if spec.row_scale is None:
        return spec
    if spec.mixing is not None:
        message = "in training, heads are mixed whose weights are normalised by another function of the row's sum"
        raise Unsupported(Reason.HEADS_MIXED, message)
    if walked.partly_detached:
        message = "the normaliser depends on the row's maximum, through which only a part of the gradient flows"
        raise Unsupported(Reason.DETACHED_MAXIMUM, message)
    if walked.takes_first and depends_on_maximum(spec):
        message = "the normaliser depends on the row's maximum, whose gradient goes to the first of equal scores"
        raise Unsupported(Reason.FIRST_MAXIMUM, message)
    return spec


def _aux_outputs(spec: AttentionSpec, use: AuxUse, value: Expr) -> AuxOutput:
    wide = "float64" if any(o.dtype == "float64" for o in spec.operands) else "float32"
    dtype = str(nodes.dtype(use.node)).removeprefix("torch.") if use.is_whole else wide
    return AuxOutput(value=value, dims=use.dims, dtype=dtype, reduction=use.reduction, over=use.over)


def _resolved(core: NormalizedScores, site: Site, attention: Attention, resolve: _Resolver) -> NormalizedScores:
    """Core in terms of the spec's operands, with the comparisons that the bounds decide replaced by their outcome."""
    bounds = site.bounds | {J: attention.keys}
    resolved = mapped(replace(core, origin=None), resolve)
    return replace(
        resolved, score=fold_comparisons(resolved.score, bounds), weight=fold_comparisons(resolved.weight, bounds)
    )


def _with_mixed_heads(spec: AttentionSpec, core: NormalizedScores, head: Expr | None, rename: _Sizes) -> AttentionSpec:
    """Spec with its mixed heads, a batch coordinate, if there are any; without a mask where every key counts."""
    if head is None:
        return replace(spec, mask=None) if spec.needs_all_keys else spec
    mixing = mapped(mixing_of(core, head), rename)
    batch = tuple(rename.values[f"B{k}"] if k == mixing.axis else extent for k, extent in enumerate(spec.batch))
    return replace(spec, batch=batch, mask=None, mixing=mixing)


def _spec(
    site: Site,
    core: NormalizedScores,
    accesses: Sequence[Access],
    widths: tuple[Expr, Expr],
    operands: tuple[Operand, ...],
    rename: _Sizes,
    differentiable: bool,
) -> AttentionSpec:
    """The spec of a resolved core; the table of its sizes is still empty. widths: d and d_v."""
    q, k, v = (tuple(map(rename, access.index)) for access in accesses)
    k_value, v_value = (mapped(access.value, rename) for access in accesses[1:])
    widest = functools.reduce(torch.promote_types, (access.dtype for access in accesses))
    dtype = str(widest).removeprefix("torch.")
    mask = understand(core.score, core.normalizer)
    return AttentionSpec(
        batch=tuple(size(f"B{k}") for k in range(len(site.dims) - 2)),
        n_q=size("Nq"),
        n_k=size("Nk"),
        d=_static(widths[0], "head dimension"),
        d_v=_static(widths[1], "width of V"),
        operands=operands,
        q=q,
        k=k,
        v=v,
        k_value=k_value,
        v_value=v_value,
        score=rename(core.score),
        weight=rename(core.weight),
        sinks=tuple(map(rename, core.sinks)),
        row_scale=mapped(core.row_scale, rename),
        normalizer=core.normalizer,
        dtype=dtype,
        out_dtype=_result_dtype(site, dtype, differentiable),
        output=Output(dims=site.dims, order=_memory_order(site)),
        mask=mapped(mask, rename),
        sizes=(),
    )


def _main_product(core: NormalizedScores, products: list[Product]) -> int:
    """The product that becomes the score; others are read from their tensors. A product that no tensor holds must be
    the score; else it is the one with the widest reduction, the most expensive to materialise."""
    score = core.score if core.mixed_scores is None else core.mixed_scores.program
    numbers = sorted({part.operand for part in walk(score) if part.op == "dot"})

    def rank(number: int) -> tuple[bool, int, int]:
        extent = products[number].extent
        width = extent.integer if extent.is_const else 0
        return not products[number].is_value, width, -number

    return max(numbers, key=rank)


def _with_scaled_values(attention: Attention, trained: bool) -> NormalizedScores:
    """Core with the scale that was stripped from V, as one of rows where possible."""
    core, scale = attention.core, attention.value_scale
    if scale is ONE:
        return core
    if (mixed := core.mixed_weights) is not None:
        return replace(core, mixed_weights=replace(mixed, program=mixed.program * scale))
    if is_row_scale(scale, core.normalizer, trained):
        return replace(core, row_scale=(core.row_scale or ONE / ROW_SUM) * scale)
    return replace(core, weight=core.weight * scale)


class _Resolver:
    """Replaces "dot" leaves and the walk's load numbers by the spec's; collects the operands."""

    def __init__(self, products: list[Product], main: Product, walked: PullBack, operands: list[Node]):
        self.products, self.main, self.walked, self.operands = products, main, walked, operands
        self.number = Numbers(operands)
        self.tables = self.number.tables
        self.of_elements: set[int] = set()

    def __call__(self, expr: Expr) -> Expr:
        return rebuild(expr, self._leaf)

    def _leaf(self, part: Expr) -> Expr | None:
        if part.op == "dot":
            product = self.products[part.operand]
            if product == self.main:
                return SCORE * self(product.scale)
            if product.node is self.main.node:
                raise Unsupported(Reason.TWO_ELEMENTS, "two different elements of one product enter the same score")
            if not product.is_value:
                raise Unsupported(
                    Reason.ADDED_TO_PRODUCT, "two products to which something is added by the same operation (baddbmm)"
                )
            return load(self.number(product.node), product.index, Kind.FLOAT)
        if part.op == "load":
            index, table = tuple(self(arg) for arg in part.args), self.walked.tables.get(part.operand)
            return load(self.number(self.walked.loaded[part.operand], table), index, part.kind)
        return None

    def access(self, position: int, access: Access) -> Access:
        """Operand number `position`, 0 to 2, in the spec's terms."""
        before = len(self.operands)

        def leaf(part: Expr) -> Expr | None:
            if part.op == "load" and self.walked.loaded[part.operand] is access.node:
                return load(position, tuple(self(arg) for arg in part.args), part.kind)
            return self._leaf(part)

        value = access.value and rebuild(access.value, leaf)
        resolved = replace(access, index=tuple(map(self, access.index)), value=value)
        self.of_elements |= set(range(before, len(self.operands)))
        return resolved

    def key_sets(self) -> tuple[tuple[int, KeySet], ...]:
        """`KeySet` of the operands that are masks, by number."""
        key_sets = self.walked.key_sets
        return tuple((number, key_sets[node]) for (node, _), number in self.number.known.items() if node in key_sets)


class _Sizes:
    """Renames the graph's symbols so that equal attentions have equal specs, whatever their names in the trace."""

    def __init__(self, batch: tuple[Expr, ...], n_q: Expr, n_k: Expr):
        self.values = {f"B{k}": extent for k, extent in enumerate(batch)} | {"Nq": n_q, "Nk": n_k}
        self.names = {value: size(name) for name, value in reversed(self.values.items()) if value.op == "size"}

    def __call__(self, expr: Expr) -> Expr:
        return rebuild(expr, self._leaf)

    def _leaf(self, part: Expr) -> Expr | None:
        if part.op != "size":
            return None
        if part not in self.names:
            name = f"n{len(self.values)}"
            self.names[part], self.values[name] = size(name), part
        return self.names[part]

    def table(self, spec: AttentionSpec) -> tuple[tuple[str, ...], tuple[Expr, ...]]:
        """Names and values of the sizes that the spec needs."""
        used = {part.attr for part in walk(*spec.expressions()) if part.op == "size"}
        items = [(name, value) for name, value in self.values.items() if name in used]
        return tuple(name for name, _ in items), tuple(value for _, value in items)


def _static(extent: Expr, what: str) -> Expr:
    if not extent.is_const:
        raise Unsupported(Reason.RUN_TIME_SCALAR, f"a {what} that is known only at run time")
    if extent.integer == 0:
        raise Unsupported(Reason.LIMIT, f"a {what} of 0")
    return extent


def _result_dtype(site: Site, dtype: str, differentiable: bool) -> str:
    """Dtype of the result. dtype: of the products. If a backward reads the result, it has the products' dtype, and is
    rounded after the call: a rounded result would give gradients an error that eager mode's do not have."""
    out = nodes.dtype(site.root) if len(site.attentions) == 1 else torch.float32
    rounds = out.itemsize < getattr(torch, dtype).itemsize
    return dtype if differentiable and rounds else str(out).removeprefix("torch.")


def _describe(operands: list[Node], differentiable: bool, of_elements: Collection[int]) -> tuple[Operand, ...]:
    """Operands named by their role, equal for equal specs. of_elements: numbers of those that K and V are made with."""
    counts: dict[str, int] = {}
    described = []
    for number, operand in enumerate(operands):
        dtype = str(nodes.dtype(operand)).removeprefix("torch.")
        if number < 3:
            name = "qkv"[number]
        else:
            roles = ("bias", "scale") if nodes.dtype(operand).is_floating_point else ("index", "table")
            role = "mask" if dtype == "bool" else roles[number in of_elements]
            counts[role] = counts.get(role, 0) + 1
            name = role if counts[role] == 1 else f"{role}{counts[role]}"
        order = nodes.memory_order(operand) if differentiable and marks.requires_grad(operand) else ()
        described.append(Operand(dtype=dtype, rank=len(nodes.shape(operand)), name=name, order=order))
    return tuple(described)


_STRIDE_AGNOSTIC = {aten.reshape, aten.contiguous, aten.linear, aten.flatten}


def _memory_order(site: Site) -> tuple[str, ...]:
    """Dimensions from slowest to fastest: packed where that is unknown, else the order of eager's result."""
    users = site.root.users
    if users and all(u.op == "call_function" and nodes.packet(u) in _STRIDE_AGNOSTIC for u in users):
        return site.dims
    return tuple(site.dims[k] for k in nodes.memory_order(site.root))
