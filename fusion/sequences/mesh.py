"""The mesh: processes compute tiles of queries x keys (Mesh-Attention, 2512.20968).

Of P processes in R groups, those of a group, which are neighbours in the sequence, gather each other's keys. The
queries of the processes with the same place in all groups come to each of these one by one, as keys do in a ring, and
the sums of a block return to where the rows are at home, which merges R of them. So every pair of queries and keys
meets once, and a process moves R - 1 shards of queries and sums, and P/R - 1 of keys. In the backward dQ returns in the
same way, and gradients of K and V are added up where the keys are at home. With R = P no keys move at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.sequences import partial
from fusion.sequences.blocks import Call, zeros
from fusion.sequences.partial import Arriving, Merged, Partial
from fusion.sequences.transfers import wait

Tensors = Sequence[Tensor]


class Tiles:
    """Rows on their way between the groups."""

    def __init__(self, call: Call):
        self.call, self.transfers, ring = call, call.transfers, call.transfers.ring
        self.groups, self.width = ring.groups, ring.parts // ring.groups
        self.group, self.place = divmod(self.transfers.rank, self.width)
        self.members = range(self.group * self.width, (self.group + 1) * self.width)

    def visits(
        self,
        own: Callable[[int], Tensors],
        dims: Sequence[int],
        compute: Callable[[int, Tensors], Tensors],
        results: Tensors,
    ) -> Iterator[tuple[int, Tensors]]:
        """(group, results) for each group in whose keys this process's rows may have a live one.

        own: (group) -> tensors of own rows for it, which have the rows in the dimensions `dims`.
        compute: (process, such tensors of its rows) -> results with the keys of this process's group.
        results: tensors like those for own rows.
        """
        returning = []
        for step, arrived in enumerate(self._arriving(own, dims)):
            source, home, target = self._partners(step)
            found = compute(source, arrived) if self.call.live(source, self.group) else []
            back = [torch.empty_like(t) for t in results] if self.call.live(self.transfers.rank, home) else []
            if step:
                pending = self.transfers.post([(source, found)], [(target, back)])
                returning.append((home, back, found, pending))
            elif found:
                yield home, found
        for home, back, _, pending in returning:
            wait(pending)
            if back:
                yield home, back

    def _arriving(self, own: Callable[[int], Tensors], dims: Sequence[int]) -> Iterator[Tensors]:
        """Tensors of the rows of each step; the next step's are on their way meanwhile."""
        here, sent, pending = own(self.group), list[Tensor](), list[Any]()
        for step in range(1, self.groups):
            arrived, like = here, own(self.group)
            source, home, target = self._partners(step)
            here = [self._like(*one, source) for one in zip(like, dims, strict=True)]
            here = here if self.call.live(source, self.group) else []
            wait(pending)
            sent = [t.contiguous() for t in own(home)] if self.call.live(self.transfers.rank, home) else []
            pending = self.transfers.post([(target, sent)], [(source, here)])
            yield arrived
        wait(pending)
        yield here

    def _partners(self, step: int) -> tuple[int, int, int]:
        """(process whose rows are computed with here in a step, group that computes with own rows, its process)."""
        source, home = (self.group + step) % self.groups, (self.group - step) % self.groups
        return source * self.width + self.place, home, home * self.width + self.place

    def _like(self, tensor: Tensor, dim: int, process: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = self.transfers.ring.rows_of(process)[1]
        return tensor.new_empty(shape)


def forward(call: Call, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, bool]:
    """Output of this process's rows, statistics, and whether all rows are ordinary (`ring.forward`)."""
    tiles, ring, q_dim = Tiles(call), call.transfers.ring, _row_dim(call)
    keys = call.transfers.whole(operands[1:3], tiles.members)
    sums = call.sums(call.rows(call.transfers.rank, operands))

    def compute(process: int, arrived: Tensors) -> Tensors:
        rows = call.rows(process, [*arrived, *keys, *operands[3:]])
        *_, block = call.outputs(rows.block(call.spec, ring, tiles.group, keys))
        return [Partial.of_block(*block).packed()]

    like = [sums.peak.packed()]
    for group, (packed,) in tiles.visits(lambda _: operands[:1], [q_dim], compute, like):
        sums.add(group, Partial.unpacked(packed))
    output, merged = sums.finish()
    return output, merged.packed(), merged.ordinary(call.spec)


def backward(
    call: Call, grad: Tensor, out: Tensor, statistics: Tensor, operands: Sequence[Tensor], needs: list[bool]
) -> list[Tensor]:
    """Gradients by operand (`ring.backward`)."""
    tiles, transfers, q_dim = Tiles(call), call.transfers, _row_dim(call)
    keys = transfers.whole(operands[1:3], tiles.members)
    totals = zeros([operands[0], *keys, *operands[3:]], needs)
    arriving = Arriving.of(call.spec, grad, out, Merged.unpacked(statistics))
    grad = arriving.grad.to(grad.dtype)

    def compute(process: int, arrived: Tensors) -> Tensors:
        q, of_rows, known = arrived
        block = call.rows(process, [q, *keys, *operands[3:]]).block(call.spec, transfers.ring, tiles.group, keys)
        found = call.gradients(block, of_rows.to(known.dtype), known, needs)
        of_rows = [found.pop(0).to(q.dtype).contiguous()] if needs[0] else []
        call.add(totals, found, tiles.group)
        for n in (n for n in (1, 2) if needs[n]):
            totals[n].add_(found[n])
        return of_rows

    own = lambda group: [operands[0], grad, arriving.at(group)]
    like = [torch.empty_like(operands[0], memory_format=torch.contiguous_format)] if needs[0] else []
    for _, (of_rows,) in tiles.visits(own, [q_dim, grad.dim() - 2, grad.dim() - 1], compute, like):
        totals[0].add_(of_rows)
    call.add_sinks(call.rows(transfers.rank, operands), totals, arriving, needs)
    totals[1:3] = transfers.home(totals[1:3], operands[1:3], needs[1:3], tiles.members)
    return [t.to(o.dtype) if n else t for t, o, n in zip(totals, operands, needs, strict=True)]


def _row_dim(call: Call) -> int:
    dim = partial.row_dims(call.spec)[0]
    assert dim is not None
    return dim
