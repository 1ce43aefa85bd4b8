"""Pull-back: the value of one element of a tensor, as an expression at symbolic coordinates.

`PullBack.value(node, index)` walks upstream from `node[index]`. Views transform the index, pointwise operations build
expression nodes, `arange`, `tril` and comparisons become integers and predicates, a product of a tensor that depends on
the query row with one that depends on the key column becomes a "dot" leaf, softmax and reductions over the keys become
"softmax" and "reduce" nodes; anything else is a load from the tensor that the graph computes anyway. No pattern of
operations is ever matched. Until `recognize` has resolved them, expressions contain also

    mix          attr: the name of the head's coordinate, over which it is summed; args: the factors (`heads`)
    dot          attr: number in `PullBack.products`
    softmax      attr: "softmax" or "safe_softmax"; args: the score at key J, then further columns (sinks)
    log_softmax  args: the softmax that it is the logarithm of
    reduce       attr: "sum", "max", "detached max" or "logsumexp"; args likewise; binds the coordinate J
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion.ir import integers
from fusion.ir.expr import C, Expr, I, J, Kind, const, coordinates, load, node
from fusion.ir.ops import apply, as_float, where
from fusion.ir.primitives import ROUNDED
from fusion.ir.ranges import interval, is_exact, within
from fusion.refusals import Reason

from .. import marks, nodes
from ..nodes import Unsupported, arguments, packet, producer, shape
from ..trace.aliases import changes, may_copy
from ..trace.outline import description_of
from . import casts, indexing, loads, pointwise, reductions
from .contractions import ADDING, Factors, factors, is_contraction, is_distance, products_above
from .heads import sum_of_heads
from .loads import Numbers, affine_element
from .operands import Access, is_float8, locate
from .reductions import blocking_op, depends_on_product
from .roundings import Narrow, decided_otherwise, is_coarser, narrowed_to, rounded_at, too_heavy
from .views import Index, broadcast_index, number_of, source

aten = torch.ops.aten
MAX_DEPTH, MAX_ELEMENTS = 64, 512
"""Operations that one walk goes through: one after the other, and in all. Analysis stays linear in the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A "dot" leaf: scale * (sum over c < extent of query[.., i, c] * key[.., j, c]).

    node, index: the operation, and the element of its result.
    query, key: its operands, without the scales that were stripped on the way to them.
    extent: the number of terms of the sum.
    scale: of the sum; free of i and j.
    is_value: whether `node[index]` is the leaf's value, so that it can be loaded.
    """

    node: Node
    index: Index
    query: Access
    key: Access
    extent: Expr
    scale: Expr
    is_value: bool


class PullBack:
    """One walk, for one site. keys: how many (columns J) the product with V, `anchor`, sums over."""

    def __init__(self, bounds: dict[Expr, Expr], keys: Expr, anchor: Node | None = None):
        self.bounds, self.anchor = bounds, anchor
        self.keys = keys
        self._precision = torch.float32 if anchor is None else nodes.dtype(anchor)
        self.reads_tables = False  # (of keys and values: see `caches`)
        self.scales: set[Node] = set()
        self.key_sets: dict[Node, indexing.KeySet] = {}
        self.products: list[Product] = []
        self.number = Numbers([])  # under which number a tensor is loaded
        self.loaded, self.tables = self.number.tensors, self.number.tables
        self.interior: dict[Node, None] = {}
        self.partly_detached = False
        self.takes_first = False
        self.limit: str | None = None
        self._memo: dict[tuple[Node, Index], Expr] = {}
        self._narrow = {dtype: Narrow(dtype, self._limits, lambda part: self.loaded[part.operand]) for dtype in ROUNDED}
        self._depth = 0

    def value(self, here: Node, index: Index) -> Expr:
        """The element `here[index]`."""
        key = (here, index)
        if key not in self._memo:
            self._depth += 1
            try:
                self._memo[key] = self._value(here, index) if self._may_go_on() else self.load(here, index)
            except Unsupported as problem:
                problem.node = problem.node or here
                raise
            finally:
                self._depth -= 1
        return self._memo[key]

    def _may_go_on(self) -> bool:
        """Whether the walk is within its budget: nodes beyond it are loaded, which is always right."""
        if self._depth > MAX_DEPTH:
            self.limit = f"more than {MAX_DEPTH} operations one after the other"
        elif len(self._memo) > MAX_ELEMENTS:
            self.limit = f"more than {MAX_ELEMENTS} operations"
        return self._depth <= MAX_DEPTH and len(self._memo) <= MAX_ELEMENTS

    def explained(self, problem: Unsupported) -> Unsupported:
        """Problem with a value of this walk, with the node at fault and the limit that the walk ran into."""
        node, refusal = self.suspect(problem), problem.refusal
        if problem.expr is None and node is not None:
            if is_distance(node):
                message = "the scores are distances, and no products of queries and keys"
                return Unsupported(Reason.DISTANCES, message, None, node)
            if (part := description_of(producer(node))) is not None:
                message = f"the operations between the two products are hidden in {part}"
                return Unsupported(Reason.OPAQUE, message, None, node)
        if refusal.kind is not Reason.NOT_POINTWISE:
            return Unsupported(refusal.kind, refusal.message, problem.expr, node)
        if self.limit is not None:
            message = f"{refusal.message}, as far as the analysis went, which stops at its limit: {self.limit}"
            return Unsupported(Reason.LIMIT, message, problem.expr, node)
        if node is not None:
            node = blocking_op(node, products_above(node)) or node
            refusal = reductions.reduction_refusal(node, (self.keys, self.bounds.get(I))) or refusal
        message = refusal.message
        if refusal is problem.refusal and node is not None and is_contraction(node):
            places = (index for here, index in self._memo if here is node)
            message = f"{message}: this one is read at [{', '.join(map(str, next(places, ())))}]"
        return Unsupported(refusal.kind, message, problem.expr, node)

    def suspect(self, problem: Unsupported) -> Node | None:
        """Node at fault for a problem with a value of this walk: that of the expression in question, or else the last
        tensor that had to be loaded although it depends on a product of two tensors."""
        if problem.expr is not None:
            for (node, _), expr in self._memo.items():
                if expr is problem.expr:
                    return node
        taken = [node for node in self.loaded if node.op == "call_function" and products_above(node)]
        return max(taken, default=None)

    def _value(self, here: Node, index: Index) -> Expr:
        if (moved := self.step(here, index, self.bounds)) is not None:
            self.interior[here] = None
            return self.value(*moved)
        if marks.mutations(here) or self._is_other_attention_output(here) or self._reads_memory_written_later(here):
            result = None
        elif marks.stop_gradient(here):
            result = self._without_gradient(here, index)
        else:
            result = self._computed(here, index)
        if result is not None and casts.kind_of(nodes.dtype(here)) is not result.kind:
            result = self.cast(result, nodes.dtype(here))  # cat of integers and floats, for one
        if result is not None and result.kind is Kind.FLOAT:
            result = rounded_at(here, result, self._precision, self._dtype_of)
        if result is not None and result.kind is Kind.INT:
            result = within(result, nodes.dtype(here), self._limits(result))
        if result is None:
            known = affine_element(here, index)
            return self.load(here, index) if known is None else known
        if not depends_on_product(result) and self._is_left_to_graph(here, result):
            return self.load(here, index)
        self.interior[here] = None
        return result

    def _dtype_of(self, part: Expr) -> torch.dtype:
        return nodes.dtype(self.loaded[part.operand])

    def _is_left_to_graph(self, here: Node, value: Expr) -> bool:
        free = [number for number, tensor in enumerate(self.loaded) if tensor in self.key_sets]  # need not be read
        return too_heavy(value, free) or decided_otherwise(here, value, self.interior.keys(), self.loaded, self.anchor)

    def _limits(self, value: Expr) -> tuple[int, int]:
        def of_load(part: Expr) -> tuple[int, int]:
            limits = torch.iinfo(nodes.dtype(self.loaded[part.operand]))
            return limits.min, limits.max

        return interval(value, self.bounds, of_load)

    def step(self, here: Node, index: Index, bounds: dict[Expr, Expr]) -> tuple[Node, Index] | None:
        """One step through a view. Not through a possible copy of memory that is changed in place, nor through the
        result of another attention: the graph will hold that result, not the product before it."""
        if self._is_other_attention_output(here):
            return None
        if marks.mutations(here) and may_copy(here):
            return None
        return source(here, index, bounds)

    def _reads_memory_written_later(self, here: Node) -> bool:
        """Whether a node, which is no score, depends on memory that has changed when V is multiplied: a length, say."""
        return changes([here], self.anchor) and not products_above(here)

    def _is_other_attention_output(self, here: Node) -> bool:
        """Whether a node is computed by another attention, or from a float."""
        return marks.attention_root(here) or marks.of_float(here)

    def load(self, here: Node, index: Index) -> Expr:
        """A load of an element of a tensor that the graph computes, from the view's origin where it is one."""
        kind = casts.kind_of(nodes.dtype(here))
        if kind is None:
            raise Unsupported(Reason.DTYPE, f"values of dtype {nodes.dtype(here)}")
        return load(self.number(here), index, kind)

    def argument(self, value: Any, index: Index, extents: Sequence[Expr]) -> Any:
        """An argument of a pointwise call at `index` of its result of shape `extents`."""
        if not isinstance(value, Node):
            return value
        fake = nodes.fake(value)
        if isinstance(fake, torch.Tensor):
            return self.value(value, broadcast_index(extents, shape(value), index))
        if isinstance(fake, (torch.SymInt, int)):
            return nodes.size_expr(fake)
        if (number := nodes.scalar(value)) is not None:
            return number
        raise Unsupported(Reason.RUN_TIME_SCALAR, f"a scalar that is computed at run time ({value.name})")

    def _computed(self, here: Node, index: Index) -> Expr | None:
        """The element as an expression, or None where it is to be loaded."""
        if here.op != "call_function":
            return loads.literal(here)
        if (head_mix := sum_of_heads(self, here, index)) is not None:
            return head_mix
        kind = packet(here)
        if kind in pointwise.BUILDERS:
            return self._pointwise(here, index)
        if is_contraction(here) and ((product := self._contraction(here, index)) or kind not in _OPERATIONS):
            return product
        if kind is None:
            return self._item(here, index) if here.target is operator.getitem else None
        if operation := _OPERATIONS.get(kind):
            return operation(self, here, arguments(here), index)
        return loads.created_element(here, index)

    def _pointwise(self, here: Node, index: Index) -> Expr | None:
        extents = shape(here)
        if any(nodes.is_tensor(arg) and len(shape(arg)) > len(extents) for arg in here.all_input_nodes):
            return None  # a reduction of the same name: max()
        common = casts.common_integer([nodes.fake(x) for x in here.all_input_nodes if nodes.is_tensor(x)])

        def operand(argument: Any) -> Any:
            value = self.argument(argument, index, extents)
            is_integer = value.kind is Kind.INT if isinstance(value, Expr) else type(value) is int
            if common is None or not is_integer or nodes.dtype(here).is_floating_point:
                return value
            if packet(here) in pointwise.CLAMPS and not isinstance(argument, Node):
                return value  # bounds beyond the dtype are no bounds, and do not wrap around
            number = casts.operand(value, Kind.INT)
            wrapped = within(number, common, self._limits(number))
            return number if wrapped is None else wrapped  # one element of int64 beside int32 is taken to fit

        args, kwargs = tuple(map(operand, here.args)), {name: operand(arg) for name, arg in here.kwargs.items()}
        if kwargs.get("out") is not None:
            return None
        call = casts.Call(args=args, kwargs=kwargs, dtype=nodes.dtype(here), target=here.target)
        return self.built(packet(here), call)

    def built(self, operation: Any, call: casts.Call) -> Expr | None:
        """Value of a pointwise call, rounded as its dtype requires."""
        return self._within_range(pointwise.build(operation, call), call.dtype)

    def cast(self, value: Expr, dtype: torch.dtype) -> Expr | None:
        """`value.to(dtype)`, rounded as that requires; None where no kernel rounds to it."""
        rounded = self._within_range(casts.cast(value, dtype), dtype)
        if rounded is None or value.kind is not Kind.FLOAT or not is_coarser(dtype, self._precision):
            return rounded
        return narrowed_to(rounded, dtype, self._precision, self._dtype_of)

    def _within_range(self, value: Expr | None, dtype: torch.dtype) -> Expr | None:
        return value if value is None or dtype not in self._narrow else self._narrow[dtype](value)

    def _without_gradient(self, here: Node, index: Index) -> Expr | None:
        """Value of a node that stops gradients, if it depends on a product; else None."""
        copies = packet(here) in (aten.detach, aten.alias) and nodes.is_tensor(here.all_input_nodes[0])
        result = self.value(here.all_input_nodes[0], index) if copies else self._computed(here, index)
        if result is None or not depends_on_product(result):
            return None
        if result.op == "reduce":
            return reductions.detached_maximum(result)
        return reductions.without_gradient(result)

    def _cast(self, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
        origin, dtype = args["self"], nodes.dtype(here)
        if is_float8(nodes.dtype(origin)) and not marks.stored(origin):
            return None  # kernels do not read it: the widened copy is loaded
        value = self.value(origin, index)
        if value.kind is Kind.INT and dtype in ROUNDED and not is_exact(self._limits(value), dtype):
            return apply(ROUNDED[dtype], as_float(value))
        if value.op == "to_float" and casts.kind_of(dtype) is Kind.INT:
            integer = value.args[0]
            return integer if is_exact(self._limits(integer), nodes.dtype(origin)) else None
        return self.cast(value, dtype)

    def _dropout(self, here: Node, args: dict[str, Any], index: Index) -> Expr | None:
        """Dropout of scores or weights; other dropouts are computed by the graph and loaded."""
        value = self.value(next(a for a in here.args if isinstance(a, Node)), index)
        if not args.get("train", True) or args.get("p", 0.5) == 0:
            return value
        if not depends_on_product(value):
            return None
        return value * self.dropout_factor(here, args["p"], index, shape(here))

    def dropout_factor(self, here: Node, p: float, index: Index, extents: Index) -> Expr:
        """1 / (1 - p) where dropout keeps the element at `index` of a tensor of shape `extents`, else 0. The element's
        number within the tensor, and the node's own seed, decide: row and column are hashed one after the other, so
        that all but a few instructions are done once per row."""
        if (drawn_from := marks.seed(here)) is None or not isinstance(p, (int, float)):
            message = "dropout of a kind, or with a probability, that is not known at compile time"
            raise Unsupported(Reason.DROPOUT, message)
        if p >= 1:
            return const(0.0)
        seed = self.load(drawn_from, (integers.integer(0),))
        drawn = apply("hash", apply("hash", seed, number_of(index[:-1], extents[:-1])), index[-1])
        keep = apply("ilt", drawn, integers.integer(round((1 - p) * 2**31)))
        return where(keep, const(1 / (1 - p)), const(0.0))

    def _item(self, here: Node, index: Index) -> Expr | None:
        """Item 0 of native_dropout and of max(dim)."""
        origin, item = here.args
        if not isinstance(origin, Node) or item != 0:
            return None
        if packet(origin) is aten.native_dropout:
            return self._dropout(origin, arguments(origin), index)
        if packet(origin) is aten.max:
            self.takes_first |= marks.requires_grad(here) and not all(packet(u) is aten.detach for u in here.users)
            return reductions.reduction(self, "max", origin, index)
        return None

    def _contraction(self, here: Node, index: Index) -> Expr | None:
        if not nodes.dtype(here).is_floating_point:
            return None
        try:
            parts = factors(here, index, C)
        except Unsupported:
            return None
        if (operands := self._query_and_key(parts)) is None:
            return None
        (query, query_scale), (key, key_scale) = operands
        if not (self._varies(query.index, I) and self._varies(key.index, J)):
            return None
        if {query.dtype, key.dtype} != {nodes.dtype(here)}:
            return None
        nodes.specialize(nodes.fake(parts.left).shape[parts.left_index.index(C)])
        scale, added = query_scale * key_scale, False
        if packet(here) in ADDING:
            args = arguments(here)
            scale, added = scale * args["alpha"], args["beta"] != 0
        product = self.product(
            Product(
                node=here, index=index, query=query, key=key, extent=parts.extent, scale=scale, is_value=not added
            )
        )  # fmt: skip
        return self._with_added(here, index, product) if added else product

    def product(self, product: Product) -> Expr:
        """The leaf of a product."""
        if product not in self.products:
            self.products.append(product)
        return node("dot", (), Kind.FLOAT, self.products.index(product))

    def _query_and_key(self, parts: Factors) -> tuple[tuple[Access, Expr], tuple[Access, Expr]] | None:
        """The factor that depends on the row, then that which depends on the key; None if each depends on both."""
        sides = ((parts.left, parts.left_index), (parts.right, parts.right_index))
        for (left, left_index), (right, right_index) in (sides, sides[::-1]):
            try:
                query = locate(self, left, left_index, I, C, parts.extent)
                return query, locate(self, right, right_index, J, C, parts.extent)
            except Unsupported:
                continue
        return None

    def _varies(self, index: Index, atom: Expr) -> bool:
        """Whether an operand depends on its row; a dimension of size 1 may have lost its coordinate."""
        return any(atom.name in coordinates(e) for e in index) or self.bounds[atom] is integers.integer(1)

    def _with_added(self, here: Node, index: Index, product: Expr) -> Expr:
        """Product plus the tensor that baddbmm adds to it."""
        args = arguments(here)
        added = self.argument(args["self"], index, shape(here))
        call = casts.Call(args=(product, added), kwargs={"alpha": args["beta"]}, dtype=nodes.dtype(here))
        combined = self.built(aten.add, call)
        assert combined is not None
        return combined


_OPERATIONS: dict[Any, Callable[[PullBack, Node, dict[str, Any], Index], Expr | None]] = {
    aten.to: PullBack._cast, aten._to_copy: PullBack._cast, aten.type_as: PullBack._cast,
    aten.dropout: PullBack._dropout, aten.native_dropout: PullBack._dropout, aten.feature_dropout: PullBack._dropout,
    aten.scatter: indexing.scattered, **indexing.OPERATIONS, **reductions.OPERATIONS,
}  # fmt: skip
"""Operation -> the element at an index of its result, from its arguments; None where it is to be loaded."""
