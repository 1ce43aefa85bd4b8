"""The spec's side of a comparison: its programs by `fusion.ir.ops.evaluate`, its gradient by `fusion.ir.derivative`.

The steps between them (softmax, sinks, scales of rows) are those of the reference interpreter, which every emitter is
tested against.

`fingerprint` is equal for sites that validation cannot tell apart: equal operations on equal shapes, and equal specs.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fusion.codegen.reference.forward import Rows
from fusion.ir.derivative import UPSTREAM, WEIGHT_UPSTREAM, adjoints
from fusion.ir.expr import HEAD, SCORE, WEIGHT, Expr, J, Kind, coord, loads
from fusion.ir.ops import evaluate
from fusion.ir.results import leaves, size_value
from fusion.ir.spec import Mixing, Normalizer
from fusion.passes import marks, nodes
from fusion.passes.pullback.loads import constant_value
from fusion.passes.recognize.find import Site
from fusion.passes.specify.specify import AttentionCall
from fusion.validation.replay import Replay, literal, rule_of, within


class OutOfBounds(Exception):
    """A spec reads outside of an operand, whether or not it discards the value."""


class Program(Rows):
    """One call of a site on a sample. Axes of scores: [samples, 1, keys]; of V: [samples, columns, keys]. `out` is
    [samples, columns]; `surrogate(grad)` a scalar whose gradient at the leaves is that of `out` for `grad`. places: the
    coordinate of every dimension of the result, [samples, 1] ("e": [samples, columns]). sizes: of the spec."""

    def __init__(self, call: AttentionCall, places: Mapping[str, Tensor], sizes: dict[str, int], replay: Replay):
        self.spec, self.call, self.replay, self.sizes = call.spec, call, replay, sizes
        wide = any(operand.dtype == "float64" for operand in call.spec.operands)
        self.dtype, self.device = torch.float64 if wide else torch.float32, torch.device("cpu")
        self.n_k = replay.region.keys.shape[1]
        self.known = {coord(name): at.unsqueeze(-1) for name, at in places.items()}
        self.known[J] = replay.region.keys.unsqueeze(1)
        self._run()

    def value(self, expr: Expr, extra: dict[Expr, Tensor]) -> Tensor:
        return evaluate(expr, leaves(self.sizes, self.known | extra, self._load), self.dtype)

    def _load(self, part: Expr, rank: int = 3):
        dtype = {Kind.FLOAT: self.dtype, Kind.INT: torch.int64, Kind.BOOL: torch.bool}[part.kind]
        table = dict(self.call.tables).get(part.operand)

        def load(*index: Tensor) -> Tensor:
            node = self.call.operands[part.operand]
            for entry, extent in zip(index, self.replay.region.shape(node), strict=True):
                if ((entry < 0) | (entry >= extent)).any():
                    raise OutOfBounds(f"{node.name} is read beyond a dimension of {extent}")
            values = self.replay.value(node, index, rank).to(dtype)
            if table is None:
                return values
            return within(values, size_value(table.extent, self.replay.region.examples))

        return load if part.args else load()

    def _element(self, operand: int, **columns: Tensor) -> Tensor:
        """Elements of Q, K or V, with the columns on a fourth axis where they are those of a product."""
        rank = 4 if "c" in columns else 3
        known = {e: t.unsqueeze(-1) for e, t in self.known.items()} if rank == 4 else self.known
        known = known | {coord(name): at for name, at in columns.items()}
        leaf = leaves(self.sizes, known, lambda part: self._load(part, rank))
        return evaluate(self.spec.element(operand), leaf, self.dtype)

    def _raw_score(self) -> Tensor:
        summed = self.replay.region.positions(size_value(self.spec.d, self.sizes)).view(1, 1, 1, -1)
        query, key = (self._element(number, c=summed) for number in (0, 1))
        return (query * key).sum(-1)

    def _run(self) -> None:
        spec = self.spec
        if spec.mixing is not None:
            self.out = (self._mixed_weights(spec.mixing) * self._element(2)).sum(-1)
            return
        self.score, values = self._raw_score(), self._element(2)
        self.positions = {SCORE: self.score.detach()}
        shape = (*torch.broadcast_shapes(self.score.shape[:2], (len(self.replay.region.keys), 1)), self.n_k)
        x, weight = (
            self.value(e, self.positions).to(self.dtype).expand(shape).detach().clone().requires_grad_()
            for e in (spec.score, spec.weight)
        )
        self.x, self.weight = x, weight
        plain = spec.normalizer is Normalizer.NONE
        weights = x * weight if plain else self.softmax(x, self.positions, weight)
        self.out = (weights * values).sum(-1)

    def _mixed_weights(self, mixing: Mixing) -> Tensor:
        """Weights of a head after the sums over heads, which are computed one head after the other."""
        axis, count = mixing.head, self.spec.batch[mixing.axis].integer
        heads, own, scored = list(map(torch.tensor, range(count))), self.known[axis], []

        def summed(matrix: Expr, values: list[Tensor]) -> Tensor:
            shares = (self.value(matrix, {HEAD: h}) * v for h, v in zip(heads, values, strict=True))
            return functools.reduce(operator.add, shares)

        def weights(head: Tensor) -> Tensor:
            self.known[axis] = head
            raw = self._raw_score()
            if mixing.scores is not None:
                single = self.value(mixing.scored, {SCORE: raw}) if mixing.own_score else 0.0
                raw = summed(mixing.scores, scored) + single
            x, factor = (self.value(e, {SCORE: raw}).to(self.dtype) for e in (self.spec.score, self.spec.weight))
            return self.softmax(x.expand(torch.broadcast_shapes(x.shape, raw.shape)), {SCORE: raw}, factor)

        for self.known[axis] in heads if mixing.scores is not None else ():
            scored.append(self.value(mixing.scored, {SCORE: self._raw_score()}))
        if mixing.weights is None:
            return weights(own)
        every = list(map(weights, heads))
        single = weights(own) if mixing.own_weight else 0.0
        self.known[axis] = own
        return self.value(mixing.weighted, {WEIGHT: summed(mixing.weights, every) + single})

    def index(self, entry: Expr) -> Tensor:
        """An entry of an index in b.., i, j and the graph's own sizes, [samples, 1, keys]."""
        result = evaluate(entry, leaves({**self.replay.region.examples}, self.known, self._load), self.dtype)
        return result.expand(len(self.replay.region.keys), 1, self.n_k)

    def aux_value(self, expr: Expr) -> Tensor:
        """Value of an auxiliary output's expression, [samples, 1, keys]."""
        return self.value(expr, self.positions | self.of_aux_output(self.x, self.positions)).to(self.dtype)

    def surrogate(self, grad: Tensor) -> Tensor:
        """A scalar whose gradient at the leaves is that of `out` for the gradient `grad`."""
        spec = self.spec
        total = (self.out * grad).sum()
        if spec.mixing is not None:  # which the reference interpreter differentiates as it stands
            return total
        grads = torch.autograd.grad(total, [self.x, self.weight], retain_graph=True, allow_unused=True)
        for program, seed, upstream in zip((spec.score, spec.weight), (UPSTREAM, WEIGHT_UPSTREAM), grads, strict=True):
            if upstream is None:
                continue
            targets = [SCORE, *(part for part in loads(program) if part.kind is Kind.FLOAT)]
            for target, expr in adjoints(program, seed, targets).items():
                value = self.score if target is SCORE else self.value(target, {})
                if value.requires_grad:
                    given = self.value(expr, self.positions | {seed: upstream})
                    total = total + (value * given.detach().to(self.dtype)).sum()
        return total


