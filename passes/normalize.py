"""Retrace Dynamo's graph to pre-dispatch ATen, the one form that the analysis reads.

Pre-dispatch keeps what autograd, autocast and input mutation mean; composite operations (matmul, einsum, linear,
softmax, scaled_dot_product_attention) stay whole. Stack traces, module paths and what Inductor needs to know of the
placeholders are carried over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.passes import autocast, dtensor, nodes
from fusion.passes.autocast import write_casts
from fusion.passes.checkpointing import Checkpoints
from fusion.passes.encoder import DECOMPOSITIONS
from fusion.passes.vmap import VmapAsBroadcast

aten = torch.ops.aten


def normalize(
    module: GraphModule, example_inputs: Sequence[Any], bodies: Mapping[str, GraphModule] | None = None
) -> GraphModule:
    """The same computation as pre-dispatch ATen, with `meta["val"]` on every node. The argument is not changed.

    bodies: what to call in the place of its checkpointed graphs, by the names of their attributes.
    """
    _refuse_transforms(module)
    _refuse_custom_gradients(module)
    dtensor.refuse_absent(module)
    fakes = _fake_inputs(module, example_inputs)

    def run(*args: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return _Retrace(module, bodies or {}).run(*args)

    # Activation checkpointing counts what autograd saves: not what it saves for this trace.
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        traced = make_fx(run, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    _refuse_fake_constants(traced)
    _carry_placeholders(module, traced)
    dtensor.mark(traced.graph)
    write_to_the_whole(traced.graph)
    make_functional(traced.graph)
    drop_inactive_dropout(traced.graph)
    drop_settled_assertions(traced.graph)
    mark_mutations(traced.graph)
    write_casts(traced.graph)
    _mark_gradients(module, traced)
    traced.graph.eliminate_dead_code()
    seed_dropout(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refuse_custom_gradients(module: GraphModule) -> None:
    """A `torch.autograd.Function` brings a backward of its own, which a retraced forward does not have."""
    if not torch.is_grad_enabled():
        return
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if node.op == "call_function" and getattr(node.target, "__name__", "") == "autograd_function_apply":
                raise nodes.Unsupported("the graph calls a torch.autograd.Function, whose own gradient must be kept")


def _refuse_transforms(module: GraphModule) -> None:
    """torch.func.grad and its kin inside the graph: their levels cannot be retraced, and a failure half-way through
    would leave one open."""
    for node in module.graph.nodes:
        target = node.target if node.op == "call_function" else None
        if getattr(target, "__name__", "") in ("_autograd_grad", "_grad_increment_nesting", "_jvp_increment_nesting"):
            raise nodes.Unsupported("a function transform of torch.func is inside the compiled function")


class _Retrace(torch.fx.Interpreter):
    """Runs Dynamo's graph; vmap and torch's fused encoder modules run as the operations they stand for."""

    def __init__(self, module: GraphModule, bodies: Mapping[str, GraphModule]):
        super().__init__(module)
        self.vmap = VmapAsBroadcast(module)
        self.checkpoints = Checkpoints(module, bodies)

    def run_node(self, n: Node) -> Any:
        held = nodes.value(n)
        if n.target == "item" and isinstance(held, (torch.SymFloat, torch.SymInt)):
            (tensor,), _ = self.fetch_args_kwargs_from_env(n)
            if isinstance(tensor, FakeTensor):  # it has no value, but Dynamo knows what stands for it
                tensor.item_memo = held
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.vmap.handles(target):
            return self.vmap.call(target, args)
        if self.checkpoints.handles(target):
            return self.checkpoints.call(args, kwargs)
        if (converted := dtensor.conversion(target, args)) is not None:
            return dtensor.convert(converted, args, kwargs)
        if (
            target is autocast.enter
        ):  # the class sets the state as well as recording it: results are then what they will be
            region = torch.amp.autocast_mode.autocast(*args, **kwargs)
            region.__enter__()
            return region
        if target is autocast.leave:
            return args[0].__exit__(None, None, None)
        decomposition = DECOMPOSITIONS.get(target)
        if decomposition is not None:
            result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (converted := dtensor.conversion(target, args)) is not None:
            return dtensor.convert(converted, args, kwargs)
        return super().call_method(target, args, kwargs)


def _fake_inputs(module: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    recorded = [nodes.value(node) for node in placeholders]
    mode = detect_fake_mode([*recorded, *example_inputs]) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = []
    for found, given in zip(recorded, example_inputs, strict=True):
        chosen = dtensor.real(given if found is None else found)
        plain = isinstance(chosen, torch.Tensor) and not isinstance(chosen, torch._subclasses.FakeTensor)
        plain = plain and not dtensor.is_dtensor(chosen)
        fakes.append(mode.from_tensor(chosen, static_shapes=True) if plain else chosen)
    return fakes


def _refuse_fake_constants(traced: GraphModule) -> None:
    """A tensor that the trace met but did not follow has no values: such a trace cannot run."""
    for node in traced.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(traced, str(node.target), None), FakeTensor):
            raise nodes.Unsupported(
                f"the trace lost sight of a tensor used by {next(iter(node.users), node).format_node()}"
            )


def _carry_placeholders(origin: GraphModule, traced: GraphModule) -> None:
    """Dynamo's notes on its inputs (sources, static marks), without which Inductor treats parameters as inputs."""
    sources = [node for node in origin.graph.nodes if node.op == "placeholder"]
    targets = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for source, target in zip(sources, targets, strict=True):
        for key, value in source.meta.items():
            target.meta.setdefault(key, value)
        if hasattr(source, "_dynamo_source"):
            target._dynamo_source = source._dynamo_source  # type: ignore[attr-defined]
    for key, value in origin.meta.items():
        traced.meta.setdefault(key, value)


