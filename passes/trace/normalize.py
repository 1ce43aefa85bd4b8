"""Retrace of Dynamo's graph to pre-dispatch ATen, the one form that the analysis reads.

Pre-dispatch preserves autograd, autocast and input mutation; composite operations (matmul, einsum, linear, softmax,
scaled_dot_product_attention) stay single nodes. Stack traces, module paths and Inductor's metadata of the placeholders
are carried over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.traceback
from torch.fx import GraphModule, Node

from fusion.refusals import Reason
from fusion.torch_private import autograd
from fusion.torch_private.operators import OpOverload, schema
from fusion.torch_private.tensors import FakeTensor, FakeTensorMode
from fusion.torch_private.tracing import make_fx

from .. import marks, nodes, subgraphs
from ..tensors import dtensor, nested
from .aliases import mark_mutations
from .autocast import write_casts
from .decompositions import MADE_OF_OTHERS
from .inplace import make_functional, write_to_the_whole
from .outline import Untraceable, inner_graphs, outline
from .repeats import copy_repeated_calls
from .retrace import Retrace, carry_placeholders, fake_inputs, placed
from .rewrites import fill_by_masks, make_by_size, read_floats, write_products

aten = torch.ops.aten

_EXTREMA = {aten.max.dim: aten.amax.default, aten.min.dim: aten.amin.default}
_PRODUCT_NAMES = ("matmul", "bmm", "einsum", "mm", "attention", "encoder_layer", "varlen_attn")
_PRODUCTS_OF_WEIGHTS = ("addmm", "mv", "dot", "inner", "sum")
"""Names that count beside a softmax only: products that linear layers and much else are made of, too."""


def may_hold_attention(module: GraphModule) -> bool:
    """Whether a graph of Dynamo has any product of two activations, without which there is no attention. Checkpointed
    graphs and regions within it count."""
    if any(map(may_hold_attention, inner_graphs(module))):
        return True
    calls = [node for node in module.graph.nodes if node.op.startswith("call")]
    if any(node.op == "call_module" for node in calls):
        return True
    names = {str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", str(n.target)) for n in calls}
    if any(part in name and "addmm" not in name for name in names for part in _PRODUCT_NAMES):
        return True
    normalised = any(part in name for name in names for part in ("softmax", "exp"))
    return normalised and any(part in name for name in names for part in _PRODUCTS_OF_WEIGHTS)


Bodies = Mapping[str, GraphModule]
"""Graphs that replace checkpointed ones, by the names of their attributes."""


def normalize(module: GraphModule, example_inputs: Sequence[Any], bodies: Bodies | None = None) -> GraphModule:
    """Pre-dispatch ATen graph of the same computation, with `meta["val"]` on every node. The argument is unchanged."""
    dtensor.refuse_absent(module)
    outlined = outline(module)
    nested.refuse_unknown(outlined)
    try:
        traced = _trace(outlined, fake_inputs(module, example_inputs), bodies or {})
    except Untraceable:
        traced = _trace(outlined, fake_inputs(module, example_inputs), bodies or {}, sealed=True)
    _refuse_fake_constants(traced)
    carry_placeholders(module, traced)
    dtensor.mark(traced.graph)
    drop_inactive_dropout(traced.graph)
    write_to_the_whole(traced.graph)
    make_functional(traced.graph)
    drop_settled_assertions(traced.graph)
    mark_mutations(traced.graph)
    write_casts(traced.graph)
    make_by_size(traced.graph)
    fill_by_masks(traced.graph)
    write_products(traced.graph)
    read_floats(traced.graph)
    _mark_gradients(module, traced)
    nodes.erase_unused(traced.graph, nodes.impurity())
    write_extrema(traced.graph)
    _mark_stops(traced)
    seed_dropout(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def _trace(
    outlined: GraphModule, inputs: tuple[Sequence[Any], FakeTensorMode], bodies: Bodies, sealed: bool = False
) -> GraphModule:
    """Traced graph. inputs: see `fake_inputs`. sealed: whether each `vmap` stays one call."""
    fakes, mode = inputs
    fakes = nested.created(fakes, mode)
    interpreter = _interpreter(outlined, bodies)

    def run():  # without annotations: the graph would have them, as text, and no key in AOTAutograd's cache
        values = placed(fakes, mode)
        with torch.fx.traceback.preserve_node_meta():
            return interpreter(outlined, sealed).run(*values)

    # With Inductor's freezing, parameters are constants of the graph.
    with mode, patch.object(mode, "allow_non_fake_inputs", True):
        return make_fx(run, MADE_OF_OTHERS, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)()


def _interpreter(outlined: GraphModule, bodies: Bodies) -> type[Retrace]:
    """Class that runs the graph, extended for calls that stay single calls, and for calls that are copied."""
    interpreter = Retrace
    interpreter = subgraphs.keep_calls(interpreter, outlined, bodies)
    interpreter = dtensor.keep_conversions(interpreter)
    interpreter = nested.keep_calls(interpreter)
    interpreter = copy_repeated_calls(interpreter)
    return interpreter


def _refuse_fake_constants(traced: GraphModule) -> None:
    """Raise where a fake tensor became a constant of the graph: it has no values, and the graph could not run."""
    for node in traced.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(traced, str(node.target), None), FakeTensor):
            raise nodes.Unsupported(
                Reason.LOST_TENSOR,
                f"the trace lost sight of a tensor used by {next(iter(node.users), node).format_node()}",
            )


_DROPOUTS = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout,
             aten.dropout_, aten.feature_dropout_, aten.alpha_dropout_, aten.feature_alpha_dropout_)  # fmt: skip


def drop_inactive_dropout(graph: torch.fx.Graph) -> None:
    """Remove dropout in eval mode and with p = 0. It returns its input itself, which others may write to, and FX would
    keep it alive as a random operation."""
    for node in list(graph.nodes):
        if node.op != "call_function" or nodes.packet(node) not in _DROPOUTS:
            continue
        args = nodes.arguments(node)
        if not args["train"] or args["p"] == 0:
            node.replace_all_uses_with(args.get("input", args.get("self")))
            graph.erase_node(node)


def drop_settled_assertions(graph: torch.fx.Graph) -> None:
    """Remove assertions on dtype, device and layout, which torch.export writes behind every cast, where the trace shows
    that they hold: they would keep scores alive."""
    for node in list(graph.nodes):
        if node.op != "call_function" or nodes.packet(node) is not aten._assert_tensor_metadata:
            continue
        args = nodes.arguments(node)
        fake = nodes.fake(args["a"])
        stated = [(args[name], getattr(fake, name)) for name in ("dtype", "device", "layout")]
        if args["size"] is None and args["stride"] is None and all(a is None or a == b for a, b in stated):
            graph.erase_node(node)


def write_extrema(graph: torch.fx.Graph) -> None:
    """Write max(dim) and min(dim) of which the values alone are used as amax and amin, unless a gradient flows: that of
    amax goes to all of several equal elements."""
    for node in list(graph.nodes):
        replacement = _EXTREMA.get(node.target)
        if replacement is None or marks.requires_grad(node) or any(user.args[1] != 0 for user in node.users):
            continue
        args = nodes.arguments(node)
        for user in list(node.users):
            with graph.inserting_before(user):
                extremum = graph.call_function(replacement, (args["self"], [args["dim"]], args["keepdim"]))
            extremum.meta.update(user.meta)
            user.replace_all_uses_with(extremum)
            graph.erase_node(user)
        graph.erase_node(node)


def seed_dropout(graph: torch.fx.Graph) -> None:
    """Draw a seed in front of every active dropout: `marks.seed` is the node of a random int64 of shape [1].

    A fused attention takes its mask from the seed, and the graph then has the seed in the dropout's place: a random
    number that functionalisation, partitioning and recomputation treat as any other. Seeds that stay unused are removed
    by `drop_seeds`.
    """
    for node in list(graph.nodes):
        if not nodes.is_active_dropout(node):
            continue
        fake = nodes.fake(node)
        with graph.inserting_before(node):
            limits = {"dtype": torch.int64, "device": fake.device}
            seed = graph.call_function(aten.randint.low, (0, 2**31 - 1, [1]), limits)
        seed.meta["val"] = fake.new_empty([1], dtype=torch.int64)
        marks.is_seed.set(seed, True)
        marks.seed.set(node, seed)


def drop_seeds(graph: torch.fx.Graph) -> None:
    """Remove unused seeds, so that attentions that are not fused draw the same random numbers as in eager mode."""
    for node in list(graph.nodes):
        if marks.is_seed(node) and not node.users:
            graph.erase_node(node)


def _mark_gradients(origin: GraphModule, traced: GraphModule) -> None:
    """Set `marks.requires_grad` on every node: the trace itself records values detached from autograd."""
    values = map(nodes.fake, origin.graph.find_nodes(op="placeholder"))
    for node, enabled in nodes.with_gradients(traced.graph):
        if node.op == "placeholder":
            marks.requires_grad.set(node, bool(getattr(next(values), "requires_grad", False)))
        elif node.op in ("call_function", "call_method") and node.target is not autograd.SET_GRAD_ENABLED:
            origins = [parent for parent in node.all_input_nodes if marks.requires_grad(parent)]
            origins = origins if enabled or not origins else _returned(node)
            detached = nodes.packet(node) in (aten.detach, aten.detach_)
            fake = nodes.fake(node)
            integral = isinstance(fake, torch.Tensor) and not (fake.is_floating_point() or fake.is_complex())
            marks.requires_grad.set(node, not detached and not integral and any(map(marks.requires_grad, origins)))


def _returned(node: Node) -> list[Node]:
    """Argument that an operation returns itself, if any, with the gradient that it has: one that is written to, or one
    that needs no change, as in `x.float()` of float32. The trace uses the result in place of x from there on."""
    first = node.args[0] if node.args else None
    if not isinstance(node.target, OpOverload) or not (isinstance(first, Node) and nodes.is_tensor(first)):
        return []
    if schema(node.target).is_mutable:
        return [first]
    if not nodes.is_tensor(node) or nodes.packet(node) not in _MAY_DO_NOTHING:
        return []
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), nodes.fake)
    with torch.no_grad():
        return [first] if node.target(*args, **kwargs) is nodes.fake(first) else []


_MAY_DO_NOTHING = (aten.to, aten.type_as, aten.contiguous, aten.flatten, aten.positive, aten.real, aten.conj,
                   aten.resolve_conj, aten.resolve_neg, aten.sum_to_size, aten.lift_fresh, aten.atleast_1d,
                   aten.atleast_2d, aten.atleast_3d)  # fmt: skip


def _mark_stops(traced: GraphModule) -> None:
    """`marks.stop_gradient` where a gradient ends on its way up (detach, no_grad): the analysis must stop there too."""
    feeds: dict[Node, bool] = {}
    for node in reversed(traced.graph.nodes):
        feeds[node] = any(marks.requires_grad(user) or feeds[user] for user in node.users)
        if node.op != "call_function" or marks.requires_grad(node) or not feeds[node]:
            continue
        fake = nodes.fake(node)
        if isinstance(fake, torch.Tensor) and fake.is_floating_point():
            marks.stop_gradient.set(node, any(marks.requires_grad(parent) for parent in node.all_input_nodes))
