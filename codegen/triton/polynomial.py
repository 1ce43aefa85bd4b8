"""Calls of the feature kernels on a GPU, or in Triton's interpreter for CPU tensors. See `features`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.planning.gpu_layout import padded

from ..reference import polynomial as reference
from ..reference.polynomial import Monomials, monomials
from . import module
from .check import report
from .features import features_module
from .launch import machine_of

MOST_FEATURES = 64
"""Features of a block: with as many, sums and features stay in registers (ahead-of-time compilation shows it)."""
WIDEST = 64  # columns of Q and K, and of V, up to which they do
PIECE = 512  # keys of a piece at least, where pieces are made to fill a device


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureTile:
    """Sizes of the tiles of both kernels."""

    rows: int  # of queries, of the readout
    keys: int  # of a tile of the state
    near: int  # keys of a tile of a causal chunk
    parents: int  # of a block of features
    warps: int = 4


def supports(d: int, d_v: int) -> str | None:
    """Reason why there are no kernels for d columns of Q and K, d_v of V, or None."""
    if max(d, d_v) > WIDEST:
        return f"GPU kernels of polynomial features take head dimensions up to {WIDEST}, not {max(d, d_v)}"
    return None


def feature_tile(d: int, d_v: int, wanted: int) -> FeatureTile:
    """Tile of the kernels. wanted: features of a block, by the cost model; the tile has as many as fit registers, a
    power of two."""
    features = min(MOST_FEATURES, 1 << (max(1, wanted).bit_length() - 1))
    parents = max(1, features // padded(d))
    if max(padded(d), padded(d_v)) > 32:
        return FeatureTile(rows=64, keys=32, near=32, parents=parents, warps=8)
    return FeatureTile(rows=64, keys=64, near=32, parents=parents)


class FeatureKernels:
    """Attention with the features of `degree` in d coordinates, d_v columns of values. planes: bf16 planes of the top
    degree. wanted: features of a block, by the cost model."""

    def __init__(self, d: int, d_v: int, degree: int, planes: int, interpreted: bool, wanted: int = MOST_FEATURES):
        self.d, self.d_v, self.planes = d, d_v, planes
        self.tile, self.source = feature_tile(d, d_v, wanted), features_module(d, d_v, degree)
        self.module = module.load(self.source, interpreted)
        self.table = ParentTable(monomials(d, degree), self.tile.parents)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, powers: Tensor, chunk: int = 0) -> Tensor:
        """Output [H, N_q, d_v] for [H, N_q, d], [U, N_k, d], [U, N_k, d_v], without scaling of the scores; q and k in
        float32.
        owner: [H], the key head of each head. powers: [H, degree + 1] float64, the polynomial of each. chunk: if not 0,
        causal in chunks of so many rows, as in `reference.attend`; a multiple of the tile's rows."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        heads, n_q, _ = q.shape
        piece = chunk or self._piece(len(k), k.shape[1], q.device)
        state, sums, values = self._state(k, v, piece)
        if chunk:  # of the pieces before each
            state, sums, values = (x.cumsum(1).roll(1, 1) for x in (state, sums, values))
            for x in (state, sums, values):
                x[:, 0] = 0.0
        else:
            state, sums, values = (x.sum(1, keepdim=True) for x in (state, sums, values))
        factors, _ = self._table(q.device)
        out = torch.empty(heads, n_q, self.d_v, dtype=torch.float32, device=q.device)
        tile, table = self.tile, self.table
        self._launch(
            "polynomial_readout", heads * -(-n_q // tile.rows),
            (
                q, k, v, factors, self.weights(powers, q.device), powers[:, 0].to(q.device, torch.float32),
                owner.to(q.device, torch.int32), state, sums, values, out, n_q, k.shape[1], table.parents,
                table.blocks, table.low_blocks, state.shape[1], piece,
            ),
            ROWS=tile.rows, KEYS=tile.near, PARENTS=tile.parents, TOP_PLANES=self.planes, CAUSAL=bool(chunk),
        )  # fmt: skip
        return out

    def _state(self, k: Tensor, v: Tensor, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        """State over pieces of so many keys: [U, pieces, features, d_v], [U, pieces, features], [U, pieces, d_v]."""
        (heads, n, _), tile, table = k.shape, self.tile, self.table
        pieces, features = -(-n // piece), table.parents * padded(self.d)
        shapes = (features, self.d_v), (features,), (self.d_v,)
        state, sums, values = (k.new_empty(heads, pieces, *shape, dtype=torch.float32) for shape in shapes)
        self._launch(
            "polynomial_state", heads * table.blocks * pieces,
            (
                k, v, self._table(k.device)[0], state, sums, values, n, table.parents, table.blocks, table.low_blocks,
                pieces, piece,
            ),
            KEYS=tile.keys, PARENTS=tile.parents, TOP_PLANES=self.planes,
        )  # fmt: skip
        return state, sums, values

    def _piece(self, heads: int, n: int, device: torch.device) -> int:
        """Keys of a piece: all of them, or fewer where that would leave processors idle."""
        wanted = 1 if device.type == "cpu" else 2 * machine_of(device).cores // max(1, heads * self.table.blocks)
        return max(PIECE, -(-n // max(1, wanted)))

    def weights(self, powers: Tensor, device: torch.device) -> Tensor:
        """[H, features]: the coefficient of each feature in the polynomial of each head."""
        found = powers.to(device, torch.float32)[:, self._table(device)[1]]
        return (found * self.table.multinomials.to(device)).contiguous()

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            self._tables[device] = self.table.factors.to(device), self.table.degrees.to(device)
        return self._tables[device]

    def _launch(self, name: str, programs: int, given: tuple, **constants: int | bool) -> None:
        options = {"num_warps": self.tile.warps, "num_stages": 1}
        module.run(getattr(self.module, name), programs, given[0].device, given, constants, options)


kernels = functools.lru_cache(maxsize=64)(FeatureKernels)
"""Those of a shape, loaded once."""


class ParentTable:
    """Parents in blocks, and the coefficients of their products with every coordinate.

    parents: their number, padded to full blocks below and at the top degree (`low_blocks` of `blocks` give features
    below it).
    factors: int32 [degree - 1, parents], the coordinates that each is the product of, d for none.
    degrees: int64 [features], multinomials: float32 [features], of the features parent * D + coordinate; 0 for those
    that another parent gives and for padding.
    """

    def __init__(self, table: Monomials, together: int):
        d, width = table.d, padded(table.d)
        top = int(table.degrees[-1])
        degrees = table.degrees.tolist()
        low, high = ([a for a, g in enumerate(degrees) if g in some] for some in (range(top - 1), (top - 1,)))
        rows: list[int | None] = []
        for part in (low, high):
            rows += [*part, *[None] * (-len(part) % together)]
        self.low_blocks = -(-len(low) // together)
        self.parents, self.blocks = len(rows), len(rows) // together
        self.factors = torch.full((max(1, top - 1), self.parents), d, dtype=torch.int32)
        self.degrees = torch.zeros(self.parents, width, dtype=torch.int64)
        self.multinomials = torch.zeros(self.parents, width, dtype=torch.float32)
        place = {a: row for row, a in enumerate(rows) if a is not None}
        for a, row in place.items():
            for number, coordinate in enumerate(_coordinates(table, a)):
                self.factors[number, row] = coordinate
        for a in range(1, len(table.degrees)):
            row, coordinate = place[int(table.parents[a])], int(table.variables[a])
            self.degrees[row, coordinate] = table.degrees[a]
            self.multinomials[row, coordinate] = table.multinomials[a]
        self.degrees, self.multinomials = self.degrees.flatten(), self.multinomials.flatten()


def _coordinates(table: Monomials, monomial: int) -> list[int]:
    found = []
    while monomial:
        found.append(int(table.variables[monomial]))
        monomial = int(table.parents[monomial])
    return found


def check_module(d: int, d_v: int, degree: int) -> None:
    """Program behind `python <generated module>`: compare its kernels with the reference on random tensors, in the
    interpreter or on a GPU where there is one. Exits with 1 where they differ by more than two planes may."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 200, width, dtype=torch.float32, device=device) / d**0.5 for width in (d, d, d_v))
    powers = torch.tensor([[1 / math.factorial(g) for g in range(degree + 1)]] * 2, dtype=torch.float64)
    run = FeatureKernels(d, d_v, degree, 2, device == "cpu")
    for chunk in (0, 64):
        found = run.attend(q, k, v, torch.arange(2), powers, chunk)
        expected = reference.attend(q.cpu().double(), k.cpu().double(), v.cpu().double(), powers, chunk)
        error, allowed = float((found.cpu() - expected).abs().max()), 1e-3 * float(v.abs().max())
        report(f"{device}, {'causal' if chunk else 'full'}", error, allowed, error <= allowed)
