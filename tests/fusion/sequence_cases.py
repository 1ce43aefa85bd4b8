"""Attentions of sharded sequences, and the processes that run them: test_sequences.py compares with one process."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.utils._python_dispatch import TorchDispatchMode

import fusion
from fusion import sequences
from fusion.ir.parts import Call, Split
from fusion.runtime import dtensor
from fusion.sequences import cost
from tests.fusion.dtensor_cases import weights

B, H, N, D = 2, 4, 37, 16
QKV = ((B, H, N, D),) * 3
SCHEDULES = ("gather", "ring", "zigzag", "mesh", "all_to_all")


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def plain(q, k, v):
    return scores(q, k).softmax(-1) @ v


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_written_out(q, k, v):
    i, j = positions(q, k)
    return scores(q, k).masked_fill(j > i, torch.finfo(q.dtype).min).softmax(-1) @ v


def window(q, k, v):
    i, j = positions(q, k)
    return scores(q, k).masked_fill((j > i) | (i - j >= 7), float("-inf")).softmax(-1) @ v


def capped(q, k, v):
    i, j = positions(q, k)
    return (20 * torch.tanh(scores(q, k) / 20)).masked_fill(j > i, float("-inf")).softmax(-1) @ v


def alibi(q, k, v):
    i, j = positions(q, k)
    slope = torch.exp2(-2.0 * torch.arange(1, H + 1))[:, None, None]
    return (scores(q, k) - slope * (i - j).abs()).softmax(-1) @ v


def table_of_distances(q, k, v, table):
    i, j = positions(q, k)
    return (scores(q, k) + table[:, (i - j).clamp(-8, 8) + 8]).softmax(-1) @ v


def biased(q, k, v, bias):
    return (scores(q, k) + bias).softmax(-1) @ v


def padded(q, k, v, mask):
    return scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


def padded_finite(q, k, v, mask):
    i, j = positions(q, k)
    return scores(q, k).masked_fill(mask | (j > i), torch.finfo(q.dtype).min).softmax(-1) @ v


def documents(q, k, v, document):
    i, j = positions(q, k)
    keep = (document[:, None, :, None] == document[:, None, None, :]) & (j <= i)
    return scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def grouped(q, k, v):
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return scores(q, k).softmax(-1) @ v


def last_rows(q, k, v):
    i, j = positions(q, k)
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    return scores(q, k).masked_fill(j > i + (k.shape[-2] - q.shape[-2]), float("-inf")).softmax(-1) @ v


def sinks(q, k, v, sink):
    column = sink[None, :, None, None].expand(B, -1, q.shape[-2], 1)
    return torch.cat([scores(q, k), column], -1).softmax(-1)[..., :-1] @ v


def sigmoid(q, k, v):
    return torch.sigmoid(scores(q, k)) @ v


def gated(q, k, v, gate):
    return (scores(q, k).softmax(-1) * gate) @ v


def rows_first(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (scores(q, k).softmax(-1) @ v).transpose(1, 2)


class Scaled:
    def attend(self, q, k, v):
        return plain(q * 2, k, v)


def dropped(q, k, v):
    return F.dropout(scores(q, k).softmax(-1), 0.5) @ v


def overflowing(q, k, v):
    return (scores(q, k) * 1e37).softmax(-1) @ v


@dataclass(frozen=True, kw_only=True)
class Case:
    """function: of tensors of these shapes, of which those in `boolean` hold True with this probability, those in
    `integers` rising numbers. rows: the dimension of Q, K and V that is sharded. placed: that of others, by number;
    the rest is the same on all processes. lacks: schedules that cannot run; the gather takes their place."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = QKV
    boolean: dict[int, float] = field(default_factory=dict)
    integers: frozenset[int] = frozenset()
    rows: int = 2
    dtype: torch.dtype = torch.float32
    emitter: str = "reference"
    placed: dict[int, int] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(sum(map(math.prod, self.shapes)))
        return [self._made(number, shape, generator) for number, shape in enumerate(self.shapes)]

    def of(self, schedule: str) -> Case:
        """The case with a length that divides where the schedule needs it."""
        even = tuple(tuple(40 if extent == N else extent for extent in shape) for shape in self.shapes)
        return replace(self, shapes=even) if schedule == "zigzag" else self

    def placements(self) -> tuple[Shard]:
        return (Shard(self.rows),)

    def runs(self, schedule: str, processes: int) -> str:
        """The schedule that runs where this one is asked for."""
        heads = 2 if self.rows == 1 else 1
        divides = any(all(shape[dim] % processes == 0 for shape in self.shapes[:3]) for dim in (0, heads))
        if schedule == "zigzag":
            divides = not any(shape[self.rows] % (2 * processes) for shape in self.shapes[:3])
        impossible = schedule in self.lacks or schedule in ("all_to_all", "zigzag") and not divides
        return "gather" if impossible else schedule

    def _made(self, number: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if number in self.boolean:
            return torch.rand(shape, generator=generator) < self.boolean[number]
        if number in self.integers:
            return torch.randint(0, 3, shape, generator=generator).sort(-1).values
        return torch.randn(shape, generator=generator).to(self.dtype)


CASES: dict[str, Case] = {
    "plain": Case(function=plain),
    "plain, kernels": Case(function=plain, emitter="auto"),
    "bfloat16": Case(function=plain, dtype=torch.bfloat16),
    "bfloat16, causal": Case(function=causal, dtype=torch.bfloat16),
    "float64": Case(function=plain, dtype=torch.float64),
    "causal": Case(function=causal),
    "causal, kernels": Case(function=causal, emitter="auto"),
    "causal by a finite fill": Case(function=causal_written_out),
    "window": Case(function=window),
    "window, kernels": Case(function=window, emitter="auto"),
    "soft cap": Case(function=capped),
    "ALiBi": Case(function=alibi),
    "table of distances": Case(function=table_of_distances, shapes=(*QKV, (H, 17))),
    "bias": Case(function=biased, shapes=(*QKV, (H, N, N))),
    "bias, sharded by rows": Case(function=biased, shapes=(*QKV, (H, N, N)), placed={3: 1}),
    "bias, sharded by keys": Case(function=biased, shapes=(*QKV, (H, N, N)), placed={3: 2}),
    "padding": Case(function=padded, shapes=(*QKV, (B, 1, 1, N)), boolean={3: 0.3}),
    "rows without a live key": Case(function=padded, shapes=(*QKV, (B, 1, N, N)), boolean={3: 0.95}),
    "rows without a live key, finite": Case(function=padded_finite, shapes=(*QKV, (B, 1, 1, N)), boolean={3: 0.5}),
    "documents": Case(function=documents, shapes=(*QKV, (B, N)), integers=frozenset({3})),
    "grouped": Case(function=grouped, shapes=((B, 8, N, D), (B, 4, N, D), (B, 4, N, D))),
    "sinks": Case(function=sinks, shapes=(*QKV, (H,))),
    "sigmoid": Case(function=sigmoid, lacks=("ring", "zigzag", "mesh")),
    "multiplied weights": Case(function=gated, shapes=(*QKV, (N, N))),
    "rows before heads": Case(function=rows_first, shapes=((B, N, H, D),) * 3, rows=1),
    "a method": Case(function=Scaled().attend),
    "other lengths": Case(function=plain, shapes=((B, H, 10, D), (B, H, 23, D), (B, H, 23, D))),
    "fewer rows than processes": Case(function=plain, shapes=((B, H, 3, D), (B, H, 5, D), (B, H, 5, D))),
    "one key head": Case(
        function=lambda q, k, v: plain(q, k.expand(-1, H, -1, -1), v.expand(-1, H, -1, -1)),
        shapes=((B, H, N, D), (B, 1, N, D), (B, 1, N, D)),
    ),
    "infinite scores": Case(function=overflowing, shapes=((1, 4, 9, D),) * 3),
}
CACHE = ((B, H, 3, D), (B, 2, N, D), (B, 2, N, D))
WHOLE_CACHE = ((B, H, 3, D), *QKV[1:])
DECODED = {
    "last rows, grouped": Case(function=last_rows, shapes=CACHE),
    "last rows, kernels": Case(function=last_rows, shapes=CACHE, emitter="auto"),
    "sinks, bfloat16": Case(function=sinks, shapes=(*WHOLE_CACHE, (H,)), dtype=torch.bfloat16),
    "bias": Case(function=biased, shapes=(*WHOLE_CACHE, (H, 3, N))),
    "fewer keys than processes": Case(function=plain, shapes=((B, H, 3, D), (B, H, 3, D), (B, H, 3, D))),
    "rows without a live key": Case(
        function=padded, shapes=(*WHOLE_CACHE, (B, 1, 3, N)), boolean={3: 0.95}, lacks=("ring",)
    ),
}
"""Calls without a gradient; `lacks`: those that take all keys in the end."""
DROPOUT, DROPPED, SEED = Case(function=dropped), "dropout", 7


EVEN = ((2, 4, 32, D),) * 3
COUNTED = {
    "even": Case(function=plain, shapes=EVEN),
    "causal, even": Case(function=causal, shapes=EVEN),
    "grouped, even": Case(function=grouped, shapes=((2, 8, 32, D), (2, 4, 32, D), (2, 4, 32, D))),
    "other widths": Case(function=plain, shapes=((2, 4, 32, D), (2, 4, 64, D), (2, 4, 64, 2 * D))),
    "window, uneven": Case(function=window),
}


def _place(case: Case, mesh: DeviceMesh) -> list[DTensor]:
    leaves = []
    for number, tensor in enumerate(case.inputs()):
        dim = case.placed.get(number, case.rows if number < 3 else None)
        place = Replicate() if dim is None else Shard(dim)
        leaves.append(distribute_tensor(tensor, mesh, [place]).requires_grad_(tensor.is_floating_point()))
    return leaves


class Ran(list[str]):
    """Names of the schedules that ran, and the last call's sizes."""

    traffic: cost.Traffic


@contextlib.contextmanager
def recorded() -> Iterator[Ran]:
    ran = Ran()

    def split(call: Call) -> Split | None:
        result = sequences.schedules.split(call)
        if result is not None:
            ran.traffic = sequences.schedules.traffic(call.spec, call.sizes, call.parts)
            in_ring = "mesh" if result.groups else "ring" if result.runs == 1 else "zigzag"
            by_rows = "gather" if result.keys is None else in_ring
            ran.append(by_rows if result.coordinate == "i" else "all_to_all")
        return result

    dtensor.layout.cache_clear()
    with mock.patch.object(sequences, "split", split):
        yield ran


class Sent(TorchDispatchMode):
    """Count of the elements that this process sends: by torch's gathers to `processes` - 1 others, and by the
    room's own messages."""

    def __init__(self, processes: int):
        super().__init__()
        self.processes, self.elements = processes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if name == "all_gather_into_tensor":
            self.elements += args[0].numel() * (self.processes - 1)
        elif "_c10d_functional" in func.namespace:
            assert name in ("wait_tensor", "_wrap_tensor_autograd"), f"{name} is not counted"
        return func(*args, **(kwargs or {}))

    def messages(self, operations: list[dist.P2POp]) -> list[Any]:
        self.elements += sum(p.tensor.numel() for p in operations if p.op is dist.isend)
        return BATCH(operations)

    def __enter__(self):
        dist.batch_isend_irecv = self.messages
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        dist.batch_isend_irecv = BATCH
        super().__exit__(*given)


BATCH, GATHER = dist.batch_isend_irecv, dist.all_gather


def counted(case: Case, schedule: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Elements that this process sends in the forward and in the backward, and those that the cost model says."""
    leaves, processes = _place(case, mesh), mesh.size()
    attend = fusion.sequence_parallel(case.function, options={"emitter": case.emitter, "sequences": schedule})
    with recorded() as ran, Sent(processes) as forward:
        out = attend(*leaves)
    arriving = distribute_tensor(torch.ones(out.shape), mesh, out.placements)
    with Sent(processes) as backward:
        out.backward(arriving)
    traffic = ran.traffic
    exact = schedule in ("ring", "zigzag", "mesh")
    model = traffic.each(schedule)[:, dist.get_rank()] if exact else traffic.sent(schedule)
    return {"sent": (forward.elements, backward.elements), "model": model, "formula": traffic.sent(schedule)}


def distributed(case: Case, schedule: str, mesh: DeviceMesh, weighted: bool = True) -> dict[str, Any]:
    """The same on this process of several; with the schedule that ran and the placement of the results."""
    leaves = _place(case, mesh)
    attend = fusion.sequence_parallel(case.function, options={"emitter": case.emitter, "sequences": schedule})
    with recorded() as ran:
        out = attend(*leaves)
    factors = weights(out.shape).to(out.dtype) if weighted else torch.ones(out.shape, dtype=out.dtype)
    (out * distribute_tensor(factors, mesh, [Replicate()])).sum().full_tensor().backward()
    tensors = [out.detach().full_tensor(), *(t.grad.full_tensor() for t in leaves if t.grad is not None)]
    places = [t.grad.placements for t in leaves[:3] if t.grad is not None]
    return {"out": out.placements, "gradients": places, "tensors": tensors, "ran": ran[0]}


def with_dropout(schedule: str, mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(SEED + dist.get_rank())
    return distributed(DROPOUT, schedule, mesh, weighted=False)


def decoding(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Output of a few rows over a cache that is sharded by its keys; the elements that this process sends."""
    case = DECODED[name]
    leaves = [
        distribute_tensor(tensor, mesh, [Shard(2) if number in (1, 2) else Replicate()])
        for number, tensor in enumerate(case.inputs())
    ]
    attend = fusion.sequence_parallel(case.function, options={"emitter": case.emitter})
    gathered = []

    def gather(parts: list[Tensor], tensor: Tensor, **named: Any) -> Any:
        gathered.append(tensor.numel())
        return GATHER(parts, tensor, **named)

    with torch.no_grad(), Sent(mesh.size()) as sent, mock.patch.object(dist, "all_gather", gather):
        out = attend(*leaves)
    return {"out": out.placements, "tensors": [out.full_tensor()], "gathered": gathered, "sent": sent.elements}


def refusals(mesh: DeviceMesh) -> dict[str, Exception | None]:
    """What functions raise that cannot be computed by shards."""
    leaves, result = _place(CASES["plain"], mesh), {}

    def with_weights(q, k, v):
        w = scores(q, k).softmax(-1)
        return w @ v, w.amax(-1)

    for name, function in {"weights": with_weights, "no attention": lambda q, k, v: q + k + v}.items():
        try:
            result[name] = fusion.sequence_parallel(function, options={"emitter": "reference"})(*leaves) and None
        except Exception as problem:
            result[name] = problem
    return result


def in_context_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    """Results of compiled functions in torch's `context_parallel`, of a function of sharded sequences there, and what
    eager mode has; or what is raised."""
    buffers, result = [torch.randn(1, 2, 16, 8) for _ in range(3)], {}
    options = {"inner": "eager", "emitter": "reference"}
    of_buffers, of_shards = (torch.compile(f, backend="fusion", options=options) for f in (causal, plain))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        shards = [DTensor.from_local(buffer.clone(), mesh, [Shard(2)]) for buffer in buffers]
        with fusion.collect_reports() as reports:
            tensors = of_shards(*shards).full_tensor(), plain(*shards).full_tensor()
        result["DTensors"] = *tensors, [site.reason for report in reports for site in report.sites]
        calls = {"buffers": (of_buffers, buffers), "eager": (causal, buffers)}
        for name, (call, given) in (calls | {"function": (fusion.sequence_parallel(causal), shards)}).items():
            try:
                result[name] = call(*given)
            except Exception as problem:
                result[name] = problem
    return result


def join(rank: int, folder: str, processes: int) -> None:
    torch.set_num_threads(1)
    place, patience = f"file://{folder}/meet", datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=processes, timeout=patience)


def deserted(rank: int, folder: str, schedule: str) -> None:
    """The first process calls an attention after the second has died, and writes down what it raises."""
    join(rank, folder, 2)
    mesh = init_device_mesh("cpu", (2,))
    attend = fusion.sequence_parallel(plain, options={"emitter": "reference", "sequences": schedule})
    leaves = _place(CASES["plain"], mesh)
    attend(*leaves)
    if rank == 1:
        os._exit(0)
    try:
        attend(*leaves)
    except RuntimeError as problem:
        Path(folder, "raised").write_text(str(problem))
    os._exit(0)


def work(rank: int, folder: str, processes: int, selected: list[tuple[str, str]]) -> None:
    """Run cases by schedules on one of the processes and write down what was found."""
    join(rank, folder, processes)
    found, mesh = {}, init_device_mesh("cpu", (processes,))
    runs: dict[Any, Callable[[], Any]] = {
        (name, schedule): functools.partial(distributed, CASES[name].of(schedule), schedule, mesh)
        for name, schedule in selected
    }
    runs |= {
        (name, schedule, "counted"): functools.partial(counted, case, schedule, mesh)
        for name, case in COUNTED.items()
        for schedule in SCHEDULES
        if case.shapes[0][2] % processes == 0 or schedule in ("ring", "mesh")
    }
    runs |= {(name, "decoded"): functools.partial(decoding, name, mesh) for name in DECODED}
    runs |= {(DROPPED, schedule): functools.partial(with_dropout, schedule, mesh) for schedule in SCHEDULES}
    runs |= {"refused": lambda: refusals(mesh), "in context parallel": lambda: in_context_parallel(mesh)}
    for key, run in runs.items():
        try:
            found[key] = run()
        except Exception:
            found[key] = {"error": traceback.format_exc()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
