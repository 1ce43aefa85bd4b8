"""Random specs in a ring whose processes are simulated one after another, against the reference interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.ir import AttentionSpec
from fusion.ir.expr import I
from fusion.ir.parts import LENGTHS, dims_along, one_part
from fusion.ir.results import coordinate_extents
from fusion.sequences import partial, ring, transfers
from fusion.sequences.transfers import Returns, Ring
from tests.fuzz import specs_run
from tests.fuzz.campaign import Record
from tests.fuzz.check import Result, Verdict
from tests.fuzz.specs import Drawn

KERNELS = 0.1
"""Share of the specs on the device's kernels; the rest in the reference interpreter."""
CALLS = 3
"""Calls of a spec, each of other lengths, layouts and values."""
OFFSET = "offset"


@dataclass
class Processes:
    """Data that real processes would send each other. ordinary: what each says of its rows; gradients: of K and V, by
    run, as they arrive."""

    keys: list[Tensor]
    ordinary: list[bool] = field(default_factory=list)
    decided: bool | None = None
    gradients: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def transfers(self, rank: int) -> Callable[[Ring, list[list[bool]]], Transfers]:
        return lambda ring, live: Transfers(self, rank, ring, live)


class Transfers(transfers.Transfers):
    """Transfers of one of the processes, which has the runs of a ring already."""

    def __init__(self, processes: Processes, rank: int, ring: Ring, live: list[list[bool]]):
        self.processes, self.rank, self.ring, self.live = processes, rank, ring, live

    def blocks(self, own: Sequence[Tensor]) -> Iterator[dict[int, list[Tensor]]]:
        for step in range(self.ring.parts):
            here = self.ring.needed(self.live, self.rank, (self.rank - step) % self.ring.parts)
            keys = [*zip(self.processes.keys, self.ring.dims, strict=True)]
            yield {run: [t.narrow(d, *self.ring.keys_of(run)) for t, d in keys] for run in here}

    def dealt(self, tensor: Tensor, dim: int | None, back: bool = False) -> Tensor:
        return tensor

    def agree(self, mine: bool, like: Tensor) -> bool:
        self.processes.ordinary.append(mine)
        return mine if self.processes.decided is None else self.processes.decided

    def of_shards(self) -> Transfers:
        return self

    def whole(self, own: Sequence[Tensor]) -> list[Tensor]:
        return self.processes.keys


class Arriving(Returns):
    """Gradients on their way, which the owner finds in `Processes`."""

    def add(self, step: int, gradients: Mapping[int, Mapping[int, Tensor]]) -> None:
        for run, found in gradients.items():
            for n in self.needed:
                part = found[n + 1] if not step else found[n + 1].to(self.dtypes[n])
                exact = torch.promote_types(self.dtypes[n], torch.float32)
                self.transfers.processes.gradients.setdefault((run, n), []).append(part.to(exact))

    def finish(self) -> None:
        pass


class InShards:
    """A spec as a training kernel that consists of simulated processes."""

    def __init__(self, spec: AttentionSpec, parts: int, request: str):
        self.spec, self.parts, self.request = spec, parts, request
        self.rows = dims_along(spec, I)
        self.local = one_part(spec, "i", self.rows, OFFSET)

    def _processes(self, operands: Sequence[Tensor], sizes: Sequence[int], run: Callable[..., Any], *cut: Tensor):
        """Results of all processes. run: (rank, tensors of its rows, operands, sizes, ring) -> result. cut: tensors
        with the dimensions of the output. Zig-zag where the lengths divide."""
        extents, known = coordinate_extents(self.spec, sizes), dict(zip(self.spec.sizes, sizes, strict=True))
        keys, i = partial.key_dims(self.spec)[1:3], self.spec.output.dims.index("i")
        even = not any(extents[name] % (2 * self.parts) for name in "ij")
        ordinary = Ring(group="", parts=self.parts, offset=OFFSET, rows=extents["i"], keys=extents["j"], dims=keys)

        def one(rank: int, ring_of: Ring, processes: Processes) -> Any:
            def mine(tensor: Tensor, dim: int | None, span: Callable[[int], tuple[int, int]]) -> Tensor:
                runs = ring_of.runs_of(rank)
                return tensor if dim is None else torch.cat([tensor.narrow(dim, *span(run)) for run in runs], dim)

            own = [mine(o, d, ring_of.rows_of) for o, d in zip(operands, self.rows, strict=True)]
            own[1:3] = [mine(o, d, ring_of.keys_of) for o, d in zip(operands[1:3], keys, strict=True)]
            first, count = ordinary.rows_of(rank)
            here = known | {OFFSET: first, LENGTHS["i"]: count}
            with mock.patch.object(ring, "Transfers", processes.transfers(rank)):
                local = [here[name] for name in self.local.sizes]
                return run(rank, [mine(t, i, ring_of.rows_of) for t in cut], own, local, ring_of.to_json())

        with mock.patch.object(ring, "Returns", Arriving):
            shards = replace(ordinary, runs=2 if even else 1)
            processes = Processes(list(operands[1:3]))
            results = [one(rank, shards, processes) for rank in range(self.parts)]
            if not all(processes.ordinary):  # which the others learn of
                shards, processes = ordinary, Processes(list(operands[1:3]), decided=False)
                results = [one(rank, shards, processes) for rank in range(self.parts)]
        return results, processes, shards

    def _whole(self, shards: Ring, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Tensor of all processes."""
        pieces = {}
        for rank, part in enumerate(parts):
            runs = shards.runs_of(rank)
            pieces |= dict(zip(runs, part.tensor_split(len(runs), dim), strict=True))
        return torch.cat([pieces[run] for run in sorted(pieces)], dim)

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
        text, i = self.local.to_json(), self.spec.output.dims.index("i")
        run = lambda rank, cut, own, local, shards: ring.forward(own, local, text, self.request, shards)
        results, _, shards = self._processes(operands, sizes, run)
        return [self._whole(shards, [out for out, _ in results], i), [statistics for _, statistics in results]]

    def backward(self, *given: Any) -> list[Tensor]:
        grad, out, statistics, operands, sizes, needs, *_ = given
        text = self.local.to_json()

        def run(rank: int, cut: list[Tensor], own: list[Tensor], local: list[int], shards: str) -> list[Tensor]:
            return ring.backward(*cut, statistics[rank], own, local, text, self.request, needs, shards)

        results, processes, shards = self._processes(operands, sizes, run, grad, out)
        numbers, found = [n for n, needed in enumerate(needs) if needed], []
        for place, n in enumerate(numbers):
            parts = [result[place] for result in results]
            dim = partial.shard_dims(self.spec)[n]
            if n in (1, 2):
                like = [operands[n].narrow(dim, *shards.keys_of(run)) for run in range(shards.runs * shards.parts)]
                sums = [
                    sum(processes.gradients.get((run, n - 1), []), torch.zeros(part.shape))
                    for run, part in enumerate(like)
                ]
                found.append(torch.cat(sums, dim).to(parts[0].dtype))
            else:
                found.append(sum(parts[1:], parts[0]) if dim is None else self._whole(shards, parts, dim))
        return found


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
    """Results of a spec's calls. torch's products add up in an order that depends on the numbers of rows and keys, which
    are others in a ring: interpreted blocks that keep to the rule once both round their products once are no finding."""
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
    return InShards(spec, random.Random(f"shards {spec}").choice([2, 3, 4]), request(spec))