def drop_inactive_dropout(graph: torch.fx.Graph) -> None:
    """Remove dropout in eval mode and with p = 0, which FX would otherwise keep alive as a random operation."""
    for node in list(graph.nodes):
        if node.op != "call_function" or nodes.packet(node) not in (aten.dropout, aten.feature_dropout):
            continue
        args = nodes.arguments(node)
        if not args["train"] or args["p"] == 0:
            node.replace_all_uses_with(args["input"])
            graph.erase_node(node)


def write_to_the_whole(graph: torch.fx.Graph) -> None:
    """Write to tensors themselves in the place of slices of all of them, which `x[:, :, mask] = 0` makes."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or nodes.packet(node) is not aten.slice:
            continue
        args = nodes.arguments(node)
        whole = args["start"] in (None, 0) and args["end"] in (None, 2**63 - 1) and args["step"] == 1
        if whole and node.users and all(_out_of_place(u) is not None and u.args[0] is node for u in node.users):
            node.replace_all_uses_with(args["self"])
            graph.erase_node(node)


def drop_settled_assertions(graph: torch.fx.Graph) -> None:
    """Remove assertions on dtype, device and layout, which torch.export writes behind every cast, where the trace shows
    that they hold: they would keep scores alive."""
    for node in list(graph.nodes):
        if node.op != "call_function" or nodes.packet(node) is not aten._assert_tensor_metadata:
            continue
        args = nodes.arguments(node)
        held = nodes.value(args["a"])
        stated = [(args[name], getattr(held, name)) for name in ("dtype", "device", "layout")]
        if args["size"] is None and args["stride"] is None and all(a is None or a == b for a, b in stated):
            graph.erase_node(node)


def seed_dropout(graph: torch.fx.Graph) -> None:
    """Draw a seed in front of every active dropout: meta["seed"] on it is the node of a random int64 of shape [1].

    A fused attention takes its mask from the seed, and the graph then has the seed in the dropout's place: a random
    number that functionalisation, partitioning and recomputation treat as any other. Seeds that stay unused are removed
    by `drop_seeds`.
    """
    for node in list(graph.nodes):
        if not is_active_dropout(node):
            continue
        held = nodes.value(node)
        with graph.inserting_before(node):
            limits = {"dtype": torch.int64, "device": held.device}
            seed = graph.call_function(aten.randint.low, (0, 2**31 - 1, [1]), limits)
        seed.meta |= {"val": held.new_empty([1], dtype=torch.int64), "is_seed": True, "requires_grad": False}
        node.meta["seed"] = seed


def is_active_dropout(node: Node) -> bool:
    """Whether a node drops elements at random: dropout in training, or SDPA with a probability."""
    if node.op != "call_function":
        return False
    if nodes.packet(node) is aten.dropout:
        return True  # inactive ones are gone
    if nodes.packet(node) is not aten.scaled_dot_product_attention:
        return False
    p = nodes.arguments(node)["dropout_p"]
    return not isinstance(p, (int, float)) or p > 0


def drop_seeds(graph: torch.fx.Graph) -> None:
    """Remove seeds that nothing uses, so that what was not fused draws the same random numbers as in eager mode."""
    for node in list(graph.nodes):
        if node.meta.get("is_seed") and not node.users:
            graph.erase_node(node)


def _mark_gradients(origin: GraphModule, traced: GraphModule) -> None:
    """meta["requires_grad"] on every node: the trace itself records values detached from autograd."""
    enabled = torch.is_grad_enabled()
    given = (nodes.value(node) for node in origin.graph.nodes if node.op == "placeholder")
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            node.meta["requires_grad"] = bool(getattr(next(given), "requires_grad", False))
        elif node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif node.op == "call_function":
            inputs = any(parent.meta.get("requires_grad") for parent in node.all_input_nodes)
            detached = nodes.packet(node) in (aten.detach, aten.detach_)
            held = nodes.value(node)
            integral = isinstance(held, torch.Tensor) and not (held.is_floating_point() or held.is_complex())
            node.meta["requires_grad"] = enabled and inputs and not detached and not integral
    _mark_stops(traced)


def _mark_stops(traced: GraphModule) -> None:
    """meta["stop_gradient"] where a gradient ends on its way up (detach, no_grad): the analysis must stop there too."""
    feeds: dict[Node, bool] = {}
    for node in reversed(traced.graph.nodes):
        feeds[node] = any(user.meta.get("requires_grad") or feeds[user] for user in node.users)
        if node.op != "call_function" or node.meta.get("requires_grad") or not feeds[node]:
            continue
        held = nodes.value(node)
        if isinstance(held, torch.Tensor) and held.is_floating_point():
            node.meta["stop_gradient"] = any(parent.meta.get("requires_grad") for parent in node.all_input_nodes)


# --- in-place operations ----------------------------------------------------------------------------------------


def make_functional(graph: torch.fx.Graph) -> None:
    """Replace in-place operations on tensors that this graph made and nobody else sees by out-of-place ones.

    `scores.masked_fill_(mask, -inf)` on a fresh product is the usual case. Anything that could be seen through an
    alias (an input, a view that is used later) stays in place: the analysis then sees an operation it does not know.
    """
    position = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        function = _out_of_place(node)
        if function is None or not isinstance(node.args[0], Node):
            continue
        target = node.args[0]
        family = _aliases(target)
        if family is None or not _only_through(target, node, family, position):
            continue
        if not _same_type(node, target):
            continue
        for user in [u for u in target.users if u is not node and position[u] > position[node]]:
            user.replace_input_with(target, node)
        node.target = function


def _out_of_place(node: Node) -> Any | None:
    """The functional overload of an in-place one (`aten.add_.Tensor` -> `aten.add.Tensor`)."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or node.kwargs.get("out"):
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.startswith("_") or not target._schema.is_mutable:
        return None
    functional = getattr(aten, name[:-1], None)
    return getattr(functional, target._overloadname, None) if functional is not None else None


