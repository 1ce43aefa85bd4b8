"""The kernel that leaves out tiles which do not matter: certified sparse attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.ir.spec import AttentionSpec
from fusion.kept import Made
from fusion.machine import Machine
from fusion.planning.register_tiles import target_of

from .calling import float_bits
from .launch import Variant, addresses_of, call_values
from .sparse_kernel import emit_sparse
from .strategy import tilings_for


class SparseKernel:
    """For a spec with one batch coordinate, output [b0, i, e] and plain scores. Tiles: `rows` queries, `keys` keys."""

    def __init__(self, spec: AttentionSpec, machine: Machine):
        self.spec, self.target = spec, target_of(machine)
        self.tiling = tilings_for(spec, self.target)[0]
        together = self.tiling.together or self.target.tile_groups
        self.keys, self.rows = self.tiling.keys, together * self.target.lanes
        self.sets = -(-self.tiling.groups // together)
        self._variants = Made()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: Sequence[int], marks: torch.Tensor, share: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(output [h, N_q, d_v], share of the normaliser left out at most [h], tiles computed [h]); None for inputs
        beyond the range of split planes. marks: uint8 [h, row tiles, key tiles], row tiles a multiple of `sets`: the
        tiles to look at. share: the weight, relative to its row's sum, below which a key may be left out."""
        heads, n_q, d = q.shape
        n_k, d_v = v.shape[1:]
        variant = self._variants.of(
            (d, d_v), lambda: Variant(self.spec, self.tiling, self.target, d, d_v, write=emit_sparse)
        )
        out = torch.empty(heads, n_q, d_v, dtype=getattr(torch, self.spec.out_dtype))
        skipped = torch.zeros(heads, marks.shape[1] // self.sets, 2, dtype=torch.float32)
        values = call_values(self.spec, sizes, [x.stride() for x in (q, k, v)], out.stride())
        values[("share",)] = float_bits(share)
        tensors = dict(zip(addresses_of(self.spec), (q, k, v, out), strict=True))
        tensors |= {("ptr", "marks"): marks, ("ptr", "skipped"): skipped}
        launch = variant.launch_for((heads, n_q, n_k, d, d_v), values, [*tensors])
        if not launch([x.data_ptr() for x in tensors.values()]):
            return None
        return out, skipped[..., 0].amax(1), skipped[..., 1].sum(1)
