"""Blocks of keys on their way between the processes of a ring, and their gradients on the way back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from fusion.torch_private.devices import group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Processes of a ring and their shards. group: its name. offset: the spec's size that is a process's first row.
    rows, keys: extent of the sequence. dims: of K and V, those that are sharded.

    groups: of a mesh (`fusion.sequences.mesh`), whose keys are runs for all of a group; 0 for a ring.
    runs: of each process, 1: the shard that it has, or 2 with half as many rows: the n-th and the n-th last, so that
    all compute the same under a causal mask (zig-zag). These are numbered by their place in the sequence.
    """

    group: str
    parts: int
    offset: str
    rows: int
    keys: int
    dims: tuple[int, int]
    runs: int = 1
    groups: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Ring:
        fields = json.loads(text)
        return Ring(**(fields | {"dims": tuple(fields["dims"])}))

    def runs_of(self, part: int) -> list[int]:
        """Runs of a process."""
        return [part] if self.runs == 1 else [part, 2 * self.parts - 1 - part]

    def rows_of(self, run: int) -> tuple[int, int]:
        """First query row of a run and their number."""
        return run_of(self.rows, self.runs * self.parts, run)

    def keys_of(self, run: int) -> tuple[int, int]:
        """First key of a run and their number."""
        parts, width = self.runs * self.parts, self.parts // self.groups if self.groups else 1
        first, (last, count) = run_of(self.keys, parts, run * width)[0], run_of(self.keys, parts, (run + 1) * width - 1)
        return first, last + count - first

    def needed(self, live: Sequence[Sequence[bool]], part: int, owner: int) -> list[int]:
        """Runs of the owner's keys in which rows of a process may have a live key."""
        return [run for run in self.runs_of(owner) if any(live[rows][run] for rows in self.runs_of(part))]

    def moves(self, part: int) -> list[tuple[int, int, int]]:
        """(half of a process's shard, the process that has this half as a run, its place among that one's runs)."""
        halves, last = (2 * part, 2 * part + 1), 2 * self.parts - 1
        return [(n, min(run, last - run), int(run >= self.parts)) for n, run in enumerate(halves)]

    def live(self, spec: AttentionSpec, sizes: Mapping[str, int]) -> list[list[bool]]:
        """For each run of rows and each of keys, whether a row of the one may have a live key in the other. spec: of
        a process's rows."""
        parts, result = self.runs * self.parts, []
        first, count = np.array([self.keys_of(run) for run in range(self.groups or parts)]).T
        for run in range(parts):
            low, high = self._visited(spec, sizes, run, max(1, self.rows))
            low, high = low.reshape(-1, 1), high.reshape(-1, 1)
            seen = (low < high) & (low < first + count) & (first < high) & (count > 0)
            result.append(seen.any(0).tolist())
        return result

    def pairs(self, spec: AttentionSpec, sizes: Mapping[str, int]) -> list[int]:
        """Scores of one head that each process computes, in blocks of rows."""
        return [sum(self._pairs(spec, sizes, run) for run in self.runs_of(part)) for part in range(self.parts)]

    def _pairs(self, spec: AttentionSpec, sizes: Mapping[str, int], run: int) -> int:
        low, high = self._visited(spec, sizes, run, ROWS)
        rows = np.minimum(ROWS, self.rows_of(run)[1] - ROWS * np.arange(low.shape[1]))
        return int(((high - low) * rows).sum() // max(1, len(low)))

    def _visited(self, spec: AttentionSpec, sizes: Mapping[str, int], run: int, step: int) -> tuple[Any, Any]:
        """First key and end that blocks of so many rows of a run see: [heads with a range of their own, blocks]."""
        first, count = self.rows_of(run)
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
Message = tuple[int, Sequence[Tensor]]
"""(the other process, tensors)."""


class Transfers:
    """Sends and receptions of one process."""

    def __init__(self, ring: Ring, live: list[list[bool]]):
        self.ring, self.live = ring, live
        self.group = group_of(ring.group)
        self.rank = dist.get_rank(self.group)

    def partners(self, step: int) -> tuple[int, int]:
        """(process whose keys arrive in a step, process that the own keys go to)."""
        return (self.rank - step) % self.ring.parts, (self.rank + step) % self.ring.parts

    def blocks(self, own: Sequence[Tensor]) -> Iterator[dict[int, list[Tensor]]]:
        """K and V by number of their run in each step, the own ones first; dead ones do not arrive. The next step's are
        on their way meanwhile."""
        mine, runs = self.by_run(own), self.ring.runs_of(self.rank)
        live = self.ring.needed(self.live, self.rank, self.rank)
        received, pending = {run: mine[run] for run in runs if run in live}, []
        for step in range(self.ring.parts):
            wait(pending)
            here = received
            received, pending = self._exchange(step + 1, mine) if step + 1 < self.ring.parts else ({}, [])
            yield here

    def by_run(self, own: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """K and V of this process, by number of the run."""
        runs = self.ring.runs_of(self.rank)
        cut = [tensor.tensor_split(len(runs), dim) for tensor, dim in zip(own, self.ring.dims, strict=True)]
        return {run: [pieces[n].contiguous() for pieces in cut] for n, run in enumerate(runs)}

    def _exchange(self, step: int, mine: dict[int, list[Tensor]]) -> tuple[dict[int, list[Tensor]], list[Any]]:
        source, target = self.partners(step)
        like = mine[self.ring.runs_of(self.rank)[0]]
        received = {
            run: [self._like(tensor, dim, run) for tensor, dim in zip(like, self.ring.dims, strict=True)]
            for run in self.ring.needed(self.live, self.rank, source)
        }
        sent = [tensor for run in self.ring.needed(self.live, target, self.rank) for tensor in mine[run]]
        return received, self.post([(target, sent)], [(source, sum(received.values(), []))])

    def _like(self, tensor: Tensor, dim: int, run: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = self.ring.keys_of(run)[1]
        return tensor.new_empty(shape)

    def dealt(self, tensor: Tensor, dim: int | None, back: bool = False) -> Tensor:
        """Tensor with this process's runs in the place of its shard; back: the other way round. dim: the one that is
        sharded; a tensor without one stays."""
        if self.ring.runs == 1 or dim is None:
            return tensor
        before = [half.contiguous() for half in tensor.chunk(2, dim)]
        after, sent, received = [torch.empty_like(half) for half in before], [], []
        for part in range(self.ring.parts):
            for half, holder, place in self.ring.moves(part):
                source, old, target, new = (holder, place, part, half) if back else (part, half, holder, place)
                if source == target == self.rank:
                    after[new] = before[old]
                elif source == self.rank:
                    sent.append((target, [before[old]]))
                elif target == self.rank:
                    received.append((source, [after[new]]))
        wait(self.post(sent, received))
        return torch.cat(after, dim)

    def post(self, sent: Sequence[Message], received: Sequence[Message]) -> list[Any]:
        """Start sending and receiving; returns what to wait for."""
        operations = [
            dist.P2POp(function, tensor, group=self.group, group_peer=peer)
            for function, messages in ((dist.isend, sent), (dist.irecv, received))
            for peer, tensors in messages
            for tensor in tensors
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def agree(self, mine: bool, like: Tensor) -> bool:
        """Whether something holds on every process."""
        number = torch.tensor([int(not mine)], dtype=torch.int32, device=like.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        return not int(number)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of every process."""
        result = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.ring.parts)]
        dist.all_gather(result, tensor.contiguous(), group=self.group)
        return result

    def whole(self, own: Sequence[Tensor], members: Sequence[int] | None = None) -> list[Tensor]:
        """K and V of the processes that are members, by default of all. own: this process's shards."""
        shards, members = self.of_shards(), members or range(self.ring.parts)
        parts = {p: [shards._like(t, d, p) for t, d in zip(own, self.ring.dims, strict=True)] for p in members}
        parts[self.rank] = [tensor.contiguous() for tensor in own]
        others = [part for part in members if part != self.rank]
        wait(self.post([(part, parts[self.rank]) for part in others], [(part, parts[part]) for part in others]))
        return [torch.cat([parts[part][n] for part in members], dim) for n, dim in enumerate(self.ring.dims)]

    def home(
        self,
        whole: Sequence[Tensor],
        own: Sequence[Tensor],
        needed: Sequence[bool],
        members: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Gradients of this process's K and V, where needed: sums over the members. whole: this process's contributions
        to those of all members' K and V, in the dtype of sums; own: this process's K and V."""
        shards, members, result = self.of_shards().ring, members or range(self.ring.parts), [*whole]
        others, start = [part for part in members if part != self.rank], shards.keys_of(members[0])[0]
        for n in (n for n in range(2) if needed[n]):
            runs = {part: shards.keys_of(part) for part in members}
            cut = {p: whole[n].narrow(self.ring.dims[n], first - start, count) for p, (first, count) in runs.items()}
            sent = {part: cut[part].to(own[n].dtype).contiguous() for part in others}
            parts = {part: torch.empty_like(own[n], memory_format=torch.contiguous_format) for part in others}
            wait(self.post([(p, [t]) for p, t in sent.items()], [(p, [t]) for p, t in parts.items()]))
            result[n] = sum((part.to(exact(own[n])) for part in parts.values()), cut[self.rank].to(exact(own[n])))
        return result

    def of_shards(self) -> Transfers:
        """Transfers of everything between the shards themselves."""
        return Transfers(replace(self.ring, runs=1, groups=0), [[True] * self.ring.parts] * self.ring.parts)


def exact(tensor: Tensor) -> torch.dtype:
    """Dtype of sums of gradients."""
    return torch.promote_types(tensor.dtype, torch.float32)


def wait(pending: Sequence[Any]) -> None:
    for work in pending:
        work.wait()


class Returns:
    """Gradients of K and V on their way to the owners, which add them up. needed: whether those of K, of V are."""

    def __init__(self, transfers: Transfers, own: Sequence[Tensor], needed: Sequence[bool]):
        self.transfers, self.dtypes = transfers, [tensor.dtype for tensor in own]
        self.needed = [n for n in range(2) if needed[n]]
        self.sums = {
            run: [torch.zeros_like(t, dtype=exact(t)) for t in tensors]
            for run, tensors in transfers.by_run(own).items()
        }
        self.waiting: tuple[list[tuple[int, int, Tensor]], list[Any], list[Tensor]] = [], [], []

    def add(self, step: int, gradients: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Gradients of the blocks of a step, by number of the run and by operand (1 and 2), which go to their owner."""
        self.finish()
        if not step:
            for run, found in gradients.items():
                for n in self.needed:
                    self.sums[run][n] += found[n + 1]
            return
        (source, target), ring = self.transfers.partners(step), self.transfers.ring
        sent = [found[n + 1].to(self.dtypes[n]).contiguous() for found in gradients.values() for n in self.needed]
        received = [
            (run, n, torch.empty_like(self.sums[run][n], dtype=self.dtypes[n]))
            for run in ring.needed(self.transfers.live, target, self.transfers.rank)
            for n in self.needed
        ]
        messages = [(source, sent)], [(target, [tensor for *_, tensor in received])]
        self.waiting = received, self.transfers.post(*messages), sent

    def finish(self) -> None:
        """Wait for what arrives, and add it."""
        received, pending, _ = self.waiting
        wait(pending)
        for run, n, part in received:
            self.sums[run][n] += part
        self.waiting = [], [], []

    def whole(self, n: int) -> Tensor:
        """Gradient of this process's K (0) or V (1)."""
        return torch.cat([tensors[n] for tensors in self.sums.values()], self.transfers.ring.dims[n])
