"""Pull-back: the value of one element of a tensor, as an expression at symbolic coordinates.

`PullBack.value(node, index)` walks upstream from `node[index]`. Views transform the index, pointwise operations build
expression nodes, `arange`, `tril` and comparisons become integers and predicates, a product of something that
depends on the query row with something that depends on the key column becomes a "dot" leaf, softmax and reductions
over the keys become "softmax" and "reduce" nodes; anything else is a load from the tensor that the graph computes
anyway. No pattern of operations is ever matched.

Besides the operations of `fusion.ir.ops` such expressions contain, until `fusion.passes.recognize` has resolved them,

    dot          attr: number in `PullBack.products`
    softmax      attr: "softmax" or "safe_softmax"; args: the score at key J, then further columns (sinks)
    reduce       attr: "sum", "max" or "logsumexp"; args likewise; binds the coordinate J

One file over the usual length: the walk is one class, a method for each kind of operation.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import FALSE, TRUE, C, Expr, I, J, Kind, const, coordinates, load, node, walk
from fusion.ir.ops import apply, where
from fusion.passes import elementary as elementary  # adds to what `pointwise` knows
from fusion.passes import nodes, pointwise
from fusion.passes.contractions import Factors, factors, is_contraction, strip_scale
from fusion.passes.folding import folded
from fusion.passes.nodes import Unsupported, arguments, packet, shape
from fusion.passes.normalize import MAYBE_ALIAS
from fusion.passes.views import Index, broadcast_index, source

aten = torch.ops.aten
MAX_SINKS = 4
_SOFTMAX = {aten.softmax, aten._softmax, aten.special_softmax, aten._safe_softmax}
_LOG_SOFTMAX = {aten.log_softmax, aten._log_softmax, aten.special_log_softmax}
_REDUCTIONS = {aten.sum: "sum", aten.amax: "max", aten.logsumexp: "logsumexp", aten.special_logsumexp: "logsumexp"}
_HEAVY = {"exp": 1, "tanh": 1, "sigmoid": 1, "sqrt": 1, "rsqrt": 1, "pow": 3, "log": 2, "log1p": 2, "expm1": 2,
          "sin": 3, "cos": 3, "erf": 2, "atan": 3}  # fmt: skip
_MAX_HEAVY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operand of a product: the tensor it is read from, and the index in each of its dimensions."""

    node: Node
    index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A "dot" leaf: sum over c < extent of query[.., i, c] * key[.., j, c]; `node[index]` holds it in the graph."""

    node: Node
    index: Index
    query: Access
    key: Access
    extent: Expr


class PullBack:
    """One walk, for one site. `keys` is the number of keys (columns J) that the product with V sums over."""

    def __init__(self, bounds: dict[Expr, Expr], keys: Expr):
        self.bounds = bounds
        self.keys = keys
        self.products: list[Product] = []
        self.loaded: list[Node] = []
        self.interior: dict[Node, None] = {}
        self.detached_maximum = False
        self._memo: dict[tuple[Node, Index], Expr] = {}

    # --- walking ------------------------------------------------------------------------------------------------

    def value(self, here: Node, index: Index) -> Expr:
        """The element `here[index]`."""
        key = (here, index)
        if key not in self._memo:
            try:
                self._memo[key] = self._value(here, index)
            except Unsupported as problem:
                problem.node = problem.node or here
                raise
        return self._memo[key]

    def suspect(self, problem: Unsupported) -> Node | None:
        """The node at fault for a problem with what the walk has found: that of the expression in question, or else the
        last tensor that had to be taken as it is although a product of two tensors went into it."""
        if problem.expr is not None:
            for (here, _), expr in self._memo.items():
                if expr is problem.expr:
                    return here
        taken = [here for here in self.loaded if here.op == "call_function" and is_made_from_product(here)]
        return max(taken, default=None)

    def _value(self, here: Node, index: Index) -> Expr:
        if (moved := self._step(here, index, self.bounds)) is not None:
            self.interior[here] = None
            return self.value(*moved)
        if here.meta.get("mutations") or here.meta.get("attention_root"):
            result = None
        elif here.meta.get("stop_gradient"):
            result = self._maximum_without_gradient(here, index)
        else:
            result = self._computed(here, index)
        if result is None:
            known = folded(here, index)
            return self.load(here, index) if known is None else known
        if not _depends_on_product(result) and self._too_heavy(result):
            return self.load(here, index)
        self.interior[here] = None
        return result

    def _step(self, here: Node, index: Index, bounds: dict[Expr, Expr]) -> tuple[Node, Index] | None:
        """One step through a view. Not through a possible copy of memory that is changed in place, nor through the
        result of another attention: that is what the graph will hold, not the product before it."""
        if here.meta.get("attention_root"):
            return None
        if here.meta.get("mutations") and packet(here) in MAYBE_ALIAS:
            return None
        return source(here, index, bounds)

    def load(self, here: Node, index: Index) -> Expr:
        """A load of an element of a tensor that the graph computes, from the view's origin where it is one."""
        kind = pointwise.kind_of(nodes.dtype(here))
        if kind is None:
            raise Unsupported(f"values of dtype {nodes.dtype(here)}")
        if here not in self.loaded:
            self.loaded.append(here)
        return load(self.loaded.index(here), index, kind)

    def locate(self, here: Node, index: Index, row: Expr, column: Expr, extent: Expr) -> tuple[Access, float]:
        """The tensor that an operand of a product is read from, looking through views, copies and constant scales.

        Goes no further than the index stays linear in `row` and `column` (< extent): a window partition, say, is read
        from the tensor that it makes. Returns the scale that was passed over.
        """
        bounds = self.bounds | {column: extent}
        found, scale, found_scale = None, 1.0, 1.0
        while True:
            if _linear_in(index, row, column):
                found, found_scale = Access(node=here, index=index), scale
            opaque = here.meta.get("mutations") or here.meta.get("attention_root")
            stripped, factor = (here, 1.0) if opaque else strip_scale(here)
            if stripped is not here and column is C:
                here, scale = stripped, scale * factor
                continue
            if (moved := self._step(here, index, bounds)) is None:
                break
            self.interior[here] = None
            here, index = moved
        if found is None:
            raise Unsupported("an operand of the product is indexed in a way that is not linear in its row and column")
        return found, found_scale

    def argument(self, value: Any, index: Index, extents: Sequence[Expr]) -> Any:
        """An argument of a pointwise call at `index` of its result of shape `extents`."""
        if not isinstance(value, Node):
            return value
        held = nodes.value(value)
        if isinstance(held, torch.Tensor):
            return self.value(value, broadcast_index(extents, shape(value), index))
        if isinstance(held, (torch.SymInt, int)):
            return nodes.size_expr(held)
        if isinstance(plain := nodes.number(value), float):
            return plain
        raise Unsupported(f"a scalar that is computed at run time ({value.name})")

    # --- operations ---------------------------------------------------------------------------------------------

    def _computed(self, here: Node, index: Index) -> Expr | None:
        """The element as an expression, or None where it is to be loaded."""
        if here.op != "call_function":
            return _literal(here)
        kind = packet(here)
        if kind in pointwise.BUILDERS:
            return self._pointwise(here, index)
        if is_contraction(here):
            return self._contraction(here, index)
        if kind in _SOFTMAX:
            safe = kind is aten._safe_softmax
            return self._over_keys("softmax", "safe_softmax" if safe else "softmax", here, index)
        if kind in _LOG_SOFTMAX:
            inner = self._over_keys("softmax", "softmax", here, index)
            return apply("log", inner) if inner is not None else None
        if kind in _REDUCTIONS:
            return self._reduction(_REDUCTIONS[kind], here, index)
        method = _METHODS.get(kind)
        return getattr(self, method)(here, index) if method else _created(here, index)

    def _pointwise(self, here: Node, index: Index) -> Expr | None:
        extents = shape(here)
        if any(nodes.is_tensor(arg) and len(shape(arg)) > len(extents) for arg in here.all_input_nodes):
            return None  # a reduction of the same name: max()
        args = tuple(self.argument(arg, index, extents) for arg in here.args)
        kwargs = {name: self.argument(arg, index, extents) for name, arg in here.kwargs.items()}
        if kwargs.get("out") is not None:
            return None
        return pointwise.build(packet(here), pointwise.Call(args=args, kwargs=kwargs, dtype=nodes.dtype(here)))

    def _maximum_without_gradient(self, here: Node, index: Index) -> Expr | None:
        """What no gradient flows through is loaded, but for `x.amax(-1).detach()`: a softmax ignores its shift."""
        origin = here.all_input_nodes[0]
        if packet(here) not in (aten.detach, aten.alias) or not nodes.is_tensor(origin):
            return None
        result = self.value(origin, index)
        if result.op != "reduce" or result.attr != "max":
            return None
        self.detached_maximum = True
        return result

    def _cast(self, here: Node, index: Index) -> Expr | None:
        origin = arguments(here)["self"]
        return pointwise.cast(self.value(origin, index), nodes.dtype(here))

    def _dropout(self, here: Node, index: Index) -> Expr | None:
        """Dropout of scores or weights; that of anything else is computed by the graph and loaded."""
        args = arguments(here)
        value = self.value(next(a for a in here.args if isinstance(a, Node)), index)
        if not args.get("train", True) or args.get("p", 0.5) == 0:
            return value
        if not _depends_on_product(value):
            return None
        return apply("fmul", value, self.kept(here, args["p"], index, shape(here)))

    def kept(self, here: Node, p: float, index: Index, extents: Index) -> Expr:
        """1 / (1 - p) where dropout keeps the element at `index` of a tensor of shape `extents`, else 0.

        The element's number within the tensor, and the node's own seed, decide: row and column are hashed one after
        the other, so
        that all but a few instructions are done once per row.
        """
        if "seed" not in here.meta or not isinstance(p, (int, float)):
            raise Unsupported("dropout of a kind, or with a probability, that is not known at compile time")
        if p >= 1:
            return const(0.0)
        seed = self.load(here.meta["seed"], (integers.integer(0),))
        row: Expr = integers.integer(0)
        for entry, extent in zip(index[:-1], extents[:-1], strict=True):
            row = integers.add(integers.mul(row, extent), entry)
        drawn = apply("hash", apply("hash", seed, row), index[-1])
        keep = apply("ilt", drawn, integers.integer(round((1 - p) * 2**31)))
        return where(keep, const(1 / (1 - p)), const(0.0))

    def _native_dropout(self, here: Node, index: Index) -> Expr | None:
        return self._dropout(here, index)

    def _item(self, here: Node, index: Index) -> Expr | None:
        """Item 0 of native_dropout and of max(dim)."""
        if here.target is not operator.getitem:
            return None
        origin, item = here.args
        if not isinstance(origin, Node) or item != 0:
            return None
        if packet(origin) is aten.native_dropout:
            return self._dropout(origin, index)
        if packet(origin) is aten.max:
            return self._reduction("max", origin, index)
        return None

    def _contraction(self, here: Node, index: Index) -> Expr | None:
        if not nodes.dtype(here).is_floating_point:
            return None
        try:
            parts = factors(here, index, C)
        except Unsupported:
            return None
        found = self._query_and_key(parts)
        if found is None:
            return None
        (query, query_scale), (key, key_scale) = found
        scale = query_scale * key_scale
        if not (self._varies(query.index, I) and self._varies(key.index, J)):
            return None
        if nodes.dtype(query.node) != nodes.dtype(here) or nodes.dtype(key.node) != nodes.dtype(here):
            return None
        nodes.specialize(nodes.value(parts.left).shape[_position(parts.left_index, C)])
        product = Product(node=here, index=index, query=query, key=key, extent=parts.extent)
        if product not in self.products:
            self.products.append(product)
        result = node("dot", (), Kind.FLOAT, self.products.index(product))
        result = apply("fmul", result, const(scale)) if scale != 1.0 else result
        return self._baddbmm(here, index, result) if packet(here) is aten.baddbmm else result

    def _query_and_key(self, parts: Factors) -> tuple[tuple[Access, float], tuple[Access, float]] | None:
        """The factor that depends on the row, then that which depends on the key; None if they mix."""
        sides = ((parts.left, parts.left_index), (parts.right, parts.right_index))
        for (left, left_index), (right, right_index) in (sides, sides[::-1]):
            try:
                query = self.locate(left, left_index, I, C, parts.extent)
                return query, self.locate(right, right_index, J, C, parts.extent)
            except Unsupported:
                continue
        return None

    def _varies(self, index: Index, atom: Expr) -> bool:
        """Whether an operand depends on its row; a dimension of size 1 may have lost its coordinate."""
        return any(str(atom.attr) in coordinates(e) for e in index) or self.bounds[atom] is integers.integer(1)

    def _baddbmm(self, here: Node, index: Index, result: Expr) -> Expr:
        args = arguments(here)
        if args["alpha"] != 1:
            result = apply("fmul", result, const(float(args["alpha"])))
        if args["beta"] == 0:
            return result
        added = self.argument(args["self"], index, shape(here))
        call = pointwise.Call(args=(result, added), kwargs={"alpha": args["beta"]}, dtype=nodes.dtype(here))
        combined = pointwise.build(aten.add, call)
        assert combined is not None
        return combined

    def _over_keys(self, op: str, attr: str, here: Node, index: Index) -> Expr | None:
        """A softmax whose dimension `dim` is at key J (further columns, which the product never reads, are sinks)."""
        args = arguments(here)
        origin = args["self"]
        dim = nodes.normalize_dim(args["dim"], len(index))
        extent = shape(origin)[dim]
        # With a single key, J is 0, and a reshape may have said so.
        single = self.keys is integers.integer(1) and index[dim].is_const
        offset = index[dim] if single else integers.sub(index[dim], J)
        if not offset.is_const:
            return None
        columns = self._columns(origin, index, dim, extent, int(offset.attr))  # type: ignore[arg-type]
        if columns is None:
            return None
        if (dtype := args.get("dtype")) is not None:  # the scores are cast before the softmax
            columns = tuple(pointwise.cast(column, dtype) for column in columns)
        return node(op, columns, Kind.FLOAT, attr)

    def _columns(self, origin: Node, index: Index, dim: int, extent: Expr, offset: int) -> tuple[Expr, ...] | None:
        """The value at key J, then those of the columns before and after the keys' (constant few)."""
        further = integers.sub(extent, self.keys)
        if not further.is_const or not 0 <= int(further.attr) <= MAX_SINKS:  # type: ignore[arg-type]
            return None
        count = int(further.attr)  # type: ignore[arg-type]
        if not 0 <= offset <= count:
            return None

        def at(position: int | Expr) -> Expr:
            return self.value(origin, (*index[:dim], integers.integer(position), *index[dim + 1 :]))

        before = [at(column) for column in range(offset)]
        after = [at(integers.add(self.keys, offset + column)) for column in range(count - offset)]
        return (at(integers.add(J, offset)), *before, *after)

    def _reduction(self, name: str, here: Node, index: Index) -> Expr | None:
        """A sum, maximum or logsumexp over one dimension, taken to be over the keys (else nothing will match it)."""
        args = arguments(here)
        origin, dims = args["self"], args.get("dim")
        rank = len(shape(origin))
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        if len(dims) != 1 or any("j" in coordinates(part) for part in index):
            return None
        dim = nodes.normalize_dim(dims[0], rank)
        inner = index if args.get("keepdim") else (*index[:dim], integers.integer(0), *index[dim:])
        further = integers.sub(shape(origin)[dim], self.keys)
        if not further.is_const:
            return None
        # Sinks stand before or after the keys: whichever resolves.
        for offset in sorted({0, int(further.attr)}):  # type: ignore[arg-type]
            columns = self._columns(origin, inner, dim, shape(origin)[dim], offset)
            if columns is not None and any(_depends_on_product(c) for c in columns[:1]):
                return node("reduce", columns, Kind.FLOAT, name)
        return None

    def _triangle(self, here: Node, index: Index) -> Expr | None:
        args = arguments(here)
        value = self.value(args["self"], index)
        diagonal = nodes.size_expr(args["diagonal"])
        limit = integers.add(index[-2], diagonal)
        lower = packet(here) is aten.tril
        keep = apply("ile", index[-1], limit) if lower else apply("ile", limit, index[-1])
        if value.kind is Kind.BOOL:
            return apply("and", keep, value)
        return where(keep, value, const(0, value.kind))

    def _cumsum(self, here: Node, index: Index) -> Expr | None:
        """A running sum of one constant, such as of a comparison that is false everywhere."""
        args = arguments(here)
        dim = nodes.normalize_dim(args["dim"], len(index))
        if nodes.dtype(here).is_floating_point:
            return None
        value = self.value(args["self"], index)
        if not value.is_const:
            return None
        return integers.mul(int(value.attr), integers.add(index[dim], 1))  # type: ignore[arg-type]

    def _diff(self, here: Node, index: Index) -> Expr | None:
        """Differences of neighbours that are the same everywhere, that to what was put in front included."""
        args = arguments(here)
        origin, front = args["self"], args.get("prepend")
        dim = nodes.normalize_dim(args.get("dim", -1), len(index))
        if args.get("n", 1) != 1 or args.get("append") is not None or nodes.dtype(here).is_floating_point:
            return None

        def at(tensor: Node, place: Expr) -> Expr:
            return self.value(tensor, (*index[:dim], place, *index[dim + 1 :]))

        here_at = index[dim] if front is not None else integers.add(index[dim], 1)
        step = integers.sub(at(origin, here_at), at(origin, integers.sub(here_at, 1)))
        if not step.is_const or front is None:
            return step if step.is_const else None
        if shape(front)[dim] is not integers.integer(1):
            return None
        zero = integers.integer(0)
        return step if integers.sub(at(origin, zero), at(front, zero)) is step else None

    def _cat(self, here: Node, index: Index) -> Expr | None:
        """The piece that the index falls into, where the bounds of the coordinates tell."""
        args = arguments(here)
        tensors = [t for t in args["tensors"] if shape(t) != (integers.integer(0),)]
        dim = nodes.normalize_dim(args.get("dim", 0), len(index))
        position = index[dim]
        for tensor in tensors:
            extent = shape(tensor)[dim]
            if integers.is_below(position, extent, self.bounds):
                return self.value(tensor, (*index[:dim], position, *index[dim + 1 :]))
            position = integers.sub(position, extent)
            if not integers.is_nonnegative(position, self.bounds):
                return None
        return None

    def _stack(self, here: Node, index: Index) -> Expr | None:
        args = arguments(here)
        dim = nodes.normalize_dim(args.get("dim", 0), len(index))
        if not index[dim].is_const:
            return None
        return self.value(args["tensors"][int(index[dim].attr)], (*index[:dim], *index[dim + 1 :]))  # type: ignore[arg-type]

    def _pad(self, here: Node, index: Index) -> Expr | None:
        args = arguments(here)
        origin, pad = args["self"], args["pad"]
        extents, moved = shape(origin), list(index)
        inside = const(True)
        for k in range(len(pad) // 2):
            dim = len(index) - 1 - k
            low, high = (nodes.size_expr(p) for p in pad[2 * k : 2 * k + 2])
            zero = integers.integer(0)
            if low is zero and high is zero:
                continue
            moved[dim] = integers.sub(index[dim], low)
            if not integers.never_negative(moved[dim], self.bounds):
                inside = apply("and", inside, apply("ile", zero, moved[dim]))
            if not integers.is_below(moved[dim], extents[dim], self.bounds):
                inside = apply("and", inside, apply("ilt", moved[dim], extents[dim]))
        kind = pointwise.kind_of(nodes.dtype(here))
        if args.get("mode", "constant") != "constant" or kind in (None, Kind.BOOL):
            return None
        fill = const(args.get("value") or 0, kind)
        if inside is FALSE:
            return fill
        value = self.value(origin, tuple(moved))
        if inside is not TRUE and any(part.op == "load" for part in walk(value)):
            return None  # a load outside its tensor would be evaluated before it is discarded
        return where(inside, value, fill)

    def _index_put(self, here: Node, index: Index) -> Expr | None:
        """`scores[mask] = number`, for a mask of whole dimensions."""
        args = arguments(here)
        masks = [(k, t) for k, t in enumerate(args["indices"]) if t is not None]
        if len(masks) != 1 or nodes.dtype(masks[0][1]) is not torch.bool or args.get("accumulate"):
            return None
        if len(shape(args["values"])) > 0:
            return None
        first, mask = masks[0]
        chosen = self.value(mask, index[first : first + len(shape(mask))])
        call = pointwise.Call(
            args=(self.value(args["self"], index), chosen, self.value(args["values"], ())),
            kwargs={},
            dtype=nodes.dtype(here),
        )
        return pointwise.build(aten.masked_fill, call)

    def _index(self, here: Node, index: Index) -> Expr | None:
        """Indexing by tensors of positions that are known integer expressions, as in `mask[batch_idx, kv_idx]`."""
        args = arguments(here)
        origin, tensors = args["self"], args["indices"]
        given = [t for t in tensors if t is not None]
        if any(not nodes.is_tensor(t) or nodes.dtype(t) not in (torch.int64, torch.int32) for t in given):
            return None
        first = next(k for k, t in enumerate(tensors) if t is not None)
        if any(t is None for t in tensors[first : first + len(given)]):
            return None
        rank = max(len(shape(t)) for t in given)
        extents = shape(here)
        own, common = index[first : first + rank], extents[first : first + rank]
        positions = [self.value(t, broadcast_index(common, shape(t), own)) for t in given]
        origin_shape = shape(origin)
        for k, position in enumerate(positions):
            if not integers.is_below(position, origin_shape[first + k], self.bounds):
                return None
        return self.value(origin, (*index[:first], *positions, *index[first + rank :]))

    def _too_heavy(self, result: Expr) -> bool:
        """Whether an expression free of scores is better read from the tensor that the graph can compute once.

        Only what depends on both i and j is evaluated N_q * N_k times: more than one load or more than a couple of
        transcendental functions there cost more than one load.
        """
        if not {"i", "j"} <= coordinates(result):
            return False
        heavy = reads = 0
        for part in walk(result):
            if part.op in _HEAVY or part.op == "load":
                both = {"i", "j"} <= coordinates(part)
                heavy += _HEAVY.get(part.op, 0) * both
                reads += part.op == "load" and both
        return heavy > _MAX_HEAVY or (reads > 1 and result.kind is Kind.FLOAT)


_METHODS = {
    aten.to: "_cast", aten._to_copy: "_cast", aten.type_as: "_cast",
    aten.dropout: "_dropout", aten.native_dropout: "_native_dropout", aten.feature_dropout: "_dropout",
    aten.tril: "_triangle", aten.triu: "_triangle", aten.cat: "_cat", aten.concat: "_cat", aten.stack: "_stack",
    aten.constant_pad_nd: "_pad", aten.pad: "_pad", aten.index: "_index",
    aten.index_put: "_index_put",
    aten.cumsum: "_cumsum", aten.diff: "_diff", None: "_item",
}  # fmt: skip


def is_made_from_product(node: Node) -> bool:
    """Whether a product of two tensors is met on the way up from a node, before any linear layer."""
    seen, stack = set(), [node]
    while stack:
        here = stack.pop()
        if here in seen or here.op != "call_function":
            continue
        seen.add(here)
        if is_contraction(here):
            return True
        if packet(here) not in (aten.linear, aten.addmm, aten.layer_norm, aten.embedding):
            stack.extend(here.all_input_nodes)
    return False


def _position(index: Index, atom: Expr) -> int:
    return next(k for k, entry in enumerate(index) if entry is atom)


def _depends_on_product(expr: Expr) -> bool:
    return any(part.op == "dot" for part in walk(expr))


def _linear_in(index: Index, row: Expr, column: Expr) -> bool:
    """Whether every entry is a constant times `row` plus a constant times `column` plus a function of the batch."""
    for entry in index:
        for atom in (row, column):
            parts = integers.linear(entry, atom)
            if parts is None or not parts[0].is_const:
                return False
            entry = parts[1]
        if coordinates(entry) & {"i", "j", "c", "e"}:
            return False
    return True


def _literal(here: Node) -> Expr | None:
    """A tensor constant of one element that the trace lifted into the graph."""
    if here.op != "get_attr" or not str(here.target).startswith(("_tensor_constant", "lifted_tensor", "_lifted")):
        return None
    tensor = here.graph.owning_module
    for part in str(here.target).split("."):
        tensor = getattr(tensor, part)
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.dtype.is_complex:
        return None
    kind = pointwise.kind_of(tensor.dtype)
    return const(tensor.item(), kind)


_FILLED = {aten.zeros: 0, aten.ones: 1, aten.zeros_like: 0, aten.ones_like: 1, aten.new_zeros: 0, aten.new_ones: 1}


def _created(here: Node, index: Index) -> Expr | None:
    """Tensors made from nothing: arange, zeros, full, eye, ..."""
    kind = packet(here)
    dtype = pointwise.kind_of(nodes.dtype(here))
    if dtype is None:
        return None
    args = arguments(here)
    if kind in _FILLED:
        return const(_FILLED[kind], dtype)
    if kind in (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        fill = args.get("fill_value", args.get("s"))
        if isinstance(fill, Node):
            fill = nodes.value(fill)
        if not isinstance(fill, (bool, int, float)):
            return None
        return pointwise.cast(const(fill), nodes.dtype(here))
    if kind is aten.arange:
        start, step = args.get("start", 0), args.get("step", 1)
        if dtype is Kind.INT:
            return integers.add(nodes.size_expr(start), integers.mul(nodes.size_expr(step), index[0]))
        if isinstance(start, (int, float)) and isinstance(step, (int, float)):
            scaled = apply("fmul", apply("to_float", index[0]), const(float(step)))
            return apply("fadd", scaled, const(float(start)))
    if kind is aten.eye:
        return pointwise.cast(apply("ieq", *index), nodes.dtype(here))
    return None
