"""Random attention specs: score programs from the primitives, masks, weights, sinks, index maps and dtypes.

`drawn(seed)` gives a spec; `tensors(drawn, rng)` the operands and sizes of one call of it, of any lengths, so that one
compiled kernel serves many calls.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion.ir import AttentionSpec, Expr, Kind, Normalizer, Operand, Output, integers
from fusion.ir.expr import ONE, ROW_MAX, ROW_SUM, SCORE, WEIGHT, C, E, I, J, const, coord, load, size
from fusion.ir.ops import apply, where
from fusion.ir.spec import AuxOutput, Reduction
from fusion.passes.specify.masks import understand

SIZES = ("B", "H", "Nq", "Nk")
B, H, NQ, NK = map(size, SIZES)
B0, B1 = coord("b0"), coord("b1")
EXTENT = {B0: "B", B1: "H", I: "Nq", J: "Nk"}
FILLS = (-math.inf, torch.finfo(torch.bfloat16).min, -1e9, -1e4)
"""Of masks; each but the last is too large for float16."""
STORED = 0.08
"""The share of specs whose K and V are made of what is stored: integers, or what a table of pages points to."""
FURTHER = 0.08
"""The share of specs that write weights or statistics of them."""
GATED = 0.04
"""The share of specs whose weights are multiplied by a gate of their scores."""
PAGE = 8
Shape = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A spec, the heads that share a key head, how to draw the operands after V, and which of K and V are in pages."""

    spec: AttentionSpec
    group: int
    extras: tuple[Callable[[Shape], torch.Tensor], ...]
    paged: frozenset[int] = frozenset()


