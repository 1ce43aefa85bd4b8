"""Random specs in rings and meshes whose processes are threads of this one, against the reference interpreter."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.ir import AttentionSpec
from fusion.ir.expr import I
from fusion.ir.parts import LENGTHS, dims_along, one_part
from fusion.ir.results import coordinate_extents
from fusion.sequences import blocks, operators, partial, transfers
from fusion.sequences.transfers import Message, Ring
from tests.fuzz import specs_run
from tests.fuzz.campaign import Record
from tests.fuzz.check import Result, Verdict
from tests.fuzz.specs import Drawn

KERNELS = 0.1
"""Share of the specs on the device's kernels; the rest in the reference interpreter."""
CALLS = 3
"""Calls of a spec, each of other lengths, layouts and values."""
OFFSET = "offset"
PATIENCE = 300.0
"""Seconds after which a message that has not been sent is an error."""


class Wires:
    """Messages between threads, by sender, receiver and number, and a vote of all. Sends and receptions match in the
    order in which they start."""

    def __init__(self, parts: int):
        self.messages: dict[tuple[int, int, int], Future[Tensor]] = defaultdict(Future)
        self.sent, self.received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.votes, self.barrier, self.lock = [True] * parts, threading.Barrier(parts), threading.Lock()

    def next(self, count: Counter[tuple[int, int]], source: int, target: int) -> Future[Tensor]:
        with self.lock:
            count[source, target] += 1
            return self.messages[source, target, count[source, target]]


class Arrival(NamedTuple):
    """A tensor that waits for a message."""

    tensor: Tensor
    message: Future[Tensor]

    def wait(self) -> None:
        self.tensor.copy_(self.message.result(PATIENCE))


class Transfers(transfers.Transfers):
    """Transfers of one of the threads."""

    def __init__(self, wires: Wires, rank: int, ring: Ring, live: list[list[bool]]):
        self.wires, self.rank, self.ring, self.live = wires, rank, ring, live

    def post(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Any]:
        for peer, tensors in sent:
            for tensor in (tensor for tensor in tensors if tensor.numel()):
                self.wires.next(self.wires.sent, self.rank, peer).set_result(tensor.clone())
        return [
            Arrival(tensor, self.wires.next(self.wires.received, peer, self.rank))
            for peer, tensors in received
            for tensor in tensors
            if tensor.numel()
        ]

    def agree(self, mine: bool, like: Tensor) -> bool:
        self.wires.votes[self.rank] = mine
        self.wires.barrier.wait(PATIENCE)
        result = all(self.wires.votes)
        self.wires.barrier.wait(PATIENCE)
        return result

    def of_shards(self) -> Transfers:
        everything = [[True] * self.ring.parts] * self.ring.parts
        return Transfers(self.wires, self.rank, replace(self.ring, runs=1, groups=0), everything)


