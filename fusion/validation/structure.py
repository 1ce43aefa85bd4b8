"""Equality of sites for validation: equal operations on equal shapes, and equal specs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fusion.ir.sizes import size_value
from fusion.passes import marks, nodes
from fusion.passes.pullback.folding import known
from fusion.passes.recognize.find import Site
from fusion.passes.specify.specify import AttentionCall
from fusion.validation.replay import literal, rule_of

_MARKS = (marks.requires_grad, marks.stop_gradient, marks.mutations, marks.is_seed)


def fingerprint(site: Site, parts: Sequence[AttentionCall], hints: Mapping[str, int]) -> str:
    """A digest that is equal for sites that validation cannot tell apart."""
    operands = [operand for part in parts for operand in part.operands]
    ends = set(operands) - site.interior
    numbers: dict[Node, int] = {}
    inside: set[Node] = set()
    lines: list[object] = []
    aux = [(use.of, use) for part in parts for use in part.uses]
    stack = [site.root, *(node for node, _ in aux)]
    while stack:
        here = stack.pop()
        if here in numbers:
            continue
        numbers[here] = len(numbers)
        replayed = here not in ends and here.op == "call_function"
        if replayed and (rule_of(here) is not None or not nodes.is_tensor(here) or known(here) is not None):
            inside.add(here)
            stack.extend(here.all_input_nodes)
    for here in numbers:
        call = map_arg((here.args, here.kwargs), numbers.get) if here in inside else None
        made = str(here.target) if here in inside else _constant(here)
        lines.append((made, str(call), _described(here, hints)))
    specs = tuple((p.spec.to_json(), tuple(size_value(n, hints) for n in p.sizes), p.differentiable) for p in parts)
    specs = (*specs, *((numbers[node], tuple(map(str, use.at))) for node, use in aux))
    whole = specs, [numbers.get(o, -1) for o in operands], numbers[site.anchor], site.dims, lines
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _constant(here: Node) -> object:
    """Content of a constant of the graph; None for inputs and computed tensors."""
    held = literal(here) if here.op == "get_attr" else None
    if held is None:
        return None
    content = held.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return str(held.dtype), tuple(held.shape), hashlib.sha256(content.tobytes()).hexdigest()


def _described(here: Node, hints: Mapping[str, int]) -> Any:
    held = nodes.fake(here)
    marked = tuple(bool(mark(here)) for mark in _MARKS)
    if isinstance(held, torch.Tensor):
        try:
            return tuple(size_value(n, hints) for n in nodes.shape(here)), held.dtype, marked
        except (nodes.Unsupported, KeyError):
            return str(held.shape), held.dtype, marked
    return str(held), marked
