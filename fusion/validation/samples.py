"""Samples: rows of an attention's result, the sampled keys of each, and made-up values of the tensors that it reads.

Each sample is one row with values of its own. A tensor's element is a function of (tensor, number of the element,
sample), so that tensors of any size cost nothing and reading another element gives another value. A sample draws each
tensor from one *regime*: ordinary values, masks in which all, some or no keys live, fills of every depth, values among
which special ones are strewn, or few numbers, so that scores tie: with each other, with bounds, and with zero, as
padded keys do. Derivatives at ties are conventions.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.ir.expr import SCORE, Expr, J, contains, coord, coordinates, loads
from fusion.ir.ops import evaluate
from fusion.ir.results import leaves
from fusion.ir.spec import AttentionSpec

SAMPLES = 72
COLUMNS = 3
ALL_KEYS = 32
_LONGEST_LINE = 1 << 14


class Role(enum.Enum):
    """Use of a tensor: a factor of a matrix product (Q, K, V) or a pointwise one, a finite scale, a bias or mask."""

    FACTOR = enum.auto()
    SCALE = enum.auto()
    FINITE = enum.auto()
    OTHER = enum.auto()


ORDINARY, MASKED, TIED, SPECIAL, EAGER_OVERFLOW = range(5)
"""Kinds of samples. EAGER_OVERFLOW: eager's exponentials overflowed in this one."""

_CYCLE = (ORDINARY, MASKED, TIED, SPECIAL, MASKED, ORDINARY, MASKED, TIED, SPECIAL)
_TABLE = 1024
_FILLS = (0.0, 0.0, 0.0, -math.inf, -1e4, -1e9)
_SPECIALS = (0.0, -0.0, 1e-42, -1e-42, 1e-30, 1e-8, 0.5, -0.5, 1.0, -1.0, 30.0, -30.0, 100.0, -100.0,
             math.inf, -math.inf, math.nan)  # fmt: skip
_UNITS = (-1.0, 0.0, 1.0)
_POWERS = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0, 4.0)
_NORMAL, _WIDE, _SPRINKLED, _FINITE, _FILLED, _BINARY, _UNIT, _POWER, _ZERO, _LOWEST, _INFINITE = range(11)
_OF_BIASES = (_NORMAL, _FILLED, _ZERO, _LOWEST, _INFINITE, _FILLED, _LOWEST, _BINARY)
_OF_SCALES = (_NORMAL, _NORMAL, _BINARY)
_OF_TIES = (_UNIT, _POWER, _ZERO, _UNIT, _POWER)
_LIVE_SHARES = (0.5, 0.0, 1.0, 0.9, 0.0, 0.5)


