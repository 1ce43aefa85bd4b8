"""The ring: K and V stay sharded, and their blocks come to the queries one at a time.

In step s process r computes with the keys of process r - s, and process r + s with its own (modulo their number), so
that every process sends and receives one block a step, while it computes with the block before. A block comes from its
owner, not from a neighbour that passes it on: where no row of a process has a live key in it, it is neither sent nor
computed. Gradients of K and V return to the owner in the same way, a step later. Published rings pass on (2310.01889);
the bytes a process sends are the same, fewer where blocks are dead.

Rows without a live key, or with an infinite score, have values that depend on all keys at once. Where any process has
one, all of them gather K and V, and compute as `gather` does; one number each tells them.

`torch.ops.fusion.ring_attention` and its gradient are operators, which graphs take as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion.ir import AttentionSpec, results
from fusion.ir.parts import LENGTHS
from fusion.runtime.kernels import differentiable, executor
from fusion.sequences import partial
from fusion.sequences.transfers import Returns, Ring, Transfers
from fusion.torch_private.operators import register_fake


class Rows(NamedTuple):
    """A run of a process's query rows: its number, its part of the operands, its sizes."""

    run: int
    operands: Sequence[Tensor]
    sizes: dict[str, int]

    def of(self, spec: AttentionSpec) -> list[int]:
        """Values of a spec's sizes."""
        return [self.sizes[name] for name in spec.sizes]

    def block(self, spec: AttentionSpec, ring: Ring, run: int, keys: Sequence[Tensor]) -> Rows:
        """These rows with a block of keys: K and V of its owner, and the same keys of all others."""
        first, count = ring.keys_of(run)
        dims = partial.key_dims(spec)
        rest = [
            tensor if dim is None else tensor.narrow(dim, first, count)
            for tensor, dim in zip(self.operands[3:], dims[3:], strict=True)
        ]
        sizes = self.sizes | {LENGTHS["j"]: count, partial.FIRST_KEY: first}
        return Rows(self.run, [self.operands[0], *keys, *rest], sizes)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the ring on one of its processes."""

    spec: AttentionSpec
    request: str
    device: str
    sizes: dict[str, int]
    transfers: Transfers

    @staticmethod
    def of(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, ring: str) -> _Call:
        parsed, shards = AttentionSpec.from_json(spec), Ring.from_json(ring)
        known = dict(zip(parsed.sizes, sizes, strict=True))
        transfers = Transfers(shards, shards.live(parsed, known))
        return _Call(parsed, request, operands[0].device.type, known, transfers)

    def kernels(self, spec: AttentionSpec) -> Any:
        return differentiable(spec.to_json(), self.device, self.request)

    def dealt(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [self.transfers.dealt(o, d) for o, d in zip(operands, partial.shard_dims(self.spec), strict=True)]

    def rows(self, operands: Sequence[Tensor]) -> list[Rows]:
        """The runs of this process's rows."""
        ring, dims = self.transfers.ring, partial.row_dims(self.spec)
        runs = ring.runs_of(self.transfers.rank)
        cut = [by_run(o, d, runs) for o, d in zip(operands, dims, strict=True)]
        lengths = ({ring.offset: first, LENGTHS["i"]: count} for first, count in map(ring.rows_of, runs))
        return [Rows(*row) for row in zip(runs, zip(*cut, strict=True), (self.sizes | n for n in lengths), strict=True)]

    def live(self, rows: Rows, run: int) -> bool:
        return self.transfers.live[rows.run][run]


def by_run(tensor: Tensor, dim: int | None, runs: Sequence[int]) -> Sequence[Tensor]:
    """Views of a tensor's part in each run."""
    return [tensor] * len(runs) if dim is None else tensor.tensor_split(len(runs), dim)


def forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, ring: str
) -> tuple[Tensor, Tensor]:
    """The output of this process's rows, and the statistics for `backward` (`partial.Merged`)."""
    call = _Call.of(operands, sizes, spec, request, ring)
    part, own, shards = partial.of_output(call.spec), call.dealt(operands), call.transfers.ring
    kernels, rows = call.kernels(part), call.rows(own)
    sums = {row.run: partial.Sums(call.spec, row.operands, row.of(call.spec)) for row in rows}
    for blocks in call.transfers.blocks(own[1:3]):
        for run, keys in blocks.items():
            for row in (row for row in rows if call.live(row, run)):
                given = row.block(call.spec, shards, run, keys)
                out, _, row_max, row_sum = kernels.outputs(given.operands, given.of(part))
                sums[row.run].add(run, partial.Partial.of_block(out, row_max, row_sum))
    outputs, merged = zip(*(of_run.finish() for of_run in sums.values()), strict=True)
    statistics = torch.cat([of_run.packed() for of_run in merged], -1)
    if call.transfers.agree(all(of_run.ordinary(call.spec) for of_run in merged), operands[0]):
        output = torch.cat(outputs, -2).to(getattr(torch, call.spec.out_dtype))
        return partial.stored(call.spec, call.transfers.dealt(output, output.dim() - 2, back=True)), statistics
    whole = [operands[0], *call.transfers.whole(operands[1:3]), *operands[3:]]
    return call.kernels(call.spec).outputs(whole, sizes)[0], statistics