class Draw:
    """A spec that is being drawn."""

    def __init__(self, seed: int | str):
        self.rng = random.Random(f"spec {seed}")
        self.dtype = self.rng.choices(["float32", "bfloat16", "float16"], [6, 2, 1])[0]
        self.operands = [Operand(dtype=self.dtype, rank=4, name=name) for name in "qkv"]
        self.extras: list[Callable[[Shape], torch.Tensor]] = []
        self.paged = set[int]()

    def read(self, index: tuple[Expr, ...], dtype: str, make: Callable[[Shape], torch.Tensor]) -> Expr:
        """An element of a new operand."""
        self.operands.append(Operand(dtype=dtype, rank=len(index), name=f"extra{len(self.extras)}"))
        self.extras.append(make)
        return load(len(self.operands) - 1, index, self.operands[-1].kind)

    def captured(self) -> Expr:
        """A number that is read, over some of the coordinates."""
        index = tuple(c for c in (B0, B1, I, J) if self.rng.random() < 0.5)
        dtype = self.rng.choice(["float32", "float32", self.dtype])
        return self.read(index, dtype, lambda n: torch.randn([n[EXTENT[c]] for c in index]).to(getattr(torch, dtype)))

    def keep(self) -> Expr:
        """A predicate over positions or over what is read."""
        distance = integers.sub(I, J)
        width = const(self.rng.choice([1, 3, 9, 17]))
        kinds: list[Callable[[], Expr]] = [
            lambda: apply("ile", J, I),
            lambda: apply("ile", J, integers.add(I, integers.sub(NK, NQ))),
            lambda: apply("and", apply("ile", J, I), apply("ilt", distance, width)),
            lambda: apply("ilt", apply("iabs", distance), width),
            lambda: apply("or", apply("ile", J, I), apply("ilt", J, width)),
            lambda: apply("ieq", integers.floordiv(I, 8), integers.floordiv(J, 8)),
            lambda: apply("ieq", integers.mod(integers.add(I, J), 3), const(0)),
            lambda: self.read((B0, J), "bool", lambda n: torch.rand(n["B"], n["Nk"]) < 0.6),
            lambda: self.read((I, J), "bool", lambda n: torch.rand(n["Nq"], n["Nk"]) < 0.5),
            lambda: apply("ilt", J, self.read((B0,), "int64", lambda n: torch.randint(0, n["Nk"] + 1, (n["B"],)))),
        ]
        found = self.rng.choice(kinds)()
        if self.rng.random() < 0.25:
            found = apply(self.rng.choice(["and", "or"]), found, self.rng.choice(kinds)())
        return apply("not", found) if self.rng.random() < 0.1 else found

    def step(self, x: Expr) -> Expr:
        """One more operation on a score."""
        distance = apply("to_float", integers.sub(J, I))
        half = self.dtype == "float16"
        kinds: list[Callable[[], Expr]] = [
            lambda: apply("fadd", x, self.captured()),
            lambda: apply("fmul", x, self.captured()),
            lambda: apply("fadd", x, apply("fmul", const(0.05), distance)),
            lambda: apply("fmul", apply("tanh", apply("div", x, const(5.0))), const(5.0)),
            lambda: apply(self.rng.choice(["sin", "cos", "sigmoid", "erf", "atan", "abs", "neg", "tanh"]), x),
            lambda: apply("fmul", x, apply("sigmoid", x)),
            lambda: apply("maximum", apply("minimum", x, const(1.5)), const(-2.0)),
            lambda: apply("log1p", apply("abs", x)),
            lambda: apply("sqrt", apply("fadd", apply("fmul", x, x), const(0.5))),
            lambda: apply("exp", apply("minimum", x, const(1.0))),
            lambda: where(apply("flt", const(0.0), x), x, apply("fmul", x, const(0.2))),
            lambda: where(self.keep(), x, apply("fadd", x, const(-1.0))),
            lambda: apply("fadd", x, self.read((integers.mod(integers.add(I, J), 5),), "float32", _five)),
        ]
        if self.dtype != "float32":  # whose last digits would decide
            kinds.append(lambda: apply(f"round_{self.dtype}", x))
        masks = [lambda: where(self.keep(), x, const(self.rng.choice(FILLS[3:] if half else FILLS)))] * 6
        return self.rng.choice([*kinds, *masks])()

    def row_scale(self) -> Expr:
        """Factor of a row in place of one over its sum. In every program it is a function of that sum."""
        kinds: list[Callable[[], Expr]] = [
            lambda: apply("div", const(1.0), apply("fadd", ROW_SUM, apply("exp", apply("neg", ROW_MAX)))),
            lambda: apply("div", const(1.0), apply("fadd", ROW_SUM, const(0.5))),
            lambda: apply("div", const(1.0), apply("maximum", ROW_SUM, const(3.0))),
            lambda: apply("div", const(1.0), apply("sqrt", ROW_SUM)),
            lambda: apply("div", apply("exp", apply("minimum", ROW_MAX, const(20.0))), ROW_SUM),  # no infinity times 0
            lambda: apply("div", const(0.125), ROW_SUM),
        ]
        return self.rng.choice(kinds)()

    def stored(self, number: int, index: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], Expr | None]:
        """Where K or V is read, and what is multiplied of it: in pages, or in integers with a scale for each head."""
        if self.rng.random() < 0.5:
            pages = self.read((B0, integers.floordiv(J, PAGE)), "int64", _pages)
            self.paged.add(number)
            return (pages, index[1], integers.mod(J, PAGE), index[3]), None
        dtype = self.rng.choice(["int8", "uint8"])
        self.operands[number] = Operand(dtype=dtype, rank=4, name="qkv"[number])
        scale = self.read((B0, B1), "float32", lambda n: 0.002 + 0.01 * torch.rand(n["B"], n["H"]))
        value = apply("to_float", load(number, index, Kind.INT))
        return index, apply("fmul", value if dtype == "int8" else value - const(128.0), scale)

    def aux_output(self, normalizer: Normalizer) -> AuxOutput:
        """Weights, a reduction of them, or what is made of a row's maximum and sum. Where rows without a key are 0, of
        a sum only its logarithm is read: programs with others are not fused."""
        left = self.rng.sample(["b0", "b1"], 2)
        kind = self.rng.choice(["table", "rows", "keys"] + ["row"] * (normalizer is not Normalizer.NONE))
        if kind == "row":
            infinite = apply("feq", apply("abs", ROW_MAX), const(math.inf))
            log_sum = where(infinite, ROW_MAX, apply("fadd", ROW_MAX, apply("log", ROW_SUM)))
            value = self.rng.choice([ROW_MAX, ROW_SUM, log_sum])
            if normalizer is Normalizer.SAFE_SOFTMAX and value is ROW_SUM:
                value = log_sum
            return AuxOutput(value=value, dims=(*left, "i"), dtype="float32")
        value = self.of_weight()
        if kind == "table":
            return AuxOutput(value=value, dims=(*self.rng.sample([*left, "i"], 3), "j"), dtype=self.dtype)
        over, kept = ("j", "i") if kind == "rows" else ("i", "j")
        reduction = self.rng.choice([Reduction.SUM, Reduction.SUM, Reduction.MAX, Reduction.MIN])
        return AuxOutput(value=value, dims=(*left, kept), dtype="float32", reduction=reduction, over=over)

    def of_weight(self) -> Expr:
        """An expression of one weight, its position and what is read."""
        kinds: list[Callable[[], Expr]] = [
            lambda: WEIGHT,
            lambda: apply("fmul", WEIGHT, apply("log", apply("fadd", WEIGHT, const(1e-3)))),
            lambda: apply("fmul", WEIGHT, WEIGHT),
            lambda: apply("fmul", WEIGHT, apply("to_float", integers.sub(I, J))),
            lambda: apply("fmul", WEIGHT, self.captured()),
            lambda: where(self.keep(), const(0.0), WEIGHT),
        ]
        return self.rng.choice(kinds)()


