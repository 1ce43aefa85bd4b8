"""`fusion.sequence_parallel`: a function of whole sequences, called with DTensors that are sharded along them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import GraphModule

from fusion.backend import fuse
from fusion.errors import ShardingError, StrictError
from fusion.options import Options
from fusion.passes import nodes
from fusion.report.report import publish
from fusion.runtime import dtensor  # noqa: F401  (registers what the ops do with DTensors)
from fusion.torch_private import tensors, tracing
from fusion.torch_private.devices import in_context_parallel


def sequence_parallel(function: Callable[..., Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Function that computes `function` on DTensors, exactly, forward and backward.

    function: attention in plain PyTorch as one process would compute it, of tensors and plain values: with masks from
        positions (`torch.arange`), biases, windows, dropout of whole sequences. It is traced once for each combination
        of shapes and dtypes, without data. Tensors that it closes over are the same on all processes.
    options: of the backend (docs/options.md); "sequences" names the schedule. Attention that cannot be fused raises
        StrictError with the reason, unless "strict" is False; DTensor computes it then.

    The result takes DTensors of one mesh; tensors among its arguments are the same on every process. It returns
    DTensors, whose rows are sharded as those of Q are. Masks of dropout are those of one process with the random seed
    of the first.

    Raises ShardingError for arguments without a DTensor, for functions that return attention weights, and in torch's
    `context_parallel`.
    """
    chosen = Options.parse({"strict": True, **(options or {}), "inner": "eager"})
    compiled: dict[Any, GraphModule] = {}

    def run(*arguments: Any) -> Any:
        mesh = next((a.device_mesh for a in arguments if isinstance(a, DTensor)), None)
        if mesh is None:
            kinds = ", ".join(type(a).__name__ for a in arguments) or "nothing"
            raise ShardingError(
                f"a function of sharded sequences was called with {kinds}; give DTensors, e.g. of "
                "torch.distributed.tensor.distribute_tensor(q, mesh, [Shard(2)])"
            )
        if in_context_parallel():
            raise ShardingError(
                "a function of sharded sequences was called in torch's context_parallel, which deals rows of its "
                "buffers in an order that DTensors do not tell; call it outside, on shards that follow each other"
            )
        placed = [_placed(argument, mesh) for argument in arguments]
        key = tuple(map(_form, placed)), torch.is_grad_enabled(), mesh
        if key not in compiled:
            compiled[key] = _compile(function, placed, mesh, chosen)
        return compiled[key](*placed)

    return run


def _placed(argument: Any, mesh: DeviceMesh) -> Any:
    if isinstance(argument, DTensor) or not isinstance(argument, Tensor):
        return argument
    return DTensor.from_local(argument, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value), value
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad


def _compile(function: Callable[..., Any], arguments: list[Any], mesh: DeviceMesh, options: Options) -> GraphModule:
    mode = tensors.FakeTensorMode(allow_non_fake_inputs=True)
    whole = [_whole(a, mode) if isinstance(a, Tensor) else a for a in arguments]
    flat = lambda *given: function(*given)  # a method has one parameter more than it is given
    graph = tracing.make_fx(flat, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(*whole)
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), whole, strict=True):
        node.meta["val"] = value
    fused, report = fuse(graph, whole, options)
    publish(report)
    if options.strict and not report.fused:
        raise StrictError("no attention was found in a function of sharded sequences: " + "; ".join(report.notes))
    targets = {node.target for node in fused.graph.nodes}
    if torch.ops.fusion.attention_outputs.default in targets:
        raise ShardingError(
            "a function of sharded sequences uses attention weights beside the product with V, and no process has all "
            "of a row; compute them apart from the attention"
        )
    _place_constants(fused, mesh)
    return fused


def _whole(tensor: Tensor, mode: Any) -> Tensor:
    """The whole tensor, without data."""
    with mode:
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return whole.requires_grad_(tensor.requires_grad)


def _place_constants(module: GraphModule, mesh: DeviceMesh) -> None:
    """Make every tensor that the graph starts from, beside its arguments, a DTensor that is the same on all processes;
    random ones, the seeds of dropout among them, are those that the first process draws."""

    def replicated(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def shared(tensor: Tensor) -> DTensor:
        for number in range(mesh.ndim):
            dist.broadcast(tensor, group=mesh.get_group(number), group_src=0)
        return replicated(tensor)

    for node in list(module.graph.nodes):
        if node.op not in ("get_attr", "call_function") or node.all_input_nodes or not nodes.is_tensor(node):
            continue
        random = node.op == "call_function" and torch.Tag.nondeterministic_seeded in node.target.tags
        with module.graph.inserting_after(node):
            call = module.graph.call_function(shared if random else replicated, (node,))
        node.replace_all_uses_with(call, delete_user_cb=lambda user, call=call: user is not call)
    module.recompile()
