"""The ring: K and V stay sharded, and their blocks come to the queries one at a time.

In step s process r computes with the keys of process r - s, and process r + s with its own (modulo their number), so
that every process sends and receives one block a step, while it computes with the block before. A block comes from its
owner, not from a neighbour that passes it on: where no row of a process has a live key in it, it is neither sent nor
computed. Gradients of K and V return to the owner in the same way, a step later. Published rings pass on (2310.01889);
the bytes a process sends are the same, fewer where blocks are dead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.sequences import partial
from fusion.sequences.blocks import Call, Rows, zeros
from fusion.sequences.partial import Arriving, Merged, Partial
from fusion.sequences.transfers import Returns


def forward(call: Call, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, bool]:
    """Output of this process's rows, [b.., i, e], statistics for the backward, and whether all rows are ordinary."""
    own, transfers = _dealt(call, operands), call.transfers
    rows = _rows(call, own)
    sums = {row.run: call.sums(row) for row in rows}
    for blocks in transfers.blocks(own[1:3]):
        for run, keys in blocks.items():
            for row in (row for row in rows if call.live(row.run, run)):
                *_, block = call.outputs(row.block(call.spec, transfers.ring, run, keys))
                sums[row.run].add(run, Partial.of_block(*block))
    outputs, merged = zip(*(of_run.finish() for of_run in sums.values()), strict=True)
    statistics = torch.cat([of_run.packed() for of_run in merged], -1)
    return torch.cat(outputs, -2), statistics, all(of_run.ordinary(call.spec) for of_run in merged)


def backward(
    call: Call, grad: Tensor, out: Tensor, statistics: Tensor, operands: Sequence[Tensor], needs: list[bool]
) -> list[Tensor]:
    """Gradients by operand, with those of K and V for this process's keys."""
    spec, transfers, own = call.spec, call.transfers, _dealt(call, operands)
    runs, i = transfers.ring.runs_of(transfers.rank), spec.output.dims.index("i")
    totals = zeros(own, needs)
    results = [(grad, i), (grad if partial.is_narrow(spec) else out, i)]  # of narrow results the output is not read
    cut = [by_run(transfers.dealt(tensor, dim), dim, runs) for tensor, dim in results]
    merged = map(Merged.unpacked, by_run(statistics, -1, runs))
    arriving = [Arriving.of(spec, *of_run) for of_run in zip(*cut, merged, strict=True)]
    given = [*zip(_rows(call, own), _rows(call, totals), arriving, strict=True)]
    returns = Returns(transfers, own[1:3], needs[1:3])
    for step, blocks in enumerate(transfers.blocks(own[1:3])):
        of_keys: dict[int, dict[int, Tensor]] = {run: {} for run in blocks}
        for run, keys in blocks.items():
            for row, total, known in (one for one in given if call.live(one[0].run, run)):
                block = row.block(spec, transfers.ring, run, keys)
                found = call.gradients(block, known.grad, known.at(run), needs)
                of_keys[run] = {n: found[n] + of_keys[run].get(n, 0) for n in (1, 2) if needs[n]}
                call.add(total.operands, found, run)
        returns.add(step, of_keys)
    returns.finish()
    for row, total, known in given:
        call.add_sinks(row, total.operands, known, needs)
    totals[1:3] = [returns.whole(n) for n in range(2)]
    places = zip(totals, operands, partial.shard_dims(spec), needs, strict=True)
    return [transfers.dealt(t.to(o.dtype), dim, back=True) if n else t for t, o, dim, n in places]


def by_run(tensor: Tensor, dim: int | None, runs: Sequence[int]) -> Sequence[Tensor]:
    """Views of a tensor's part in each run."""
    return [tensor] * len(runs) if dim is None else tensor.tensor_split(len(runs), dim)


def _dealt(call: Call, operands: Sequence[Tensor]) -> list[Tensor]:
    return [call.transfers.dealt(o, d) for o, d in zip(operands, partial.shard_dims(call.spec), strict=True)]


def _rows(call: Call, operands: Sequence[Tensor]) -> list[Rows]:
    """The runs of this process's rows."""
    runs = call.transfers.ring.runs_of(call.transfers.rank)
    cut = [by_run(o, d, runs) for o, d in zip(operands, partial.row_dims(call.spec), strict=True)]
    return [call.rows(run, part) for run, part in zip(runs, zip(*cut, strict=True), strict=True)]
