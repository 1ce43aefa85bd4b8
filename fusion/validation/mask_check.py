"""Checks of what a spec says about its mask.

`mask_contradiction` compares the facts about a mask with its predicate on blocks of rows. `key_set_contradiction`
compares an attention over sets of keys with its original under a mask of all keys, which has been compared with the
graph: the reference interpreter executes both on the small operands that kernels are proved on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from fusion.codegen import reference
from fusion.codegen.reference.operands import Operands
from fusion.ir.expr import SCORE, Expr, I, J, Kind, coord
from fusion.ir.ops import evaluate
from fusion.ir.results import leaves, size_value
from fusion.ir.spec import AttentionSpec
from fusion.passes.specify.specify import AttentionCall
from fusion.process import outside_compilation

_ROWS = 7
_BLOCKS = 24
_ALL_KEYS = 256
_FAR = 1e4


def mask_contradiction(spec: AttentionSpec, sizes: Mapping[str, int]) -> str | None:
    """Text of a contradiction between the mask's facts and its predicate; None where all hold."""
    return None if spec.mask is None else _MaskCheck(spec, sizes).contradiction()


class _MaskCheck:
    """Blocks of at most _ROWS rows, [blocks, rows, keys]. Loads are made up."""

    def __init__(self, spec: AttentionSpec, sizes: Mapping[str, int]):
        assert spec.mask is not None
        self.spec, self.mask, self.sizes = spec, spec.mask, sizes
        generator = torch.Generator().manual_seed(5)
        n_q, n_k = size_value(spec.n_q, sizes), size_value(spec.n_k, sizes)
        lengths = torch.randint(1, _ROWS + 1, (_BLOCKS,), generator=generator).clamp(max=n_q)
        first = (torch.rand(_BLOCKS, generator=generator, dtype=torch.float32) * (n_q - lengths + 1)).long()
        self.first, self.last = first.view(-1, 1, 1), (first + lengths - 1).view(-1, 1, 1)
        rows = torch.minimum(self.first + torch.arange(_ROWS).view(1, -1, 1), self.last)
        self.known: dict[Expr, Tensor] = {I: rows, coord("i0"): self.first, coord("i1"): self.last}
        for k, extent in enumerate(spec.batch):
            size = max(size_value(extent, sizes), 1)
            self.known[coord(f"b{k}")] = torch.randint(size, (_BLOCKS, 1, 1), generator=generator)
        self.known[J] = self._keys(n_k, rows, generator)
        shape = _BLOCKS, _ROWS, self.known[J].shape[-1]
        self.known[SCORE] = torch.randn(shape, generator=generator, dtype=torch.float32)
        largest = float((self._value(spec.score) * self._value(self.mask.live)).abs().nan_to_num(0, 0, 0).max())
        if largest > _FAR:  # numbers that bring Q and K back to where they are of ordinary size
            self.known[SCORE] /= largest

    def _keys(self, n_k: int, rows: Tensor, generator: torch.Generator) -> Tensor:
        if n_k <= _ALL_KEYS:
            return torch.arange(n_k).view(1, 1, -1).expand(_BLOCKS, 1, n_k)
        anywhere = torch.randint(n_k, (_BLOCKS, 1, 64), generator=generator)
        ends = [self._value(e) for e in (self.mask.key_lo, self.mask.key_hi, self.mask.full_lo, self.mask.full_hi) if e]
        around = [(e + torch.arange(-2, 3)).expand(_BLOCKS, 1, 5) for e in ends]
        return torch.cat([anywhere, rows.mT, *around], -1).clamp(0, n_k - 1)

    def _value(self, expr: Expr) -> Tensor:
        return evaluate(expr, leaves(self.sizes, self.known, self._load))

    def _load(self, part: Expr):
        """Made-up elements, equal for equal indices."""

        def load(*index: Tensor) -> Tensor:
            number = torch.zeros((), dtype=torch.int64)
            for entry in index:
                number = number * 7919 + entry
            drawn = torch.remainder(number * 40503 + int(part.attr) * 977, 1009)  # type: ignore[arg-type]
            if part.kind is Kind.BOOL:
                return drawn % 2 == 0
            return drawn % 5 if part.kind is Kind.INT else (2 * drawn - 1009).float() / 1009  # a divisor too

        return load if part.args else load()

    def contradiction(self) -> str | None:
        mask, keys = self.mask, self.known[J]
        shape = self.known[SCORE].shape
        live = self._value(mask.live).expand(shape)
        score = self._value(self.spec.score).expand(shape)
        limit = mask.fill / 2 if math.isfinite(mask.fill) else mask.fill  # from which on kernels take rows for live
        if bool((~live & ~(score <= limit)).any()):
            return f"a key that is not live has a score above {limit}"
        visited = self._between(mask.key_lo, mask.key_hi, keys)
        if bool((live & ~visited).any()):
            return "a live key is outside of the range of keys that a block of rows visits"
        if mask.full is None:
            return None
        full = self._value(mask.full).expand(shape)
        inside = self._between(mask.full_lo, mask.full_hi, keys).expand(shape)
        # The two compute with tensors of other shapes, of which a function of torch may round other elements otherwise.
        same = torch.isclose(full, score, rtol=1e-5, atol=1e-6, equal_nan=True)
        if bool((inside & ~same).any()):
            return "the program of whole tiles differs from the score program where it may stand for it"
        return None

    def _between(self, low: Expr | None, high: Expr | None, keys: Tensor) -> Tensor:
        inside = torch.ones(keys.shape, dtype=torch.bool)
        if low is not None:
            inside = inside & (keys >= self._value(low))
        return inside if high is None else inside & (keys < self._value(high))