def _pages(n: Shape) -> torch.Tensor:
    """Each batch element's pages, in any order, out of all."""
    each = -(-n["Nk"] // PAGE)
    return torch.randperm(n["B"] * each).view(n["B"], each)


def _five(n: Shape) -> torch.Tensor:
    return torch.randn(5)


def drawn(seed: int | str) -> Drawn:
    """The spec of a seed."""
    draw = Draw(seed)
    rng = draw.rng
    d, d_v = rng.choice([4, 5, 8, 16, 17, 24, 32, 40, 64]), rng.choice([4, 6, 16, 19, 32, 33, 64])
    score = apply("fmul", SCORE, const(rng.choice([d**-0.5, 0.3, 1.0, -0.2])))
    for _ in range(rng.randint(0, 4)):
        score = draw.step(score)
    kinds = [Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX, Normalizer.NONE, Normalizer.ZERO_SOFTMAX]
    normalizer = rng.choices(kinds, [6, 2, 1, 1])[0]
    fields: dict = {}
    if normalizer is Normalizer.NONE:
        score = apply("sigmoid", score)
    elif rng.random() < 0.15:
        fields["sinks"] = (draw.read((B1,), "float32", lambda n: torch.randn(n["H"])),)
    elif rng.random() < 0.1 and normalizer is Normalizer.SOFTMAX:
        fields["row_scale"] = draw.row_scale()
    if rng.random() < 0.15:
        fields["weight"] = draw.captured()
    draw.rng = aux = random.Random(f"further {seed}")
    if aux.random() < FURTHER:
        fields["aux_outputs"] = tuple(draw.aux_output(normalizer) for _ in range(aux.randint(1, 3)))
    draw.rng = random.Random(f"gates {seed}")
    if draw.rng.random() < GATED and normalizer is not Normalizer.NONE:
        function, gated = draw.rng.choice(["sigmoid", "tanh"]), draw.rng.choice([SCORE, score])
        cleaned = normalizer is Normalizer.ZERO_SOFTMAX  # then gates that may be NaN are refused
        gate = apply(function, SCORE if cleaned else gated)
        fields["weight"] = apply("fmul", fields.get("weight", ONE), gate)
    group = rng.choice([1, 1, 1, 2, 3])
    heads = B1 if group == 1 else integers.floordiv(B1, group)
    order = ("b0", "b1", "i", "e") if rng.random() < 0.5 else ("b0", "i", "b1", "e")
    k, v, values = (B0, heads, J, C), (B0, heads, J, E), {}
    draw.rng = random.Random(f"stored {seed}")
    if draw.rng.random() < STORED:
        k, values["k_value"] = draw.stored(1, k)
        v, values["v_value"] = draw.stored(2, v)
    out_dtype = draw.rng.choice(["float32", draw.dtype]) if draw.rng.random() < 0.2 else draw.dtype
    spec = AttentionSpec(
        sizes=SIZES, batch=(B, H), n_q=NQ, n_k=NK, d=const(d), d_v=const(d_v), operands=tuple(draw.operands),
        q=(B0, B1, I, C), k=k, v=v, score=score, normalizer=normalizer, mask=understand(score, normalizer),
        dtype=draw.dtype, out_dtype=out_dtype, output=Output(dims=("b0", "b1", "i", "e"), order=order),
        **fields, **values,
    )  # fmt: skip
    return Drawn(spec=spec, group=group, extras=tuple(draw.extras), paged=frozenset(draw.paged))


def tensors(found: Drawn, rng: random.Random) -> tuple[list[torch.Tensor], list[int]]:
    """Operands and sizes of a call: lengths, memory layouts and sizes of values at random."""
    spec, dtype = found.spec, getattr(torch, found.spec.dtype)
    kv = rng.randint(1, 2)
    n = {"B": rng.randint(1, 2), "H": kv * found.group, "Nq": rng.choice(LENGTHS), "Nk": rng.choice(LENGTHS)}
    d, d_v = spec.d.integer, spec.d_v.integer
    shapes = ((n["H"], n["Nq"], d), (kv, n["Nk"], d), (kv, n["Nk"], d_v))
    factor = rng.choice([1.0, 1.0, 0.1, 2.0])
    qkv = [_laid_out(rng, (n["B"], *shape)).mul(factor) for shape in shapes]
    for number in (0, 1, 2):
        if number in found.paged:
            qkv[number] = torch.randn(n["B"] * -(-n["Nk"] // PAGE), kv, PAGE, qkv[number].shape[-1]).mul(factor)
        if (own := spec.operands[number].torch_dtype).is_floating_point:
            qkv[number] = qkv[number].to(dtype)
        else:
            qkv[number] = torch.randint(torch.iinfo(own).min, torch.iinfo(own).max + 1, qkv[number].shape, dtype=own)
    return [*qkv, *(make(n) for make in found.extras)], [n[name] for name in SIZES]


LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 40, 63, 70, 100, 131, 260)


def _laid_out(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    b, h, n, d = shape
    kind = rng.randint(0, 3)
    if kind == 1:
        return torch.randn(b, n, h, d).transpose(1, 2)
    if kind == 2:
        return torch.randn(b, h, d, n).mT
    return torch.randn(b, h, 2 * n, d + 3)[:, :, ::2, 1 : d + 1] if kind == 3 else torch.randn(shape)