@functools.lru_cache(maxsize=64)
def _table(dtype: torch.dtype) -> Tensor:
    """[regime, entry]: values that the dtype holds, in float64."""
    generator = torch.Generator().manual_seed(20)
    normal = torch.randn(_TABLE, generator=generator, dtype=torch.float64)
    pick = torch.randint(len(_SPECIALS), (_TABLE,), generator=generator)
    special = torch.tensor(_SPECIALS, dtype=torch.float64)[pick]
    sparse = torch.rand(_TABLE, generator=generator, dtype=torch.float32) < 0.06
    lowest = torch.finfo(dtype).min
    fills = torch.tensor((*_FILLS, lowest), dtype=torch.float64)
    filled = fills[torch.randint(len(fills), (_TABLE,), generator=generator)]
    constants = [torch.full((_TABLE,), value, dtype=torch.float64) for value in (0.0, lowest, -math.inf)]
    sprinkled = torch.where(sparse, special, normal)
    finite = torch.where(sprinkled.isfinite(), sprinkled, normal).clamp(-2, 2)
    binary = (normal > 0).double()
    ties = [torch.tensor(few, dtype=torch.float64)[pick % len(few)] for few in (_UNITS, _POWERS)]
    rows = [normal, 2 * normal, sprinkled, finite, filled, binary, *ties, *constants]
    return torch.stack(rows).to(dtype).double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Made-up values of tensors, in SAMPLES rows.

    longest: of the sequences, for integers that are positions.
    finite: whether Q, K and V are, and of ordinary size. Additive masks take that for granted (kernels do not compute s
        + -inf), and so do sums of attentions (of which each has its own product with V)."""

    longest: int
    finite: bool

    @property
    def kinds(self) -> Tensor:
        """[SAMPLES]: the kind of each."""
        return torch.tensor(_CYCLE).repeat(-(-SAMPLES // len(_CYCLE)))[:SAMPLES]

    def values(self, leaf: int, flat: Tensor, dtype: torch.dtype, role: Role) -> Tensor:
        """The elements `flat` ([SAMPLES or 1, ...]) of tensor number `leaf`; floats in float64."""
        rows = torch.arange(SAMPLES).view(-1, *[1] * (flat.dim() - 1))
        drawn = _mixed(_mixed(flat + leaf * 0x51ED270B) + rows * 0x2545F491) & 0x7FFFFFFF
        if dtype is torch.bool:
            share = self._choice(leaf, torch.tensor(_LIVE_SHARES), flat.dim())
            return drawn < share * 0x80000000
        if not dtype.is_floating_point:
            return drawn.to(dtype) if role is Role.FACTOR else self._integers(leaf, drawn, dtype)
        masked = torch.tensor(_OF_SCALES if role is Role.SCALE else _OF_BIASES)
        regime = self._choice(leaf, masked, flat.dim())
        kinds = self.kinds.view(-1, *[1] * (flat.dim() - 1))
        usual = self._choice(leaf, torch.tensor((_NORMAL, _NORMAL, _WIDE)), flat.dim())
        regime = torch.where((kinds == MASKED) & (role is not Role.FACTOR), regime, usual)
        regime = torch.where(kinds == SPECIAL, _FINITE if role is Role.FACTOR and self.finite else _SPRINKLED, regime)
        regime = torch.full_like(regime, _NORMAL) if role is Role.FINITE else regime
        regime = torch.where(kinds == TIED, self._choice(leaf, torch.tensor(_OF_TIES), flat.dim()), regime)
        values = _table(dtype)[regime, drawn % _TABLE]
        return torch.where((kinds != ORDINARY) & (role is Role.SCALE), values.abs(), values)

    def nudged(self, values: Tensor, by: Tensor, scores: bool) -> Tensor:
        """Values changed in their last digits. scores: whether they are of Q or K, which stay where scores tie, as that
        would end the tie."""
        kinds = self.kinds.view(-1, *[1] * (values.dim() - 1))
        return torch.where((kinds == TIED) & scores, values, values * (1 + by))

    def _integers(self, leaf: int, drawn: Tensor, dtype: torch.dtype) -> Tensor:
        """Positions, or a few numbers that often agree; every value of narrow dtypes."""
        info = torch.iinfo(dtype)
        limit = min(self.longest, info.max)
        widths = (3, limit, limit, 2) if info.bits > 16 else (3, limit, info.max, info.max)
        return (drawn % self._choice(leaf, torch.tensor(widths), drawn.dim())).to(dtype)

    def _choice(self, leaf: int, options: Tensor, rank: int) -> Tensor:
        """The option that holds for a tensor in each sample."""
        drawn = _mixed(torch.arange(SAMPLES) * 0x9E3779B1 + leaf * 0x85EBCA6B) & 0x7FFFFFFF
        return options[drawn % len(options)].view(-1, *[1] * (rank - 1))


def _mixed(number: Tensor) -> Tensor:
    """A hash of integers."""
    number = number * -0x61C8864680B583EB
    number = (number ^ (number >> 29)) * -0x40A7B892E31B1A47
    return number ^ (number >> 32)


def coordinates_of_samples(dims: Sequence[str], shape: Sequence[int]) -> dict[str, Tensor]:
    """[SAMPLES, 1] of every coordinate, "e" [SAMPLES, COLUMNS]: both ends, near them, and anywhere."""
    generator = torch.Generator().manual_seed(7)
    coordinates = {}
    for name, extent in zip(dims, shape, strict=True):
        count = COLUMNS if name == "e" else 1
        anywhere = torch.randint(extent, (SAMPLES, count), generator=generator)
        share = torch.rand(SAMPLES, count, generator=generator, dtype=torch.float64)
        near = (extent**share).long() - 1
        ends = torch.where(share < 0.5, 0, extent - 1)
        pick = torch.randint(6, (SAMPLES, count), generator=generator)
        at = torch.where(
            pick < 3, anywhere, torch.where(pick < 4, ends, torch.where(pick < 5, near, extent - 1 - near))
        )
        coordinates[name] = at.clamp(0, extent - 1)
    return coordinates


def keys(spec: AttentionSpec, sizes: Mapping[str, int], places: Mapping[str, Tensor], n_q: int, n_k: int) -> Tensor:
    """[SAMPLES, keys]: all where they are few, else around the row, at both ends, where the mask changes, anywhere."""
    if n_k <= ALL_KEYS:
        return torch.arange(n_k).expand(SAMPLES, n_k).contiguous()
    generator = torch.Generator().manual_seed(11)
    rows = places["i"]
    steps = torch.tensor([0, 1, -1, 2])
    own = torch.cat([rows + steps, rows + (n_k - n_q) + steps[:3]], 1)
    ends = torch.tensor([0, 1, n_k - 1]).expand(SAMPLES, 3)
    anywhere = torch.randint(n_k, (SAMPLES, 10), generator=generator)
    share = torch.rand(SAMPLES, 6, generator=generator, dtype=torch.float64)
    away = rows - (n_k**share).long() * torch.tensor([1, 1, 1, 1, -1, -1])
    return torch.cat([own, ends, anywhere, away, _edges(spec, sizes, places, n_k)], 1).clamp(0, n_k - 1)


def _edges(spec: AttentionSpec, sizes: Mapping[str, int], places: Mapping[str, Tensor], n_k: int) -> Tensor:
    """Keys beside which the mask's positions change, two pairs for each row."""
    empty = torch.zeros(SAMPLES, 0, dtype=torch.int64)
    if spec.mask is None or n_k > _LONGEST_LINE:
        return empty
    parts = [p for p in _predicates(spec.mask.live) if "j" in coordinates(p) and not (loads(p) or contains(p, SCORE))]
    known = {coord(name): at for name, at in places.items()} | {J: torch.arange(n_k).view(1, -1)}
    near = []
    for part in parts[:4]:
        holds = evaluate(part, leaves(sizes, known)).expand(SAMPLES, n_k)
        changes = (holds[:, 1:] != holds[:, :-1]).to(torch.int8)
        first, last = changes.argmax(1), n_k - 2 - changes.flip(1).argmax(1)
        near += [t.view(-1, 1) + torch.tensor([-1, 0, 1, 2]) for t in (first, last)]
    return torch.cat(near, 1) if near else empty


def _predicates(expr: Expr) -> list[Expr]:
    """The predicates that logic combines."""
    if expr.op in ("and", "or", "not"):
        return list(dict.fromkeys(p for arg in expr.args for p in _predicates(arg)))
    return [expr]
