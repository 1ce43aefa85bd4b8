"""Attentions of DTensors, and the process that runs them all: what test_dtensor.py compares with one process."""

from __future__ import annotations

import datetime
import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.backend import fuse
from fusion.options import Options
from fusion.report.report import publish

PROCESSES = 2
B, H, N, M, D = 2, 4, 48, 40, 16
Q, K, V = (B, H, N, D), (B, H, M, D), (B, H, M, D)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(D)


def plain(q, k, v):
    return scores(q, k).softmax(-1) @ v


def biased(q, k, v, bias):
    return (scores(q, k) + bias).softmax(-1) @ v


def masked(q, k, v, mask):
    return scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


def slopes(q, k, v, slope, distance):
    return (scores(q, k) + slope[:, None, None] * distance).softmax(-1) @ v


def alibi(q, k, v):
    """Slopes and distances are computed: the score program reads the number of the head."""
    slope = torch.exp2(-2.0 * torch.arange(1, H + 1))
    distance = torch.arange(M) - torch.arange(N)[:, None]
    return slopes(q, k, v, slope, distance)


def transposed(q, k, v):
    """Rows before heads, as linear layers leave them, and back."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


def grouped(q, k, v):
    """Two query heads share each key head."""
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return scores(q, k).softmax(-1) @ v


def one_key_head(q, k, v):
    return scores(q, k.expand(-1, H, -1, -1)).softmax(-1) @ v.expand(-1, H, -1, -1)


def sinks(q, k, v, sink):
    column = sink[None, :, None, None].expand(B, -1, N, 1)
    return torch.cat([scores(q, k), column], -1).softmax(-1)[..., :-1] @ v


def sigmoid(q, k, v):
    return torch.sigmoid(scores(q, k)) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def checkpointed(q, k, v):
    return checkpoint(plain, q, k, v, use_reentrant=False)


def dropped(q, k, v):
    return F.dropout(scores(q, k).softmax(-1), 0.5) @ v


BATCH, HEADS, ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Shard(2), Shard(3), Replicate()


@dataclass(frozen=True, kw_only=True)
class Case:
    """function: of tensors of these shapes (bool where named so), each placed on a mesh of this shape. out: where the
    result has to be; None if the case is refused. traced: whether the function is compiled on DTensors; else the graph
    of one process runs on them, as torch itself cannot trace or run such products of DTensors."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = (Q, K, V)
    at: tuple[tuple[Any, ...], ...]
    out: tuple[Any, ...] | None
    traced: bool = True
    mesh: tuple[int, ...] = (PROCESSES,)
    boolean: frozenset[int] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(sum(map(math.prod, self.shapes)))
        made = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [t > 0.5 if k in self.boolean else t for k, t in enumerate(made)]


def one(*placements):
    return tuple((p,) for p in placements)


