"""Random specs in a ring whose processes are simulated one after another, against the reference interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusion.ir import AttentionSpec
from fusion.ir.expr import I
from fusion.ir.parts import LENGTHS, dims_along, one_part
from fusion.ir.results import coordinate_extents
from fusion.sequences import partial, ring
from fusion.sequences.transfers import Returns, Ring
from tests.fuzz import specs_run
from tests.fuzz.campaign import Record
from tests.fuzz.specs import Drawn

KERNELS = 0.1
"""Share of the specs on the device's kernels; the rest in the reference interpreter."""
CALLS = 3
"""Calls of a spec, each of other lengths, layouts and values."""
OFFSET = "offset"


@dataclass
class Processes:
    """Data that real processes would send each other. ordinary: what each says of its rows; gradients: of K and V, by
    owner, as they arrive."""

    keys: list[Tensor]
    ordinary: list[bool] = field(default_factory=list)
    decided: bool | None = None
    gradients: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def transfers(self, rank: int) -> Callable[[Ring, list[list[bool]]], Transfers]:
        return lambda ring, live: Transfers(self, rank, ring, live)


class Transfers:
    """Transfers of one of the processes."""

    def __init__(self, processes: Processes, rank: int, ring: Ring, live: list[list[bool]]):
        self.processes, self.rank, self.ring, self.live = processes, rank, ring, live

    def blocks(self, own: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        for step in range(self.ring.parts):
            owner = (self.rank - step) % self.ring.parts
            run = self.ring.keys_of(owner)
            keys = [t.narrow(d, *run) for t, d in zip(self.processes.keys, self.ring.dims, strict=True)]
            yield owner, keys if self.live[self.rank][owner] else []

    def agree(self, mine: bool, like: Tensor) -> bool:
        self.processes.ordinary.append(mine)
        return mine if self.processes.decided is None else self.processes.decided

    def whole(self, own: Sequence[Tensor]) -> list[Tensor]:
        return self.processes.keys


class Arriving(Returns):
    """Gradients on their way, which the owner finds in `Processes`."""

    def add(self, step: int, gradients: dict[int, Tensor]) -> None:
        owner = (self.transfers.rank - step) % self.transfers.ring.parts
        for n in self.needed if gradients else ():
            part = gradients[n + 1] if not step else gradients[n + 1].to(self.dtypes[n])
            self.transfers.processes.gradients.setdefault((owner, n), []).append(part.to(self.sums[n].dtype))

    def finish(self) -> None:
        pass


class InShards:
    """A spec as a training kernel that consists of simulated processes."""

    def __init__(self, spec: AttentionSpec, parts: int, request: str):
        self.spec, self.parts, self.request = spec, parts, request
        self.rows = dims_along(spec, I)
        self.local = one_part(spec, "i", self.rows, OFFSET)

    def _processes(self, operands: Sequence[Tensor], sizes: Sequence[int], run: Callable[..., Any], *cut: Tensor):
        """Results of all processes. run: (tensors of its rows, operands, sizes, ring) -> result. cut: tensors with the
        dimensions of the output."""
        extents, known = coordinate_extents(self.spec, sizes), dict(zip(self.spec.sizes, sizes, strict=True))
        dims = tuple(partial.key_dims(self.spec)[1:3])
        shards = Ring(group="", parts=self.parts, offset=OFFSET, rows=extents["i"], keys=extents["j"], dims=dims)
        processes, i = Processes(list(operands[1:3])), self.spec.output.dims.index("i")

        def one(rank: int) -> Any:
            first, count = shards.rows_of(rank)
            own = [o if d is None else o.narrow(d, first, count) for o, d in zip(operands, self.rows, strict=True)]
            own[1:3] = [o.narrow(d, *shards.keys_of(rank)) for o, d in zip(operands[1:3], dims, strict=True)]
            here = known | {OFFSET: first, LENGTHS["i"]: count}
            with mock.patch.object(ring, "Transfers", processes.transfers(rank)):
                local = [here[name] for name in self.local.sizes]
                return run(rank, [t.narrow(i, first, count) for t in cut], own, local, shards.to_json())

        with mock.patch.object(ring, "Returns", Arriving):
            results = [one(rank) for rank in range(self.parts)]
            if not all(processes.ordinary) and any(processes.ordinary):  # which the others learn of
                processes.decided = False
                processes.gradients.clear()
                results = [one(rank) for rank in range(self.parts)]
        return results, processes

    def outputs(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
        text, i = self.local.to_json(), self.spec.output.dims.index("i")
        run = lambda rank, cut, own, local, shards: ring.forward(own, local, text, self.request, shards)
        results, _ = self._processes(operands, sizes, run)
        return [torch.cat([out for out, _ in results], i), [statistics for _, statistics in results]]

    def backward(self, *given: Any) -> list[Tensor]:
        grad, out, statistics, operands, sizes, needs, *_ = given
        text = self.local.to_json()

        def run(rank: int, cut: list[Tensor], own: list[Tensor], local: list[int], shards: str) -> list[Tensor]:
            return ring.backward(*cut, statistics[rank], own, local, text, self.request, needs, shards)

        results, processes = self._processes(operands, sizes, run, grad, out)
        numbers, found = [n for n, needed in enumerate(needs) if needed], []
        for place, n in enumerate(numbers):
            parts = [result[place] for result in results]
            if n in (1, 2):
                parts = [
                    sum(processes.gradients.get((owner, n - 1), []), torch.zeros(part.shape)).to(part.dtype)
                    for owner, part in enumerate(parts)
                ]
            dim = partial.key_dims(self.spec)[n] if n in (1, 2) else self.rows[n]
            found.append(sum(parts[1:], parts[0]) if dim is None else torch.cat(parts, dim))
        return found


def run(record: Record, seeds: Iterable[int], seconds: float) -> None:
    """Check the spec of each seed that a ring can compute."""

    def way(found: Drawn, rng: random.Random) -> specs_run.Way:
        return specs_run.Way(emitter="reference", trained=True, plan=None)

    with mock.patch.object(specs_run, "kernel", kernel), mock.patch.dict(specs_run.CALLS, {"as for users": CALLS}):
        specs_run.run(record, seeds, seconds, way)


def kernel(found: Drawn, how: specs_run.Way) -> InShards | None:
    """What runs the spec; None where a ring cannot."""
    rng = random.Random(f"shards {found.spec}")
    if partial.unsupported(found.spec) is not None or None in (
        dims_along(found.spec, I)[0],
        *partial.key_dims(found.spec)[1:3],
    ):
        return None
    request = "auto/unproved" if rng.random() < KERNELS else "reference"
    return InShards(found.spec, rng.choice([2, 3, 4]), request)
