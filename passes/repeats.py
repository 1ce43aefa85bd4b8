"""Calls that a trace has met before: what became of them is copied, and not traced again.

Models have many equal layers, and loops many equal steps. A call of Dynamo's graph on tensors of the same form, under
the same modes, is made of the same operations. Its value is like the one that Dynamo has recorded; it is made where a
call that is traced asks for it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    set_proxy_slot,
)
from torch.fx.node import map_arg
from torch.fx.proxy import _COPY_META_FIELDS, Proxy
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.passes import nodes

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEVICES = ("cpu", "cuda")
_OF_THE_CALL = ("stack_trace", *_COPY_META_FIELDS)
"""Of a node's annotations, those that say where in the model it comes from."""
Form = tuple[Any, ...]


class _Unknown(Exception):
    """What a call makes of a value, its form does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """What a call became. given: the nodes of its arguments; operations: what was written, in order; results: which
    node each tensor of its value is; form, mode: of these."""

    given: tuple[Node, ...]
    operations: tuple[Node, ...]
    results: tuple[Node, ...]
    form: Form
    mode: FakeTensorMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """The value of a call that was copied. recorded: what Dynamo has in its place; results, form: see `_Traced`."""

    recorded: Any
    results: tuple[Node, ...]
    form: Form
    mode: FakeTensorMode
    tracer: Any

    def made(self) -> Any:
        """The value, in the running trace."""
        leaves, structure = tree_flatten(self.recorded)
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            found = [fast_detach(self.mode, leaf).requires_grad_(leaf.requires_grad) for leaf in leaves]
        for leaf, node in zip(found, self.results, strict=True):
            set_proxy_slot(leaf, self.tracer, _ProxyTensor(Proxy(node, self.tracer), None))
        return tree_unflatten(found, structure)


class Repeats:
    """The calls of one trace."""

    def __init__(self) -> None:
        self._met: dict[Form, _Traced | None] = {}
        self._given: dict[Node, int] = {}
        self._key: Form | None = None
        self._last: Node | None = None

    def again(self, call: Node, values: Mapping[Node, Any]) -> Later | None:
        """The value of a call that was met before, whose operations are now in the graph; None for others, of which
        `note` is to be told. values: of the nodes of Dynamo's graph."""
        mode, self._key, self._values = get_proxy_mode(), None, values
        if mode is None or not _is_of_torch(call) or torch._C._functorch.maybe_current_level() is not None:
            return None  # inside of vmap a tensor is not the one that its node made
        self._tracer, self._given = mode.tracer, {}
        with torch._C.DisableTorchFunction():  # the trace's modes would look at every use of a tensor
            try:
                key = (call.op, call.target, _modes(), self._form(call.args), self._form(call.kwargs))
                before = self._met.get(key)
            except (_Unknown, TypeError):  # TypeError: a target without a hash
                return None
            if before is None or _form_of_result(recorded := nodes.value(call)) != before.form:
                self._key, self._last = None if key in self._met else key, _last(mode.tracer.graph)
                return None
        results = _copied(before, tuple(self._given), call, mode.tracer.graph)
        return Later(recorded=recorded, results=results, form=before.form, mode=before.mode, tracer=mode.tracer)

    def note(self, result: Any) -> None:
        """What the call that `again` was last asked for has returned: everything behind `_last` is what it became."""
        if self._key is None or self._last is None:
            return
        operations: list[Node] = []
        node = _last(self._tracer.graph)
        while node is not self._last:
            operations.insert(0, node)
            node = node.prev
        with torch._C.DisableTorchFunction():
            self._met[self._key] = self._traced(tuple(operations), result)

    def _traced(self, operations: tuple[Node, ...], result: Any) -> _Traced | None:
        """None where that is more than operations on the arguments that return something new."""
        if (form := _form_of_result(result)) is None:
            return None
        known = {*self._given, *operations}
        if not all(_is_known(node) and known.issuperset(node.all_input_nodes) for node in operations):
            return None
        if self._given and any(_writes(node) for node in operations):
            return None
        leaves, _ = tree_flatten(result)
        try:
            results = tuple(self._node(leaf) for leaf in leaves)
        except _Unknown:
            return None
        if not set(results) <= set(operations):
            return None
        given = tuple(self._given)
        return _Traced(given=given, operations=operations, results=results, form=form, mode=leaves[0].fake_mode)

    def _form(self, value: Any) -> Form:
        """What a call can see of a value before it runs."""
        if isinstance(value, Node):
            value = self._values[value]
        if isinstance(value, Later) and len(value.results) == 1:
            return self._numbered(value.results[0]), *value.form
        if isinstance(value, torch.Tensor):
            return self._numbered(self._node(value)), *_form_of_tensors(value)
        if isinstance(value, (list, tuple)):
            return type(value), *map(self._form, value)
        if isinstance(value, dict):
            return dict, *value, *map(self._form, value.values())
        if isinstance(value, slice):
            return slice, *map(self._form, (value.start, value.stop, value.step))
        if value is not Ellipsis and not isinstance(value, _PLAIN):
            raise _Unknown
        return type(value), repr(value)  # 0.0 is not -0.0

    def _numbered(self, node: Node) -> int:
        """Which of the arguments this is: x + x is not x + y."""
        return self._given.setdefault(node, len(self._given))

    def _node(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor. One whose value the trace knows may decide what a call becomes."""
        held = self._tracer.tensor_tracker.get(tensor) if type(tensor) is FakeTensor else None
        if held is None or tensor.constant is not None or (held.constant is not None and held.constant.numel()):
            raise _Unknown
        return held.proxy.node


def _is_of_torch(call: Node) -> bool:
    """Whether a call has no state of its own, as a function of the user's may have."""
    target = call.target
    if call.op == "call_method" or isinstance(target, (OpOverload, OpOverloadPacket)):
        return True
    module = getattr(target, "__module__", None) or getattr(type(getattr(target, "__self__", None)), "__module__", "")
    return call.op == "call_function" and str(module).partition(".")[0] in ("torch", "_operator", "builtins")


def _modes() -> Form:
    casts = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


def _form_of_tensors(value: Any) -> Form:
    leaves, structure = tree_flatten(value)
    return structure, *map(_form_of_tensor, leaves)


def _form_of_tensor(tensor: torch.Tensor) -> Form:
    sizes = (*tensor.shape, *tensor.stride())
    if any(isinstance(size, torch.SymInt) for size in sizes):
        raise _Unknown
    negated = tensor.is_conj() or tensor.is_neg()
    return tensor.dim(), *sizes, tensor.dtype, tensor.device, tensor.requires_grad, negated


def _form_of_result(value: Any) -> Form | None:
    """The form of new tensors; None of what else a call may return, and of tensors that are changed in place later:
    Dynamo has recorded what they are after that."""
    leaves, _ = tree_flatten(value)
    if not leaves or not all(type(x) is FakeTensor and not x.is_inference() and x._version == 0 for x in leaves):
        return None
    try:
        return _form_of_tensors(value)
    except _Unknown:
        return None


def _is_known(node: Node) -> bool:
    return node.op == "get_attr" or node.target is operator.getitem or isinstance(node.target, OpOverload)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _last(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def _copied(before: _Traced, given: tuple[Node, ...], call: Node, graph: Graph) -> tuple[Node, ...]:
    """Write what became of a call once more, on other arguments; returns the nodes of its value."""
    made = dict(zip(before.given, given, strict=True))
    origin = {key: call.meta[key] for key in _OF_THE_CALL if key in call.meta}
    for node in before.operations:
        args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        made[node].meta = {key: held for key, held in node.meta.items() if key not in _OF_THE_CALL} | origin
    return tuple(made[node] for node in before.results)