def backward(
    grad: Tensor,
    out: Tensor,
    statistics: Tensor,
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    request: str,
    needs: Sequence[bool],
    ring: str,
) -> list[Tensor]:
    """Gradients of the operands that `needs` marks, from that of this process's rows."""
    call = _Call.of(operands, sizes, spec, request, ring)
    ordinary = partial.Merged.unpacked(statistics).ordinary(call.spec)
    by = _by_blocks if call.transfers.agree(ordinary, operands[0]) else _at_once
    result = by(call, grad, out, statistics, operands, list(needs))
    described = zip(operands, call.spec.operands, strict=True)
    return [results.laid_out(result[n], *place) for n, place in enumerate(described) if needs[n]]


def _by_blocks(
    call: _Call, grad: Tensor, out: Tensor, statistics: Tensor, operands: Sequence[Tensor], needs: list[bool]
) -> list[Tensor]:
    """Gradients by operand, with those of K and V for this process's keys."""
    spec, transfers, own = call.spec, call.transfers, call.dealt(operands)
    runs, i = transfers.ring.runs_of(transfers.rank), spec.output.dims.index("i")
    totals = [torch.zeros_like(o, dtype=_exact(o)) if n else o for o, n in zip(own, needs, strict=True)]
    merged = [partial.Merged.unpacked(part) for part in by_run(statistics, -1, runs)]
    grads = [partial.computed(spec, part) for part in by_run(transfers.dealt(grad, i), i, runs)]
    if partial.is_narrow(spec):
        outputs = [of_run.output for of_run in merged]
    else:
        outputs = [partial.computed(spec, part) for part in by_run(transfers.dealt(out, i), i, runs)]
    given = [*zip(call.rows(own), call.rows(totals), grads, outputs, merged, strict=True)]
    returns = Returns(transfers, own[1:3], needs[1:3])
    for step, blocks in enumerate(transfers.blocks(own[1:3])):
        of_keys: dict[int, dict[int, Tensor]] = {run: {} for run in blocks}
        for run, keys in blocks.items():
            for row, total, *arrived in (one for one in given if call.live(one[0], run)):
                found = _of_block(call, row, run, keys, arrived, needs)
                of_keys[run] = {n: found[n] + of_keys[run].get(n, 0) for n in (1, 2) if needs[n]}
                _add(spec, total.operands, found, *transfers.ring.keys_of(run))
        returns.add(step, of_keys)
    returns.finish()
    for row, total, of_rows, output, known in given:
        delta = (of_rows * output).sum(-1)
        for n, gradient in partial.of_sinks(spec, row.operands, row.of(spec), needs, delta, known).items():
            total.operands[n].add_(gradient)
    totals[1:3] = [returns.whole(n) for n in range(2)]
    places = zip(totals, operands, partial.shard_dims(spec), needs, strict=True)
    return [transfers.dealt(t.to(o.dtype), dim, back=True) if n else t for t, o, dim, n in places]


def _of_block(
    call: _Call, row: Rows, run: int, keys: list[Tensor], arrived: Sequence[Any], needs: list[bool]
) -> dict[int, Tensor]:
    """Gradients by operand through a block of keys. arrived: dO, O and the statistics of the rows."""
    (grad, out, merged), given, spec = arrived, row.block(call.spec, call.transfers.ring, run, keys), call.spec
    output, gradient = partial.of_output(spec), partial.of_gradient(spec)
    of_block, statistics, *of_rows = call.kernels(output).outputs(given.operands, given.of(output))
    block = partial.Partial(of_block, *of_rows)
    share, arriving = merged.of_block(run, block, grad, out)
    grad = grad * share.unsqueeze(-1)
    found = call.kernels(gradient).backward(
        grad, of_block, statistics, given.operands, given.of(gradient), tuple(needs), [arriving]
    )
    return dict(zip([n for n, needed in enumerate(needs) if needed], found, strict=True))