def _same_type(node: Node, target: Node) -> bool:
    """In place, the result is cast to the target's dtype; only calls that need no cast are the same out of place."""
    others = [a for a in node.args[1:] if nodes.is_tensor(a)]
    dtype = nodes.dtype(target)
    promoted = dtype
    for other in others:
        held = nodes.value(other)
        if held.dim() > 0 and held.dtype is not torch.bool:
            promoted = torch.promote_types(promoted, held.dtype)
    return promoted == dtype and nodes.value(target).shape == nodes.value(node).shape


MAYBE_ALIAS = (aten.reshape, aten.contiguous, aten.to, aten.flatten, aten.type_as)
"""Operations that return their input where they can and copy it where they must."""


def _is_view(node: Node) -> bool:
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # getitem and the like: assume it aliases
    if nodes.packet(node) in (aten.to, aten._to_copy) and nodes.dtype(node) is not nodes.dtype(node.all_input_nodes[0]):
        return False  # another dtype: a copy
    returns_alias = any(r.alias_info is not None for r in target._schema.returns)
    return returns_alias or nodes.packet(node) in MAYBE_ALIAS


def _family(node: Node) -> set[Node]:
    """Every node that may share memory with this one."""
    root = node
    while _is_view(root) and root.all_input_nodes:
        root = root.all_input_nodes[0]
    family, stack = {root}, [root]
    while stack:
        for user in stack.pop().users:
            if user not in family and _is_view(user) and user.all_input_nodes[0] in family:
                family.add(user)
                stack.append(user)
    return family


def _aliases(node: Node) -> set[Node] | None:
    """Every node that may share memory with this one; None if that memory comes from outside the graph."""
    family = _family(node)
    return None if any(member.op != "call_function" for member in family) else family


def mark_mutations(graph: torch.fx.Graph) -> None:
    """meta["mutations"]: the nodes that change this node's memory in place, for those that are left.

    The analysis must not take such a tensor for what made it, nor move a read of it across a change.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        if not schema.is_mutable:
            continue
        written = [
            node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            for k, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for target in torch.utils._pytree.tree_leaves(written):
            if isinstance(target, Node):
                for member in _family(target) | {node}:
                    member.meta.setdefault("mutations", []).append(node)


def _only_through(target: Node, write: Node, family: set[Node], position: dict[Node, int]) -> bool:
    """Whether after the write the memory is read through `target`, the write's result and views made later only."""
    own = {target, write}
    for node in sorted(family, key=position.__getitem__):
        if node in own or any(parent in own and position[node] > position[write] for parent in node.all_input_nodes):
            own.add(node)
            continue
        if any(position[user] > position[write] for user in node.users):
            return False
    return True