_MARKS = (marks.requires_grad, marks.stop_gradient, marks.mutations, marks.is_seed)


def fingerprint(site: Site, calls: Sequence[AttentionCall], examples: Mapping[str, int]) -> str:
    """A digest that is equal for sites that validation cannot tell apart."""
    operands = [operand for call in calls for operand in call.operands]
    ends = set(operands) - site.interior
    numbers: dict[Node, int] = {}
    inside: set[Node] = set()
    lines: list[object] = []
    aux = [(use.of, use) for call in calls for use in call.uses]
    stack = [site.root, *(node for node, _ in aux)]
    while stack:
        here = stack.pop()
        if here in numbers:
            continue
        numbers[here] = len(numbers)
        replayed = here not in ends and here.op == "call_function"
        if replayed and (rule_of(here) is not None or not nodes.is_tensor(here) or constant_value(here) is not None):
            inside.add(here)
            stack.extend(here.all_input_nodes)
    for here in numbers:
        arguments = map_arg((here.args, here.kwargs), numbers.get) if here in inside else None
        target = str(here.target) if here in inside else _constant(here)
        lines.append((target, str(arguments), _described(here, examples)))
    specs = tuple((c.spec.to_json(), tuple(size_value(n, examples) for n in c.sizes), c.differentiable) for c in calls)
    specs = (*specs, *((numbers[node], tuple(map(str, use.at))) for node, use in aux))
    whole = specs, [numbers.get(o, -1) for o in operands], numbers[site.anchor], site.dims, lines
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _constant(here: Node) -> object:
    """Content of a constant of the graph; None for inputs and computed tensors."""
    tensor = literal(here) if here.op == "get_attr" else None
    if tensor is None:
        return None
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content.tobytes()).hexdigest()


def _described(here: Node, examples: Mapping[str, int]) -> Any:
    fake = nodes.fake(here)
    marked = tuple(bool(mark(here)) for mark in _MARKS)
    if isinstance(fake, torch.Tensor):
        try:
            return tuple(size_value(n, examples) for n in nodes.shape(here)), fake.dtype, marked
        except (nodes.Unsupported, KeyError):
            return str(fake.shape), fake.dtype, marked
    return str(fake), marked