def _add(spec: AttentionSpec, totals: Sequence[Tensor], found: dict[int, Tensor], first: int, count: int) -> None:
    """Add a block's gradients of all operands but K and V."""
    dims = partial.key_dims(spec)
    for n, gradient in found.items():
        if n not in (1, 2):
            dim = None if n == 0 else dims[n]
            (totals[n] if dim is None else totals[n].narrow(dim, first, count)).add_(gradient)


def _at_once(
    call: _Call, grad: Tensor, out: Tensor, statistics: Tensor, operands: Sequence[Tensor], needs: list[bool]
) -> list[Tensor]:
    """Gradients with all keys at once: rows of any process may have none that lives."""
    kernels, sizes = call.kernels(call.spec), [call.sizes[name] for name in call.spec.sizes]
    transfers, own, result = call.transfers.of_shards(), [*operands[1:3]], [*operands]
    whole = [operands[0], *transfers.whole(own), *operands[3:]]
    out, statistics = kernels.outputs(whole, sizes)[:2]
    found = iter(kernels.backward(grad, out, statistics, whole, sizes, tuple(needs)))
    result = [next(found) if needed else operand for operand, needed in zip(operands, needs, strict=True)]
    returns, ring = Returns(transfers, own, needs[1:3]), transfers.ring
    for step in range(ring.parts):
        part = (transfers.rank - step) % ring.parts
        of_keys = {n: result[n].narrow(ring.dims[n - 1], *ring.keys_of(part)) for n in (1, 2) if needs[n]}
        returns.add(step, {part: of_keys})
    returns.finish()
    result[1:3] = [returns.whole(n) for n in range(2)]
    return result


def of_sharded_keys(operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, ring: str) -> Tensor:
    """The output of all rows on every process: each computes with its own keys, and their sums are gathered."""
    parsed, shards = AttentionSpec.from_json(spec), Ring.from_json(ring)
    transfers = Transfers(shards, []).of_shards()
    call = _Call(parsed, request, operands[0].device.type, dict(zip(parsed.sizes, sizes, strict=True)), transfers)
    part, own = partial.of_output(parsed), transfers.rank
    sums = partial.Sums(parsed, operands, sizes)
    packed = torch.cat([sums.peak.output, *(t.unsqueeze(-1) for t in sums.peak[1:])], -1)
    if shards.keys_of(own)[1]:
        block = Rows(own, operands, call.sizes).block(parsed, shards, own, operands[1:3])
        out, _, *of_rows = call.kernels(part).outputs(block.operands, block.of(part))
        block_sums = partial.Partial.of_block(out, *of_rows)
        packed = torch.cat([block_sums.output, *(t.unsqueeze(-1) for t in block_sums[1:])], -1)
    for number, arrived in enumerate(transfers.gathered(packed)):
        sums.add(number, partial.Partial(arrived[..., :-2], arrived[..., -2], arrived[..., -1]))
    output, merged = sums.finish()
    if merged.ordinary(parsed):  # the same on all processes
        return partial.stored(parsed, output.to(getattr(torch, parsed.out_dtype)))
    whole = [operands[0], *transfers.whole(operands[1:3]), *operands[3:]]
    return executor(spec, call.device, request)(whole, sizes)


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _fake_forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, ring: str
) -> tuple[Tensor, Tensor]:
    parsed = AttentionSpec.from_json(spec)
    *batch, rows, _, columns = results.coordinate_extents(parsed, sizes).values()
    out = results.empty_result(parsed, 0, operands[0], sizes)
    return out, operands[0].new_empty((4 + columns, *batch, rows), dtype=getattr(torch, partial.wide(parsed)))


def _fake_backward(*arguments: Any) -> list[Tensor]:
    *_, operands, _, spec, _, needs, _ = arguments
    places = zip(operands, AttentionSpec.from_json(spec).operands, strict=True)
    return [results.empty_gradient(*place) for place in itertools.compress(places, needs)]


_CALL = "Tensor[] operands, SymInt[] sizes, str spec, str request"
_OPERATORS = {
    "attention_of_sharded_keys": (
        f"({_CALL}, str ring) -> Tensor",
        of_sharded_keys,
        lambda operands, sizes, spec, *_: results.empty_result(AttentionSpec.from_json(spec), 0, operands[0], sizes),
    ),
    "ring_attention": (f"({_CALL}, str ring) -> (Tensor, Tensor)", forward, _fake_forward),
    "ring_attention_backward": (
        f"(Tensor grad, Tensor out, Tensor statistics, {_CALL}, bool[] needs, str ring) -> Tensor[]",
        backward,
        _fake_backward,
    ),
}
_library = torch.library.Library("fusion", "FRAGMENT")
for _name, (_schema, _run, _shapes) in _OPERATORS.items():
    _library.define(_name + _schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
    register_fake(_library, f"fusion::{_name}", _shapes, __file__)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
