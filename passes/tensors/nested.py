"""Jagged nested tensors in a graph: calls on them stay single calls, and their attention is written over their
components.

`torch.nested.nested_tensor(..., layout=torch.jagged)` stores all sequences one after another (`values`) and the start
of each (`offsets`). Its sizes are no numbers, and the analysis sees nothing of it but its component tensors. Attention
becomes one over all sequences, whose mask gives each query the keys of its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from fusion.refusals import Reason
from fusion.torch_private import tensors, tracing
from fusion.torch_private.operators import HigherOrderOperator
from fusion.torch_private.tensors import FakeTensorMode, shape_environment, tree_leaves, without_guards

from .. import nodes
from ..trace import outline
from ..trace.retrace import Retrace


def _asked(target: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def attention(
    query: Any, key: Any, value: Any, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, ask: Callable[..., Any] = _asked,
) -> Any:  # fmt: skip
    """`scaled_dot_product_attention` of nested tensors [B, H, j, D], j ragged, that `reason_against` admits.

    A query whose sequence has no key has the output 0. ask: function that reads a component of a nested tensor.
    """
    q, k, v = (ask("values", x) for x in (query, key, value))  # [H, T, D]
    of_queries, of_keys = (ask("offsets", x) for x in (query, key))
    rows, columns = (torch.arange(x.shape[1], device=x.device) for x in (q, k))
    begun = torch.searchsorted(of_queries[:-1], rows, right=True)  # how many sequences have, at a row
    first, last = of_keys[begun - 1], of_keys[begun]
    if is_causal:
        last = torch.minimum(last, rows + 1)
    live = (first[:, None] <= columns) & (columns < last[:, None])
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], live, dropout_p, scale=scale, enable_gqa=enable_gqa)
    return ask(with_sequences_of, out[0].transpose(0, 1).contiguous(), query)


def with_sequences_of(values: Tensor, other: Any) -> Any:
    """Values [T, H, D] as a nested tensor [B, H, j, D] with the sequences of another."""
    return tensors.nested_like(values, other).transpose(1, 2)


def reason_against(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """Reason why `attention` cannot replace a call of `scaled_dot_product_attention`; None where it can."""
    qkv = (query, key, value)
    if not all(map(nodes.is_nested, qkv)):
        return "not all of its tensors are nested"
    if any(x.device.type != "cpu" for x in qkv):
        return "torch has kernels for it there"
    if any(x.dim() != 4 or tensors.ragged_dim(x) != 2 or x.lengths() is not None for x in qkv):
        return "its tensors are not of the form [batch, heads, sequence, columns], or have holes"
    if attn_mask is not None:
        return "it has a mask"
    if {x.dtype for x in qkv} - {query.dtype} or query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "its tensors are not all in float32, bfloat16 or float16"
    of_query, of_key, of_value = map(tensors.nested_size, qkv)
    if of_query[0] != of_key[0] or of_key[2] != of_value[2]:
        return "its tensors do not have the same sequences"
    if is_causal and of_query[2] != of_key[2]:
        return "it is causal, between sequences of different lengths"
    if any(_is_of_graph(size[2]) for size in (of_query, of_key)):
        return "its sequences are made in the graph"
    return None


def _is_of_graph(length: Any) -> bool:
    """Whether a sequence length is computed in the graph, and is that of no input. Torch 2.13 cannot guard on it, and
    raises an error for a LayerNorm of such tensors: the operations behind the attention need a graph break."""
    sources = shape_environment(length).var_to_sources[length.node.expr]
    return all(source.is_ephemeral() for source in sources)


def empty_like_nested(fake: Any, mode: FakeTensorMode) -> Any:
    """Fake nested tensor of the same form that is no view. (Torch would create a view from its base again, with sizes
    that it knows nothing of.)"""
    names, context = fake.__tensor_flatten__()
    with mode:
        parts = {name: nodes.empty_like(getattr(fake, name)) for name in names}
    return type(fake).__tensor_unflatten__(parts, context, fake.size(), fake.stride())


def created(fakes: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Inputs of a trace, the nested tensors among them made anew."""
    return [empty_like_nested(fake, mode) if nodes.is_nested(fake) else fake for fake in fakes]


def keep_calls(base: type[Retrace]) -> type[Retrace]:
    """Interpreter that traces calls which take or return nested tensors: attention over the components, any other
    operation as one call."""

    class Keeping(base):
        def run_node(self, n: Node) -> Any:
            if n.op not in ("call_function", "call_method") or not _has_nested(n):
                return super().run_node(n)
            with tracing.current_node(self, n):
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                if n.target is attention:
                    return attention(*args, **kwargs, ask=_recorded)
                return _recorded(n.target, *args, **kwargs)

    return Keeping


def _has_nested(node: Node) -> bool:
    values = [nodes.fake(node), *(nodes.fake(argument) for argument in node.all_input_nodes)]
    return any(map(nodes.is_nested, tree_leaves(values)))


def _recorded(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a call on nested tensors unchanged, without tracing into it."""
    tracer = tracing.current_tracer()
    if tracer is None:
        raise nodes.Unsupported(Reason.DEFECT, "a call on nested tensors outside of a trace")
    kind = "call_method" if isinstance(target, str) else "call_function"
    call = tracing.written(tracer, kind, target, args, kwargs)
    # What a call asks of sizes is not asked of later calls: Dynamo has asked it, and a nested tensor that is made in
    # the graph has a length of its own in each trace, which no guard can name.
    with tracing.disable_proxy_modes_tracing(), without_guards():
        return tracing.track(_asked(target, *args, **kwargs), call, tracer)


def refuse_unknown(module: GraphModule) -> None:
    """Raise `Unsupported` where nested tensors are used outside of attention, or in a way that cannot be recorded: with
    holes, changed in place while component tensors are in use, or passed to a subgraph."""
    for node in module.graph.nodes:
        nested_values = [value for value in tree_leaves(nodes.fake(node)) if nodes.is_nested(value)]
        if nested_values and all(node.target is not attention for node in module.graph.nodes):
            raise nodes.Unsupported(Reason.NESTED, f"the graph has nested tensors ({node.name})")
        if any(value.lengths() is not None for value in nested_values):
            raise nodes.Unsupported(Reason.NESTED, f"a nested tensor has holes between its sequences ({node.name})")
        if node.op in ("placeholder", "output") or not _has_nested(node):
            continue
        if outline.writes_outside(node, set()):
            raise nodes.Unsupported(Reason.NESTED, f"a nested tensor is changed in place ({node.name})")
        if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
            message = f"nested tensors are passed to a part of the graph that is not analysed ({node.name})"
            raise nodes.Unsupported(Reason.NESTED, message)
