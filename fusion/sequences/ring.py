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
from typing import Any

import torch
from torch import Tensor

from fusion.ir import AttentionSpec, results
from fusion.ir.parts import LENGTHS
from fusion.ir.results import result_names
from fusion.runtime.kernels import differentiable
from fusion.sequences import partial
from fusion.sequences.transfers import Returns, Ring, Transfers
from fusion.torch_private.operators import register_fake


def _block(spec: AttentionSpec, ring: Ring, operands: Sequence[Tensor], owner: int, keys: Sequence[Tensor]):
    """Operands of a block of keys: those of its owner in the place of K and V, and the same keys of all others."""
    first, count = ring.keys_of(owner)
    dims = partial.key_dims(spec)
    rest = [
        tensor if dim is None else tensor.narrow(dim, first, count)
        for tensor, dim in zip(operands[3:], dims[3:], strict=True)
    ]
    return [operands[0], *keys, *rest], {LENGTHS["j"]: count, partial.FIRST_KEY: first}


def forward(
    operands: Sequence[Tensor], sizes: Sequence[int], spec: str, request: str, ring: str
) -> tuple[Tensor, Tensor]:
    """The output of this process's rows, and the statistics for `backward` (`partial.Merged`)."""
    parsed, device = AttentionSpec.from_json(spec), operands[0].device.type
    shards = Ring.from_json(ring)
    known, part = dict(zip(parsed.sizes, sizes, strict=True)), partial.of_output(parsed)
    transfers, kernels = Transfers(shards, shards.live(parsed, known)), differentiable(part.to_json(), device, request)
    sums = partial.Sums(parsed, operands, sizes)
    for owner, keys in filter(_is_live, transfers.blocks(operands[1:3])):
        given, lengths = _block(parsed, shards, operands, owner, keys)
        out, _, row_max, row_sum = kernels.outputs(given, [(known | lengths)[name] for name in part.sizes])
        sums.add(owner, partial.Partial(out, row_max, row_sum))
    output, merged = sums.finish()
    if transfers.agree(merged.ordinary(parsed), operands[0]):
        return sums.stored(output), merged.packed()
    whole = [operands[0], *transfers.whole(operands[1:3]), *operands[3:]]
    return differentiable(spec, device, request).outputs(whole, sizes)[0], merged.packed()


def _is_live(block: tuple[int, list[Tensor]]) -> bool:
    return bool(block[1])


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
    parsed, shards = AttentionSpec.from_json(spec), Ring.from_json(ring)
    known = dict(zip(parsed.sizes, sizes, strict=True))
    transfers = Transfers(shards, shards.live(parsed, known))
    merged = partial.Merged.unpacked(statistics)
    call = _Backward(parsed, request, grad, operands, known, list(needs))
    if transfers.agree(merged.ordinary(parsed), operands[0]):
        exact = merged.output if partial.is_narrow(parsed) else call.computed(out)
        result = call.by_blocks(transfers, exact, merged)
    else:
        result = call.at_once(transfers)
    described = zip(operands, parsed.operands, strict=True)
    return [results.laid_out(result[n], *place) for n, place in enumerate(described) if needs[n]]


@dataclass(frozen=True, slots=True)
class _Backward:
    spec: AttentionSpec
    request: str
    grad: Tensor
    operands: Sequence[Tensor]
    sizes: dict[str, int]
    needs: list[bool]

    def computed(self, tensor: Tensor) -> Tensor:
        """Output or its gradient as [b.., i, e], in the dtype of sums."""
        order = [self.spec.output.dims.index(name) for name in result_names(self.spec)]
        return tensor.to(getattr(torch, partial.wide(self.spec))).permute(order)

    def by_blocks(self, transfers: Transfers, out: Tensor, rows: partial.Merged) -> dict[int, Tensor]:
        """Gradients by operand, with those of K and V for this process's keys. out: O."""
        totals = {n: torch.zeros_like(o, dtype=_exact(o)) for n, o in enumerate(self.operands) if self.needs[n]}
        own = [*self.operands[1:3]]
        returns = Returns(transfers, own, self.needs[1:3])
        for step, (owner, keys) in enumerate(transfers.blocks(own)):
            found = self._of_block(transfers.ring, owner, keys, out, rows) if keys else {}
            returns.add(step, {n: gradient for n, gradient in found.items() if n in (1, 2)})
            self._add(totals, found, *transfers.ring.keys_of(owner))
        returns.finish()
        sizes, delta = [self.sizes[name] for name in self.spec.sizes], (self.computed(self.grad) * out).sum(-1)
        for n, gradient in partial.of_sinks(self.spec, self.operands, sizes, self.needs, delta, rows).items():
            totals[n] += gradient
        return totals | {n + 1: returns.sums[n] for n in range(2)}

    def _of_block(
        self, ring: Ring, owner: int, keys: list[Tensor], out: Tensor, rows: partial.Merged
    ) -> dict[int, Tensor]:
        """Gradients by operand through a block of keys."""
        specs, device = (partial.of_weights(self.spec), partial.of_gradient(self.spec)), self.grad.device.type
        weights, gradient = (differentiable(spec.to_json(), device, self.request) for spec in specs)
        given, lengths = _block(self.spec, ring, self.operands, owner, keys)
        sizes = [[(self.sizes | lengths)[name] for name in spec.sizes] for spec in specs]
        of_block, statistics, share = weights.outputs([*given, rows.row_max, rows.row_sum], sizes[0])
        grad = self.grad.to(of_block.dtype)
        rest, arriving = rows.of_block(owner, share, self.computed(grad), self.computed(of_block), out)
        needs = (*self.needs, False, False)
        operands = [*given, rows.row_max, rest]
        found = gradient.backward(grad, of_block, statistics, operands, sizes[1], needs, [arriving])
        return dict(zip([n for n, needed in enumerate(needs) if needed], found, strict=True))

    def _add(self, totals: dict[int, Tensor], found: dict[int, Tensor], first: int, count: int) -> None:
        """Add a block's gradients of all operands but K and V."""
        dims = partial.key_dims(self.spec)
        for n, gradient in found.items():
            if n in (1, 2):
                continue
            dim = None if n == 0 else dims[n]
            (totals[n] if dim is None else totals[n].narrow(dim, first, count)).add_(gradient)

    def at_once(self, transfers: Transfers) -> dict[int, Tensor]:
        """Gradients with all keys at once: rows of any process may have none that lives."""
        text, sizes = self.spec.to_json(), [self.sizes[name] for name in self.spec.sizes]
        kernels, own = differentiable(text, self.grad.device.type, self.request), [*self.operands[1:3]]
        whole = [self.operands[0], *transfers.whole(own), *self.operands[3:]]
        out, statistics = kernels.outputs(whole, sizes)[:2]
        found = kernels.backward(self.grad, out, statistics, whole, sizes, tuple(self.needs))
        result = dict(zip([n for n, needed in enumerate(self.needs) if needed], found, strict=True))
        ring = transfers.ring
        everything = Transfers(ring, [[True] * ring.parts] * ring.parts)
        returns = Returns(everything, own, self.needs[1:3])
        for step in range(ring.parts):
            run = ring.keys_of((transfers.rank - step) % ring.parts)
            returns.add(step, {n: result[n].narrow(ring.dims[n - 1], *run) for n in (1, 2) if self.needs[n]})
        returns.finish()
        return result | {n + 1: returns.sums[n] for n in range(2)}


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