_SMALL = {"Nq": 5, "Nk": 13, "Nset": 6}


def key_set_contradiction(call: AttentionCall, examples: Mapping[str, int]) -> str | None:
    """Difference between an attention over sets of keys and its original with a mask, or None."""
    assert call.gathered is not None
    with outside_compilation(), torch.no_grad():
        operands = _operands(call, examples)
        expected, result = (_result(each, operands, examples) for each in (call.gathered.dense, call))
    if call.spec.n_k_total is not None:
        place = call.spec.output.dims.index("i")
        result = result.flatten(place - 1, place)
    if expected.shape != result.shape:
        return f"the result has the shape {list(result.shape)} where it had {list(expected.shape)}"
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    apart = ~torch.isclose(result, expected, rtol=1e-9, atol=1e-9 * scale, equal_nan=True)
    if apart.any():
        return f"{int(apart.sum())} of {apart.numel()} elements differ with {_SMALL['Nset']} keys in each set"
    return None


def _small_sizes(call: AttentionCall, examples: Mapping[str, int]) -> dict[str, int]:
    """Few queries and keys; the last coordinate of the batch in full, because its heads may differ by number."""
    values = call.example_sizes(examples)
    last = f"B{len(call.spec.batch) - 1 - (call.spec.n_k_total is not None)}"
    few = {name: min(value, 2) for name, value in values.items() if name.startswith("B") and name != last}
    return values | few | {name: small for name, small in _SMALL.items() if name in values}


def _operands(call: AttentionCall, examples: Mapping[str, int]) -> dict[Node, Tensor]:
    """Operands of both forms, by node: positions that differ from each other, and masks computed from them."""
    assert call.gathered is not None
    dense, positions = call.gathered.dense, call.operands[call.gathered.table]
    drawn = Operands(dense.spec, _small_sizes(dense, examples), seed=7).tensors()
    values: dict[Node, Tensor] = {}
    for node, tensor in zip(dense.operands, drawn, strict=True):  # a tensor may be several operands
        values[node] = _as_large(tensor, values[node].shape) if node in values else tensor
    for number, keys in dense.key_sets:
        if keys.positions is positions:
            shape = values[dense.operands[number]].shape
            draw = torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
            values[positions] = draw.argsort(-1)[..., : _SMALL["Nset"]]
            mask = torch.full(shape, bool(keys.outside.attr))
            values[dense.operands[number]] = mask.scatter(-1, values[positions], bool(keys.inside.attr))
    return values


def _as_large(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor, repeated along dimensions in which it has fewer elements than `shape`."""
    for dim, (own, other) in enumerate(zip(tensor.shape, shape, strict=True)):
        tensor = tensor.index_select(dim, torch.arange(max(own, other)) % own)
    return tensor


def _result(call: AttentionCall, operands: Mapping[Node, Tensor], examples: Mapping[str, int]) -> Tensor:
    """The attention in float64."""
    sizes = _small_sizes(call, examples)
    spec = replace(call.spec, out_dtype="float64")
    return reference.run(spec, [operands[node] for node in call.operands], list(sizes.values()), torch.float64)
