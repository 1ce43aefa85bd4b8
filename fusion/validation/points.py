"""Where a site is compared: rows of its result, and for each row the keys that are looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusion.ir.expr import SCORE, Expr, J, contains, coord, coordinates, loads
from fusion.ir.ops import evaluate
from fusion.ir.sizes import leaves
from fusion.ir.spec import AttentionSpec

WORLDS = 72
COLUMNS = 3
ALL_KEYS = 32
_LONGEST_LINE = 1 << 14


def places(dims: Sequence[str], shape: Sequence[int]) -> dict[str, Tensor]:
    """[WORLDS, 1] of every coordinate, "e" [WORLDS, COLUMNS]: both ends, near them, and anywhere."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, extent in zip(dims, shape, strict=True):
        count = COLUMNS if name == "e" else 1
        anywhere = torch.randint(extent, (WORLDS, count), generator=generator)
        share = torch.rand(WORLDS, count, generator=generator, dtype=torch.float64)
        near = (extent**share).long() - 1
        ends = torch.where(share < 0.5, 0, extent - 1)
        pick = torch.randint(6, (WORLDS, count), generator=generator)
        at = torch.where(
            pick < 3, anywhere, torch.where(pick < 4, ends, torch.where(pick < 5, near, extent - 1 - near))
        )
        found[name] = at.clamp(0, extent - 1)
    return found


def keys(spec: AttentionSpec, sizes: Mapping[str, int], places: Mapping[str, Tensor], n_q: int, n_k: int) -> Tensor:
    """[WORLDS, keys]: all where they are few, else around the row, at both ends, where the mask changes, anywhere."""
    if n_k <= ALL_KEYS:
        return torch.arange(n_k).expand(WORLDS, n_k).contiguous()
    generator = torch.Generator().manual_seed(11)
    rows = places["i"]
    steps = torch.tensor([0, 1, -1, 2])
    own = torch.cat([rows + steps, rows + (n_k - n_q) + steps[:3]], 1)
    ends = torch.tensor([0, 1, n_k - 1]).expand(WORLDS, 3)
    anywhere = torch.randint(n_k, (WORLDS, 10), generator=generator)
    share = torch.rand(WORLDS, 6, generator=generator, dtype=torch.float64)
    away = rows - (n_k**share).long() * torch.tensor([1, 1, 1, 1, -1, -1])
    return torch.cat([own, ends, anywhere, away, _edges(spec, sizes, places, n_k)], 1).clamp(0, n_k - 1)


def _edges(spec: AttentionSpec, sizes: Mapping[str, int], places: Mapping[str, Tensor], n_k: int) -> Tensor:
    """Keys beside which the mask's positions change, two pairs for each row."""
    empty = torch.zeros(WORLDS, 0, dtype=torch.int64)
    if spec.mask is None or n_k > _LONGEST_LINE:
        return empty
    parts = [p for p in _predicates(spec.mask.live) if "j" in coordinates(p) and not (loads(p) or contains(p, SCORE))]
    known = {coord(name): at for name, at in places.items()} | {J: torch.arange(n_k).view(1, -1)}
    found = []
    for part in parts[:4]:
        holds = evaluate(part, leaves(sizes, known)).expand(WORLDS, n_k)
        changes = (holds[:, 1:] != holds[:, :-1]).to(torch.int8)
        first, last = changes.argmax(1), n_k - 2 - changes.flip(1).argmax(1)
        found += [t.view(-1, 1) + torch.tensor([-1, 0, 1, 2]) for t in (first, last)]
    return torch.cat(found, 1) if found else empty


def _predicates(expr: Expr) -> list[Expr]:
    """The predicates that logic combines."""
    if expr.op in ("and", "or", "not"):
        return list(dict.fromkeys(p for arg in expr.args for p in _predicates(arg)))
    return [expr]
