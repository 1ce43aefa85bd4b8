"""Specs for the tests of the CPU emitter: score programs by name, each with the tensors that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fusion.codegen import reference
from fusion.codegen.mlir.target import Target, target_of
from fusion.ir import AttentionSpec, Expr, Kind, MaskFacts, Normalizer, Operand, Output, integers
from fusion.ir.expr import ROW_MAX, ROW_SUM, SCORE, C, E, I, J, const, coord, load, size
from fusion.ir.ops import apply, where
from fusion.machine import Machine

HERE = target_of(Machine.detect())
#: Code for AVX-512 runs only where it exists; the others run everywhere (LLVM splits vectors that are too wide).
TARGETS = {
    "best": HERE,
    "multiply-add": replace(HERE, amx=False),
    "avx2": Target(lanes=8, tile_rows=4, tile_groups=3),
    "generic": Target(lanes=4),
}

B, H, NQ, NK = map(size, ("B", "H", "Nq", "Nk"))
BATCH, HEAD, I0, I1 = map(coord, ("b0", "b1", "i0", "i1"))
INF, FMIN = math.inf, torch.finfo(torch.float32).min
Sizes = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A score program: the operands after V, the expression of a head of width d, mask facts, and how to draw the
    tensors."""

    operands: tuple[Operand, ...] = ()
    score: Callable[[Expr], Expr]
    mask: MaskFacts | None = None
    tensors: Callable[[Sizes], list[torch.Tensor]] = lambda n: []


def tensor(name: str, rank: int, dtype: str = "float32") -> Operand:
    return Operand(dtype=dtype, rank=rank, name=name)


def read(*index: Expr, kind: Kind = Kind.FLOAT, operand: int = 3) -> Expr:
    return load(operand, index, kind)


def fill_where(live: Expr, fill: float) -> Callable[[Expr], Expr]:
    return lambda s: where(live, s, const(fill))


CAUSAL = apply("ile", J, I)
ALIGNED = apply("ile", J, integers.add(I, integers.sub(NK, NQ)))
WINDOW = apply("and", CAUSAL, apply("ilt", integers.sub(I, J), const(17)))
PADDED = apply("and", CAUSAL, read(BATCH, J, kind=Kind.BOOL))
UP_TO_ROW = integers.add(I1, 1)
DISTANCE = apply("imin", apply("iabs", integers.sub(I, J)), integers.integer(7))
BUCKET = apply("iwhere", apply("ilt", I, J), integers.add(DISTANCE, 8), DISTANCE)


def _left_padded(n: Sizes) -> list[torch.Tensor]:
    start = torch.randint(0, n["Nk"], (n["B"], 1))
    return [torch.arange(n["Nk"])[None] >= start]


def _documents(n: Sizes) -> list[torch.Tensor]:
    return [torch.randint(0, 3, (n["B"], max(n["Nq"], n["Nk"]))).sort(-1).values + 2**40]


def _function(name: str, *rest: float) -> Program:
    positive = name in ("log1p", "sqrt", "pow")
    return Program(score=lambda s: apply(name, apply("abs", s) if positive else s, *map(const, rest)))