class InShards:
    """A spec as a training kernel that consists of threads, each with a shard. groups: of a mesh; 0: a ring, in
    zig-zag where the lengths divide."""

    def __init__(self, spec: AttentionSpec, parts: int, request: str, groups: int = 0):
        self.spec, self.parts, self.request, self.groups = spec, parts, request, groups
        rows = dims_along(spec, I)
        self.rows = (rows[0], *[None for _ in rows[1:]]) if groups else rows
        self.local = one_part(spec, "i", self.rows, OFFSET)
        self.dims = (self.rows[0], *partial.key_dims(spec)[1:3], *self.rows[3:])

    def _ring(self, sizes: Sequence[int]) -> Ring:
        extents = coordinate_extents(self.spec, sizes)
        uneven = any(extents[name] % (2 * self.parts) for name in "ij")
        dims = self.dims[1:3]
        return Ring(
            group="", parts=self.parts, offset=OFFSET, rows=extents["i"], keys=extents["j"], dims=dims,
            runs=1 if self.groups or uneven else 2, groups=self.groups,
        )  # fmt: skip

    def _everywhere(self, sizes: Sequence[int], run: Callable[..., Any], *cut: tuple[Tensor, int | None]) -> list[Any]:
        """Results of all threads. run: (rank, the parts of the tensors that are `cut`, sizes, ring) -> result. cut:
        (tensor, its dimension that is sharded)."""
        ring, known, wires = self._ring(sizes), dict(zip(self.spec.sizes, sizes, strict=True)), Wires(self.parts)
        shards = replace(ring, runs=1, groups=0)
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()

        def one(rank: int) -> Any:
            here.rank = rank
            first, count = shards.rows_of(rank)
            local = known | {OFFSET: first, LENGTHS["i"]: count}
            spans = [shards.keys_of(rank) if n in (1, 2) else (first, count) for n in range(len(cut))]
            given = [t if d is None else t.narrow(d, *span) for (t, d), span in zip(cut, spans, strict=True)]
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(type(mode)())
                return run(rank, given, [local[name] for name in self.local.sizes], ring.to_json())

        here = threading.local()
        of_thread = lambda ring, live: Transfers(wires, here.rank, ring, live)
        with mock.patch.object(blocks, "Transfers", of_thread), ThreadPoolExecutor(self.parts) as pool:
            return [done.result() for done in [pool.submit(one, rank) for rank in range(self.parts)]]

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
        text, i = self.local.to_json(), self.spec.output.dims.index("i")
        run = lambda rank, own, local, ring: operators.forward(own, local, text, self.request, ring)
        results = self._everywhere(sizes, run, *zip(operands, self.dims, strict=True))
        return [torch.cat([out for out, _ in results], i), [statistics for _, statistics in results]]

    def backward(self, *given: Any) -> list[Tensor]:
        grad, out, statistics, operands, sizes, needs, *_ = given
        text, i = self.local.to_json(), self.spec.output.dims.index("i")

        def run(rank: int, own: list[Tensor], local: list[int], ring: str) -> list[Tensor]:
            *own, grad, out = own
            return operators.backward(grad, out, statistics[rank], own, local, text, self.request, needs, ring)

        results = self._everywhere(sizes, run, *zip(operands, self.dims, strict=True), (grad, i), (out, i))
        dims = [dim for dim, needed in zip(self.dims, needs, strict=True) if needed]
        parts = zip(dims, zip(*results, strict=True), strict=True)
        return [torch.stack(of_all).sum(0) if dim is None else torch.cat(of_all, dim) for dim, of_all in parts]


class RoundedOnce(TorchDispatchMode):
    """Products of float32 matrices, each element of which is rounded once."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm) and args[0].dtype is torch.float32:
            return func(*(matrix.double() for matrix in args)).float()
        return func(*args, **(kwargs or {}))


def run(record: Record, seeds: Iterable[int], seconds: float) -> None:
    """Check the spec of each seed that a ring can compute."""

    def way(found: Drawn, rng: random.Random) -> specs_run.Way:
        return specs_run.Way(emitter="reference", trained=True, plan=None)

    with (
        mock.patch.object(specs_run, "kernel", kernel),
        mock.patch.object(specs_run, "check", check),
        mock.patch.dict(specs_run.CALLS, {"as for users": CALLS}),
    ):
        specs_run.run(record, seeds, seconds, way)


def check(found: Drawn, how: specs_run.Way, rng: random.Random, seed: int) -> list[Result]:
    """Results of a spec's calls. torch's products add up in an order that depends on the numbers of rows and keys,
    which are others in a ring: interpreted blocks that keep to the rule once both round their products once are no
    finding."""
    results = CHECK(found, how, rng, seed)
    if any(result.verdict is Verdict.OVER for result in results) and request(found.spec) == "reference":
        with RoundedOnce():
            again = CHECK(found, how, random.Random(f"calls {seed}"), seed)
        if not any(result.verdict is Verdict.OVER for result in again):
            return [replace(r, verdict=Verdict.LUCK) if r.verdict is Verdict.OVER else r for r in results]
    return results


CHECK = specs_run.check


def request(spec: AttentionSpec) -> str:
    """Emitter of a spec's blocks."""
    return "auto/unproved" if random.Random(f"kernels {spec}").random() < KERNELS else "reference"


def kernel(found: Drawn, how: specs_run.Way) -> InShards | None:
    """What runs the spec; None where a ring cannot."""
    spec = found.spec
    dims = dims_along(spec, I)[0], *partial.key_dims(spec)[1:3]
    if partial.unsupported(spec) is not None or None in dims:
        return None
    parts, groups = random.Random(f"shards {spec}").choice([(2, 0), (3, 0), (4, 0), (2, 2), (3, 3), (4, 2), (4, 4)])
    return InShards(spec, parts, request(spec), groups)
