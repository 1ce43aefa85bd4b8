"""Training with a spec: the forward that keeps statistics, and the gradients by kernels or, where there are none, by
the reference."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.codegen import reference
from fusion.codegen.triton.backward import Keys, Queries, backward_kernels
from fusion.codegen.triton.gradients import gradients_of, unsupported_gradient
from fusion.codegen.triton.launch import Kernel, Variant, capability, check_sizes, empty_lists, list_tile, precision
from fusion.codegen.triton.tile_lists import KeyLists, RowLists, places
from fusion.codegen.triton.tiles import Tile, backward_tiles
from fusion.ir.sizes import size_function
from fusion.ir.spec import AttentionSpec

log = logging.getLogger(__name__)

LISTED_BY = {KeyLists.name: Queries.name, RowLists.name: Keys.name}
"""Kernels that list tiles, and those that visit them."""


class Differentiable:
    """`forward` returns the output and statistics, `backward` the gradients of the operands that are needed.

    dQ, dK and dV are deterministic. Gradients of captured tensors are summed by atomic additions in float32.
    """

    def __init__(self, spec: AttentionSpec, tile: Tile | None = None):
        self.spec, self.tile = spec, tile
        self.kernel = Kernel(spec, tile, statistics=True)
        self._variants: dict[tuple, Variant] = {}
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        return self.kernel.source

    def forward(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        out, statistics = self.kernel.forward(operands, sizes)
        assert statistics is not None
        return out, statistics

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        statistics: Tensor,
        operands: Sequence[Tensor],
        sizes: Sequence[int],
        needs: tuple[bool, ...],
    ) -> list[Tensor]:
        """grad, out: of the output's dimensions, any strides. The gradients, in order, of each marked operand's
        shape."""
        if (reason := self.without_kernels(needs)) is None:
            return self._gradients(grad, out, statistics, operands, sizes, needs)
        log.debug("gradients of %s by the reference: %s", self.spec, reason)
        return reference.backward(self.spec, grad, operands, sizes, needs)

    def without_kernels(self, needs: tuple[bool, ...]) -> str | None:
        """Why gradients are left to the reference interpreter, or None."""
        if (reason := unsupported_gradient(self.spec, needs)) is not None:
            return reason
        if torch.are_deterministic_algorithms_enabled() and gradients_of(self.spec, needs).captured:
            return "deterministic algorithms are asked for, and gradients of captured tensors are summed atomically"
        return None

    def _gradients(self, grad, out, statistics, operands, sizes, needs) -> list[Tensor]:
        *batch, n_q, n_k, d, d_v = self.kernel.extents(sizes)
        check_sizes((*batch, n_q, n_k, d, d_v))
        if 0 in (*batch, n_q, n_k, d, d_v):
            return reference.backward(self.spec, grad, operands, sizes, needs)
        made = {n: self._memory(n, tensor) for n, tensor in enumerate(operands) if needs[n]}
        self._launch(grad, out, statistics, operands, sizes, needs, made, (batch, n_q, n_k, d, d_v))
        return [made[n] for n in sorted(made)]

    def _memory(self, number: int, tensor: Tensor) -> Tensor:
        """A gradient to be filled: q, k and v in their dtype (zero, should the attention read only parts of them),
        others float32."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype if number < 3 else torch.float32, device=tensor.device)

    def _launch(self, grad, out, statistics, operands, sizes, needs, made, extents) -> None:
        batch, n_q, n_k, d, d_v = extents
        device, heads = operands[0].device, math.prod(batch)
        variant = self._variant(d, d_v, needs, device.type == "cpu")
        names = [self.kernel.operand_name(n) for n in range(len(operands))]
        results = {f"d{'qkv'[n] if n < 3 else names[n]}": tensor for n, tensor in made.items()}
        results |= {"dout": grad, "out": out, "statistics": statistics}
        results["delta"] = torch.empty([*batch, n_q], dtype=torch.float32, device=device)
        tiles = {
            name: self.tile or tile for name, tile in backward_tiles(self.spec, d, d_v, capability(device)).items()
        }
        listed = KeyLists.name in variant.kernels or RowLists.name in variant.kernels
        rows, keys = -(-n_q // tiles[Keys.name].rows), -(-n_k // tiles[Keys.name].keys)
        dead = places(self.spec, batch) * rows if listed else heads
        results["dead"] = torch.zeros([dead], dtype=torch.int32, device=device)
        shared = math.prod(self._shared(batch, sizes))
        for name in variant.kernels:
            tile = tiles.get(name) or list_tile(tiles[LISTED_BY[name]])
            programs = heads * -(-n_q // tile.rows)
            if name == Keys.name:
                programs = shared * keys
            elif name in LISTED_BY:
                across = (keys, rows) if name == RowLists.name else (-(-n_q // tile.rows), -(-n_k // tile.keys))
                results |= empty_lists(self.spec, batch, across, device)
                programs = len(results["tile_counts"])
            variant.launch(name, programs, tile, precision(self.spec.dtype), (operands, sizes, results, {}))

    def _shared(self, batch: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """How many values of each batch coordinate K and V tell apart."""
        none = (False,) * len(self.spec.operands)
        groups = size_function(gradients_of(self.spec, none).groups, self.spec.sizes)(sizes)
        return [extent // group for extent, group in zip(batch, groups, strict=True)]

    def _variant(self, d: int, d_v: int, needs: tuple[bool, ...], interpreted: bool) -> Variant:
        key = (d, d_v, needs, interpreted)
        if (found := self._variants.get(key)) is None:
            with self._lock:
                if (found := self._variants.get(key)) is None:
                    kernels = backward_kernels(self.spec, d, d_v, needs)
                    found = self._variants[key] = Variant(self.spec, kernels, d, d_v, interpreted)
        return found