CASES: dict[str, Case] = {
    "heads": Case(function=plain, at=one(HEADS, HEADS, HEADS), out=(HEADS,)),
    "batch": Case(function=plain, at=one(BATCH, BATCH, BATCH), out=(BATCH,)),
    "query heads": Case(traced=False, function=plain, at=one(HEADS, WHOLE, WHOLE), out=(HEADS,)),
    "value heads": Case(traced=False, function=plain, at=one(WHOLE, WHOLE, HEADS), out=(HEADS,)),
    "batch and heads": Case(traced=False, function=plain, at=one(HEADS, BATCH, WHOLE), out=(HEADS,)),
    "replicated": Case(function=plain, at=one(WHOLE, WHOLE, WHOLE), out=(WHOLE,)),
    "rows": Case(function=plain, at=one(ROWS, ROWS, ROWS), out=(ROWS,)),
    "columns": Case(function=plain, at=one(COLUMNS, COLUMNS, COLUMNS), out=(WHOLE,)),
    "three heads": Case(
        function=plain,
        shapes=((B, 3, N, D), (B, 3, M, D), (B, 3, M, D)),
        at=one(HEADS, HEADS, HEADS),
        out=(WHOLE,),
    ),
    "rows before heads": Case(
        function=transposed,
        shapes=((B, N, H, D), (B, M, H, D), (B, M, H, D)),
        at=one(ROWS, ROWS, ROWS),
        out=(ROWS,),
    ),
    "two dimensions": Case(traced=False, function=plain, at=((BATCH, HEADS),) * 3, out=(BATCH, HEADS), mesh=(1, 2)),
    "two dimensions, batch": Case(
        traced=False,
        function=biased,
        shapes=(Q, K, V, (H, N, M)),
        at=(*((BATCH, HEADS),) * 3, (WHOLE, BATCH)),
        out=(BATCH, HEADS),
        mesh=(2, 1),
    ),
    "grouped": Case(
        function=grouped, shapes=(Q, (B, 2, M, D), (B, 2, M, D)), at=one(HEADS, HEADS, HEADS), out=(HEADS,)
    ),
    "grouped, keys replicated": Case(
        traced=False,
        function=grouped,
        shapes=(Q, (B, 2, M, D), (B, 2, M, D)),
        at=one(HEADS, WHOLE, WHOLE),
        out=(HEADS,),
    ),
    "one key head": Case(
        traced=False,
        function=one_key_head,
        shapes=(Q, (B, 1, M, D), (B, 1, M, D)),
        at=one(HEADS, WHOLE, WHOLE),
        out=(HEADS,),
    ),
    "bias": Case(function=biased, shapes=(Q, K, V, (N, M)), at=one(HEADS, HEADS, HEADS, WHOLE), out=(HEADS,)),
    "bias per head": Case(
        function=biased, shapes=(Q, K, V, (H, N, M)), at=one(HEADS, HEADS, HEADS, BATCH), out=(HEADS,)
    ),
    "bias per head, replicated": Case(
        function=biased, shapes=(Q, K, V, (H, N, M)), at=one(HEADS, HEADS, HEADS, WHOLE), out=(HEADS,)
    ),
    "bias in rows": Case(
        function=biased, shapes=(Q, K, V, (H, N, M)), at=one(HEADS, HEADS, HEADS, HEADS), out=(HEADS,)
    ),
    "padding": Case(
        function=masked,
        shapes=(Q, K, V, (B, 1, 1, M)),
        at=one(BATCH, BATCH, BATCH, BATCH),
        out=(BATCH,),
        boolean=frozenset({3}),
    ),
    "padding, heads": Case(
        function=masked,
        shapes=(Q, K, V, (B, 1, 1, M)),
        at=one(HEADS, HEADS, HEADS, WHOLE),
        out=(HEADS,),
        boolean=frozenset({3}),
    ),
    "slopes computed from heads": Case(
        function=alibi, traced=False, at=one(HEADS, HEADS, HEADS), out=(HEADS,), options={"emitter": "auto"}
    ),
    "slopes computed from heads, two dimensions": Case(
        function=alibi, traced=False, at=((HEADS, BATCH),) * 3, out=(HEADS, BATCH), mesh=(2, 1)
    ),
    "mask": Case(
        function=masked,
        shapes=(Q, K, V, (B, 1, N, M)),
        at=one(BATCH, BATCH, BATCH, BATCH),
        out=(BATCH,),
        boolean=frozenset({3}),
        options={"emitter": "auto", "tile_maps": "always"},
    ),
    "slopes": Case(
        function=slopes, shapes=(Q, K, V, (H,), (N, M)), at=one(HEADS, HEADS, HEADS, BATCH, WHOLE), out=(HEADS,)
    ),
    "slopes, replicated": Case(
        function=slopes, shapes=(Q, K, V, (H,), (N, M)), at=one(HEADS, HEADS, HEADS, WHOLE, WHOLE), out=(HEADS,)
    ),
    "sinks": Case(function=sinks, shapes=(Q, K, V, (H,)), at=one(HEADS, HEADS, HEADS, BATCH), out=(HEADS,)),
    "sigmoid": Case(function=sigmoid, at=one(HEADS, HEADS, HEADS), out=(HEADS,)),
    "causal": Case(traced=False, function=sdpa, at=one(HEADS, HEADS, HEADS), out=(HEADS,)),
    "checkpointed": Case(function=checkpointed, at=one(HEADS, HEADS, HEADS), out=(HEADS,)),
    "partial sums": Case(traced=False, function=plain, at=one(Partial(), HEADS, HEADS), out=(HEADS,)),
    "inductor": Case(
        function=biased,
        shapes=(Q, K, V, (H, N, M)),
        at=one(HEADS, HEADS, HEADS, WHOLE),
        out=(HEADS,),
        options={"emitter": "auto", "inner": "inductor", "training": "always"},
    ),
    "rows, inductor": Case(
        function=biased,
        shapes=(Q, K, V, (H, N, M)),
        at=one(ROWS, ROWS, ROWS, WHOLE),
        out=(ROWS,),
        options={"emitter": "auto", "inner": "inductor", "training": "always", "sequences": "ring"},
    ),
    "rows, exchanged, inductor": Case(
        function=plain,
        at=one(ROWS, ROWS, ROWS),
        out=(ROWS,),
        options={"emitter": "auto", "inner": "inductor", "training": "always", "sequences": "all_to_all"},
    ),
    "inductor, from its cache": Case(
        function=biased,
        shapes=(Q, K, V, (H, N, M)),
        at=one(HEADS, HEADS, HEADS, WHOLE),
        out=(HEADS,),
        options={"emitter": "auto", "inner": "inductor", "training": "always"},
    ),
    "reference": Case(
        traced=False,
        function=grouped,
        shapes=(Q, (B, 2, M, D), (B, 2, M, D)),
        at=one(HEADS, WHOLE, HEADS),
        out=(HEADS,),
        options={"emitter": "reference"},
    ),
    "dropout": Case(function=dropped, at=one(HEADS, HEADS, HEADS), out=None),
}


