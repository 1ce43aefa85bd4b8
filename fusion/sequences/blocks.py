"""A call of a sharded attention on one of its processes, and blocks of its rows and of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion.ir import AttentionSpec
from fusion.ir.parts import LENGTHS
from fusion.runtime.kernels import differentiable
from fusion.sequences import partial
from fusion.sequences.partial import Partial
from fusion.sequences.transfers import Ring, Transfers, exact


class Rows(NamedTuple):
    """A run of query rows: its number, its part of the operands, its sizes."""

    run: int
    operands: Sequence[Tensor]
    sizes: dict[str, int]

    def of(self, spec: AttentionSpec) -> list[int]:
        """Values of a spec's sizes."""
        return [self.sizes[name] for name in spec.sizes]

    def block(self, spec: AttentionSpec, ring: Ring, run: int, keys: Sequence[Tensor]) -> Rows:
        """These rows with a run of keys: its K and V, and the same keys of all other operands."""
        first, count = ring.keys_of(run)
        dims = partial.key_dims(spec)
        rest = [
            tensor if dim is None else tensor.narrow(dim, first, count)
            for tensor, dim in zip(self.operands[3:], dims[3:], strict=True)
        ]
        sizes = self.sizes | {LENGTHS["j"]: count, partial.FIRST_KEY: first}
        return Rows(self.run, [self.operands[0], *keys, *rest], sizes)


@dataclass(frozen=True, slots=True)
class Call:
    """A call on one of the processes."""

    spec: AttentionSpec
    request: str
    device: str
    sizes: dict[str, int]
    transfers: Transfers

    @staticmethod
    def of(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, ring: str) -> Call:
        parsed, shards = AttentionSpec.from_json(spec), Ring.from_json(ring)
        known = dict(zip(parsed.sizes, sizes, strict=True))
        transfers = Transfers(shards, shards.live(parsed, known))
        return Call(parsed, request, operands[0].device.type, known, transfers)

    def kernels(self, spec: AttentionSpec) -> Any:
        return differentiable(spec.to_json(), self.device, self.request)

    def rows(self, run: int, operands: Sequence[Tensor]) -> Rows:
        """A run of query rows. operands: their part of these."""
        first, count = self.transfers.ring.rows_of(run)
        return Rows(run, operands, self.sizes | {self.transfers.ring.offset: first, LENGTHS["i"]: count})

    def sums(self, rows: Rows) -> partial.Sums:
        return partial.Sums(self.spec, rows.operands, rows.of(self.spec))

    def live(self, rows: int, keys: int) -> bool:
        """Whether a row of one run may have a live key in another."""
        return self.transfers.live[rows][keys]

    def outputs(self, block: Rows) -> tuple[Tensor, Tensor, Partial]:
        """o / l of a block, the statistics for its backward, and its sums."""
        part = partial.of_output(self.spec)
        out, statistics, *of_rows = self.kernels(part).outputs(block.operands, block.of(part))
        return out, statistics, Partial(out, *of_rows)

    def gradients(self, block: Rows, grad: Tensor, known: Tensor, needs: Sequence[bool]) -> dict[int, Tensor]:
        """Gradients by operand through a block. grad, known: of the rows (`partial.Arriving`)."""
        gradient = partial.of_gradient(self.spec)
        out, statistics, sums = self.outputs(block)
        grad, of_others = partial.at_block(sums, grad, known)
        found = self.kernels(gradient).backward(
            grad, out, statistics, block.operands, block.of(gradient), tuple(needs), [of_others]
        )
        return dict(zip([n for n, needed in enumerate(needs) if needed], found, strict=True))

    def add(self, totals: Sequence[Tensor], found: dict[int, Tensor], keys: int) -> None:
        """Add the gradients through a block with a run of keys of all operands but K and V."""
        first, count = self.transfers.ring.keys_of(keys)
        dims = partial.key_dims(self.spec)
        for n, gradient in found.items():
            if n not in (1, 2):
                dim = None if n == 0 else dims[n]
                (totals[n] if dim is None else totals[n].narrow(dim, first, count)).add_(gradient)

    def add_sinks(
        self, rows: Rows, totals: Sequence[Tensor], arriving: partial.Arriving, needs: Sequence[bool]
    ) -> None:
        """Add the gradients through the sinks of rows."""
        given = self.spec, rows.operands, rows.of(self.spec), needs
        for n, gradient in partial.of_sinks(*given, arriving.delta, arriving.rows).items():
            totals[n].add_(gradient)


def zeros(operands: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Sums of gradients, in the dtype of sums; the operand itself where none is needed."""
    return [torch.zeros_like(o, dtype=exact(o)) if needed else o for o, needed in zip(operands, needs, strict=True)]
