"""Blocks of keys on their way between the processes of a ring, and their gradients on the way back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fusion.ir import AttentionSpec
from fusion.ir.expr import coordinates, walk
from fusion.ir.parts import LENGTHS, run_of
from fusion.ir.results import size_value
from fusion.planning.problem import ARITHMETIC, KeyRanges
from fusion.torch_private.distributed import group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Processes of a ring and their shards. group: its name. offset: the spec's size that is a process's first row.
    rows, keys: extent of the sequence. dims: of K and V, those that are sharded."""

    group: str
    parts: int
    offset: str
    rows: int
    keys: int
    dims: tuple[int, int]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Ring:
        fields = json.loads(text)
        return Ring(**(fields | {"dims": tuple(fields["dims"])}))

    def rows_of(self, part: int) -> tuple[int, int]:
        """First query row of a process and their number."""
        return run_of(self.rows, self.parts, part)

    def keys_of(self, part: int) -> tuple[int, int]:
        """First key of a process and their number."""
        return run_of(self.keys, self.parts, part)

    def live(self, spec: AttentionSpec, sizes: Mapping[str, int]) -> list[list[bool]]:
        """For each process and each block of keys, whether a row of the one may have a live key in the other. spec: of
        a process's rows."""
        first, count = np.array([self.keys_of(part) for part in range(self.parts)]).T
        result = []
        for part in range(self.parts):
            low, high = self._visited(spec, sizes, part, max(1, self.rows))
            low, high = low.reshape(-1, 1), high.reshape(-1, 1)
            seen = (low < high) & (low < first + count) & (first < high) & (count > 0)
            result.append(seen.any(0).tolist())
        return result

    def pairs(self, spec: AttentionSpec, sizes: Mapping[str, int]) -> list[int]:
        """Scores of one head that each process computes, in blocks of rows."""
        result = []
        for part in range(self.parts):
            low, high = self._visited(spec, sizes, part, ROWS)
            rows = np.minimum(ROWS, self.rows_of(part)[1] - ROWS * np.arange(low.shape[1]))
            result.append(int(((high - low) * rows).sum() // max(1, len(low))))
        return result

    def _visited(self, spec: AttentionSpec, sizes: Mapping[str, int], part: int, step: int) -> tuple[Any, Any]:
        """First key and end that blocks of so many rows of a process see: [heads with a range of their own, blocks]."""
        first, count = self.rows_of(part)
        known = dict(sizes) | {self.offset: first, LENGTHS["i"]: count}
        starts = np.arange(0, count, step)
        mask = spec.mask
        ends = [] if mask is None else [end for end in (mask.key_lo, mask.key_hi) if end is not None]
        if not ends or any(part.op not in (*ARITHMETIC, "coord", "size") for part in walk(*ends)):
            return np.zeros((1, len(starts)), np.int64), np.full((1, len(starts)), self.keys)
        names = set[str]().union(*map(coordinates, ends)) - {"i0", "i1"}
        batch = tuple((f"b{k}", int(size_value(n, known))) for k, n in enumerate(spec.batch) if f"b{k}" in names)
        assert mask is not None
        ranges = KeyRanges(low=mask.key_lo, high=mask.key_hi, sizes=tuple(known.items()), batch=batch)
        return ranges.of_rows(starts, np.minimum(starts + step, count) - 1, self.keys)


ROWS = 64
"""Rows of a block by which scores are counted."""


class Transfers:
    """Sends and receptions of one process."""

    def __init__(self, ring: Ring, live: list[list[bool]]):
        self.ring, self.live = ring, live
        self.group = group_of(ring.group)
        self.rank = dist.get_rank(self.group)

    def partners(self, step: int) -> tuple[int | None, int | None]:
        """(process whose keys arrive in a step, process that the own keys go to); None where that block is dead."""
        source, target = (self.rank - step) % self.ring.parts, (self.rank + step) % self.ring.parts
        return (
            source if self.live[self.rank][source] else None,
            target if self.live[target][self.rank] else None,
        )

    def blocks(self, own: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """(owner, K and V) in each step, the own ones first; [] in the place of a dead block. The next block is on its
        way meanwhile."""
        own = [tensor.contiguous() for tensor in own]
        received, pending = (own if self.live[self.rank][self.rank] else []), []
        for step in range(self.ring.parts):
            wait(pending)
            here = received
            received, pending = self._exchange(step + 1, own) if step + 1 < self.ring.parts else ([], [])
            yield (self.rank - step) % self.ring.parts, here

    def _exchange(self, step: int, own: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        source, target = self.partners(step)
        received: list[Tensor] = []
        if source is not None:
            received = [self._like(tensor, dim, source) for tensor, dim in zip(own, self.ring.dims, strict=True)]
        return received, self.post(list(own) if target is not None else [], target, received, source)

    def _like(self, tensor: Tensor, dim: int, owner: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = self.ring.keys_of(owner)[1]
        return tensor.new_empty(shape)

    def post(self, sent: Sequence[Tensor], target: int | None, received: Sequence[Tensor], source: int | None) -> list:
        """Start sending and receiving; returns what to wait for."""
        operations = [
            dist.P2POp(function, tensor, group=self.group, group_peer=peer)
            for function, tensors, peer in ((dist.isend, sent, target), (dist.irecv, received, source))
            for tensor in tensors
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def agree(self, mine: bool, like: Tensor) -> bool:
        """Whether something holds on every process."""
        number = torch.tensor([int(not mine)], dtype=torch.int32, device=like.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        return not int(number)

    def whole(self, own: Sequence[Tensor]) -> list[Tensor]:
        """K and V of all processes."""
        everything = Transfers(self.ring, [[True] * self.ring.parts] * self.ring.parts)
        parts = dict(everything.blocks(own))
        return [torch.cat([parts[p][n] for p in sorted(parts)], dim) for n, dim in enumerate(self.ring.dims)]


def wait(pending: Sequence[Any]) -> None:
    for work in pending:
        work.wait()


class Returns:
    """Gradients of K and V on their way to the owners, which add them up. needed: whether those of K, of V are."""

    def __init__(self, transfers: Transfers, own: Sequence[Tensor], needed: Sequence[bool]):
        self.transfers, self.dtypes = transfers, [tensor.dtype for tensor in own]
        self.needed = [n for n in range(2) if needed[n]]
        exact = [torch.promote_types(tensor.dtype, torch.float32) for tensor in own]
        self.sums = [torch.zeros_like(tensor, dtype=dtype) for tensor, dtype in zip(own, exact, strict=True)]
        self.waiting: tuple[list[Tensor], list[Any], list[Tensor]] = [], [], []

    def add(self, step: int, gradients: dict[int, Tensor]) -> None:
        """Gradients (by operand, 1 and 2) of the block of a step, which go to its owner; {} where it is dead."""
        self.finish()
        if not step:
            for n in self.needed if gradients else ():
                self.sums[n] += gradients[n + 1]
            return
        source, target = self.transfers.partners(step)
        sent = [gradients[n + 1].to(self.dtypes[n]).contiguous() for n in self.needed if source is not None]
        received = [torch.empty_like(self.sums[n], dtype=self.dtypes[n]) for n in self.needed if target is not None]
        received = [tensor.contiguous() for tensor in received]
        self.waiting = received, self.transfers.post(sent, source, received, target), sent

    def finish(self) -> None:
        """Wait for what arrives, and add it."""
        received, pending, _ = self.waiting
        wait(pending)
        for n, part in zip(self.needed, received, strict=False):
            self.sums[n] += part
        self.waiting = [], [], []