PROGRAMS = {
    "plain": Program(score=lambda s: s),
    "causal": Program(score=fill_where(CAUSAL, -INF), mask=MaskFacts(live=CAUSAL, key_hi=UP_TO_ROW, fill=-INF)),
    "causal_last_key": Program(
        score=fill_where(ALIGNED, FMIN),
        mask=MaskFacts(live=ALIGNED, key_hi=integers.add(UP_TO_ROW, integers.sub(NK, NQ)), fill=FMIN),
    ),
    "window": Program(
        score=fill_where(WINDOW, FMIN),
        mask=MaskFacts(live=WINDOW, key_lo=integers.sub(I0, 16), key_hi=UP_TO_ROW, fill=FMIN),
    ),
    "left_padded": Program(
        operands=(tensor("mask", 2, "bool"),), score=fill_where(PADDED, FMIN), tensors=_left_padded,
        mask=MaskFacts(live=PADDED, key_hi=UP_TO_ROW, fill=FMIN),
    ),
    "left_padded_inf": Program(
        operands=(tensor("mask", 2, "bool"),), score=fill_where(PADDED, -INF), tensors=_left_padded,
        mask=MaskFacts(live=PADDED, key_hi=UP_TO_ROW, fill=-INF),
    ),
    "bias": Program(
        operands=(tensor("bias", 3),), score=lambda s: apply("fadd", s, read(HEAD, I, J)),
        tensors=lambda n: [torch.randn(n["H"], n["Nq"], n["Nk"])],
    ),
    "transposed_bias": Program(
        operands=(tensor("bias", 3),), score=lambda s: apply("fadd", s, read(HEAD, I, J)),
        tensors=lambda n: [torch.randn(n["H"], n["Nk"], n["Nq"]).transpose(1, 2)],
    ),
    "half_bias": Program(
        operands=(tensor("bias", 2, "float16"),), score=lambda s: apply("fadd", s, read(I, J)),
        tensors=lambda n: [torch.randn(n["Nq"], n["Nk"]).half()],
    ),
    "brain_bias": Program(
        operands=(tensor("bias", 3, "bfloat16"),), score=lambda s: apply("fadd", s, read(HEAD, I, J)),
        tensors=lambda n: [torch.randn(n["H"], n["Nq"], n["Nk"]).bfloat16()],
    ),
    "expanded_mask": Program(
        operands=(tensor("mask", 4),), score=lambda s: apply("fadd", s, read(BATCH, const(0), I, J)),
        tensors=lambda n: [torch.where(torch.rand(n["B"], 1, 1, n["Nk"]) < 0.7, 0.0, FMIN).expand(-1, 1, n["Nq"], -1)],
    ),
    "bool_mask": Program(
        operands=(tensor("mask", 4, "bool"),),
        score=lambda s: where(read(BATCH, const(0), I, J, kind=Kind.BOOL), s, const(-INF)),
        tensors=lambda n: [torch.rand(n["B"], 1, n["Nq"], n["Nk"]) < 0.8],
    ),
    "padding": Program(
        operands=(tensor("mask", 2, "bool"),), score=fill_where(read(BATCH, J, kind=Kind.BOOL), FMIN),
        tensors=lambda n: [torch.rand(n["B"], n["Nk"]) < 0.6],
    ),
    "alibi": Program(
        operands=(tensor("slope", 1),), mask=MaskFacts(live=CAUSAL, key_hi=UP_TO_ROW, fill=-INF),
        score=lambda s: where(
            CAUSAL, apply("fadd", s, apply("fmul", read(HEAD), apply("to_float", integers.sub(J, I)))), const(-INF)
        ),
        tensors=lambda n: [2.0 ** -torch.arange(1.0, n["H"] + 1)],
    ),
    "soft_cap": Program(score=lambda s: apply("fmul", apply("tanh", apply("div", s, const(20.0))), const(20.0))),
    "bucket_table": Program(
        operands=(tensor("table", 2),), score=lambda s: apply("fadd", s, read(BUCKET, HEAD)),
        tensors=lambda n: [torch.randn(16, n["H"])],
    ),
    "documents": Program(
        operands=(tensor("document", 2, "int64"),), tensors=_documents,
        score=lambda s: where(
            apply("ieq", read(BATCH, I, kind=Kind.INT), read(BATCH, J, kind=Kind.INT)), s, const(FMIN)
        ),
    ),
    "integer_bias": Program(
        operands=(tensor("bias", 2, "int32"),), tensors=lambda n: [torch.randint(-9, 9, (n["Nq"], n["Nk"])).int()],
        score=lambda s: apply("fadd", s, apply("fmul", const(0.1), apply("to_float", read(I, J, kind=Kind.INT)))),
    ),
    "byte_bias": Program(
        operands=(tensor("bias", 1, "uint8"),), tensors=lambda n: [torch.randint(0, 256, (n["Nk"],),
        dtype=torch.uint8)], score=lambda s: apply("fadd", s, apply("fmul", const(0.01), apply("to_float", read(J,
        kind=Kind.INT)))),
    ),
    "every_third": Program(
        score=lambda s: where(
            apply("ieq", integers.mod(integers.add(I, J), 3), const(0)), s, apply("fadd", s, const(-1.0))
        )
    ),
    "chunks": Program(score=fill_where(apply("ieq", integers.floordiv(I, 16), integers.floordiv(J, 16)), FMIN)),
    "temperature": Program(
        operands=(tensor("t", 1),), score=lambda s: apply("fmul", s, apply("exp", read(HEAD))),
        tensors=lambda n: [torch.randn(n["H"])],
    ),
    "row_gate": Program(
        operands=(tensor("gate", 2),), score=lambda s: apply("fmul", s, apply("tanh", read(BATCH, I))),
        tensors=lambda n: [torch.randn(n["B"], n["Nq"])],
    ),
    "clamp": Program(score=lambda s: apply("maximum", apply("minimum", s, const(0.5)), const(-0.5))),
    "cosine": _function("cos"),
    "sine": _function("sin"),
    "exponential": Program(score=lambda s: apply("exp", apply("minimum", s, const(1.0)))),
    "sigmoid": _function("sigmoid"),
    "log1p": _function("log1p"),
    "expm1": Program(score=lambda s: apply("expm1", apply("minimum", s, const(1.0)))),
    "erf": _function("erf"),
    "atan": _function("atan"),
    "sqrt": _function("sqrt"),
    "power": _function("pow", 1.5),
    "floor": _function("floor"),
    "round": _function("round"),
    "reciprocal_root": Program(score=lambda s: apply("rsqrt", apply("fadd", apply("abs", s), const(1.0)))),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A spec and how to draw its operands."""

    spec: AttentionSpec
    program: Program
    group: int
    extras: tuple[Callable[[Sizes], torch.Tensor], ...]


def case(
    name: str, dtype: str = "float32", d: int = 64, d_v: int | None = None, *,
    normalizer: Normalizer = Normalizer.SOFTMAX, group: int = 1, weight: bool = False, sinks: bool = False,
    off_by_one: bool = False, out_dtype: str | None = None, order: tuple[str, ...] = ("b0", "b1", "i", "e"),
) -> Case:  # fmt: skip
    """An attention over [B, H, N, d] tensors with the named program. `group` query heads share a key head."""
    program, d_v = PROGRAMS[name], d_v or d
    operands = [*(tensor(n, 4, dtype) for n in "qkv"), *program.operands]
    fields: dict = {}
    extras: list[Callable[[Sizes], torch.Tensor]] = []
    if weight:
        fields["weight"] = read(HEAD, I, J, operand=len(operands))
        operands.append(tensor("weight", 3))
        extras.append(lambda n: torch.rand(n["H"], n["Nq"], n["Nk"]))
    if sinks:
        fields["sinks"] = (read(HEAD, operand=len(operands)),)
        operands.append(tensor("sink", 1))
        extras.append(lambda n: torch.randn(n["H"]))
    if off_by_one:  # exp(x) / (1 + sum of exp(x))
        one = apply("fadd", ROW_SUM, apply("exp", apply("neg", ROW_MAX)))
        fields["row_scale"] = apply("div", const(1.0), one)
    kv = HEAD if group == 1 else integers.floordiv(HEAD, group)
    spec = AttentionSpec(
        sizes=("B", "H", "Nq", "Nk"), batch=(B, H), n_q=NQ, n_k=NK, d=const(d), d_v=const(d_v),
        operands=tuple(operands), q=(BATCH, HEAD, I, C), k=(BATCH, kv, J, C), v=(BATCH, kv, J, E),
        score=program.score(apply("fmul", SCORE, const(d**-0.5))), mask=program.mask, normalizer=normalizer,
        dtype=dtype, out_dtype=out_dtype or dtype, output=Output(dims=("b0", "b1", "i", "e"), order=order), **fields,
    )  # fmt: skip
    return Case(spec=spec, program=program, group=group, extras=tuple(extras))


def draw(case: Case, sizes: Sizes, layout: str = "packed") -> tuple[list[torch.Tensor], list[int]]:
    """Operands and sizes of a call. layout of q, k, v: packed, "heads_inside" [B, N, H, d], "columns" (d slowest), or
    "gaps"."""
    dtype = getattr(torch, case.spec.dtype)
    heads, d, d_v = sizes["H"] * case.group, int(case.spec.d.attr), int(case.spec.d_v.attr)  # type: ignore[arg-type]
    n = sizes | {"H": heads}
    shapes = [(n["B"], heads, n["Nq"], d), (n["B"], sizes["H"], n["Nk"], d), (n["B"], sizes["H"], n["Nk"], d_v)]
    qkv = [_laid_out(shape, layout).to(dtype) for shape in shapes]
    if layout == "gaps":  # a conversion would have packed them
        qkv = [torch.zeros(x.shape[0], x.shape[1], 2 * x.shape[2] + 1, x.shape[3] + 3, dtype=dtype)
               [:, :, 1 : 2 * x.shape[2] + 1 : 2, 1 : 1 + x.shape[3]].copy_(x) for x in qkv]  # fmt: skip
    extra = [*case.program.tensors(n), *(make(n) for make in case.extras)]
    return [*qkv, *extra], [n[name] for name in ("B", "H", "Nq", "Nk")]


def _laid_out(shape: tuple[int, int, int, int], layout: str) -> torch.Tensor:
    b, h, n, d = shape
    if layout == "heads_inside":
        return torch.randn(b, n, h, d).transpose(1, 2)
    if layout == "columns":
        return torch.randn(b, h, d, n).transpose(2, 3)
    return torch.randn(shape)


def exact(spec: AttentionSpec, operands: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """The reference in float64."""
    return reference.run(spec, [o.double() if o.is_floating_point() else o for o in operands], sizes, torch.float64)


def assert_as_exact_as_eager(
    got: torch.Tensor, spec: AttentionSpec, operands: list[torch.Tensor], sizes: list[int]
) -> None:
    """The numerics rule: at most twice the error of the reference run in the model's own dtype, plus rounding of the
    result; NaN exactly where eager has NaN."""
    dtype = getattr(torch, spec.dtype)
    want, eager = exact(spec, operands, sizes), reference.run(spec, operands, sizes, dtype)
    assert got.dtype is getattr(torch, spec.out_dtype)
    assert got.shape == want.shape
    if not got.numel():
        return
    # finfo(float32).min is no float16: there the float64 reference says where NaN belongs.
    nan = (eager if dtype is torch.float32 else want).isnan()
    assert torch.equal(got.isnan(), nan), "NaN in other places than eager"
    finite = ~(want.isnan() | eager.isnan())
    if not finite.any():
        return
    allowed = (eager.double() - want)[finite].abs().max() + torch.finfo(got.dtype).eps * want[finite].abs().max()
    error = (got.double() - want)[finite].abs().max()
    assert error <= 2 * allowed, f"error {error:.2e}, eager's {allowed:.2e}"


def on_threads(run: Callable[[list[torch.Tensor], list[int]], torch.Tensor], *operands) -> list[torch.Tensor]:
    """The results of `run(*operands)` on 1, 2 and 5 threads."""
    threads, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(run(*operands))
    finally:
        torch.set_num_threads(threads)
    return outs