def weights(shape: torch.Size) -> Tensor:
    """Factors of the result's elements in the loss."""
    return torch.linspace(-1, 1, math.prod(shape)).sin().reshape(shape)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Result and gradients of a function in one process, in eager mode."""
    leaves = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    out = function(*leaves)
    (out * weights(out.shape).to(out.dtype)).sum().backward()
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def _compile(case: Case) -> Callable[..., Tensor]:
    options = {"inner": "eager", "emitter": "reference"} | case.options
    if case.traced:
        return torch.compile(case.function, backend="fusion", options=options)
    inputs = [t.requires_grad_(t.is_floating_point()) for t in case.inputs()]
    graphs = []

    def keep(module: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graph, report = fuse(module, examples, Options.parse(options))
        publish(report)
        return lambda *given: graphs.append((graph, [t.data_ptr() for t in given])) or graph(*given)

    torch.compile(case.function, backend=keep)(*inputs)
    ((graph, given),) = graphs
    order = [[t.data_ptr() for t in inputs].index(address) for address in given]
    return lambda *leaves: graph(*(leaves[k] for k in order))[0]


def distributed(case: Case) -> dict[str, Any]:
    """The same on this process of several, compiled; with what was fused and where the result is."""
    mesh = init_device_mesh("cpu", case.mesh)
    leaves = []
    for tensor, places in zip(case.inputs(), case.at, strict=True):
        if any(isinstance(p, Partial) for p in places):
            made = DTensor.from_local(tensor / PROCESSES, mesh, places)
        else:
            made = distribute_tensor(tensor, mesh, places)
        leaves.append(made.requires_grad_(tensor.is_floating_point()))
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        compiled = _compile(case)
        out = compiled(*leaves)
    fused = sum(site.fused for report in reports for site in report.sites)
    reasons = [site.reason for report in reports for site in report.sites] + [n for r in reports for n in r.notes]
    found: dict[str, Any] = {"fused": fused, "reasons": reasons, "out": tuple(out.placements)}
    factors = distribute_tensor(weights(out.shape), mesh, [Replicate()] * mesh.ndim)
    (out * factors).sum().full_tensor().backward()
    found["tensors"] = [out.detach().full_tensor(), *(t.grad.full_tensor() for t in leaves if t.grad is not None)]
    return found


def work(rank: int, folder: str) -> None:
    """Run every case on one of the processes and write down what was found."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # shared by the processes, and empty
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=120),
    )
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = distributed(case)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
