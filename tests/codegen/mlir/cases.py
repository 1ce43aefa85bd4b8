"""Specs for the tests of the CPU emitter: score programs by name, each with the tensors that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.codegen.cpu.training import TrainingKernel
from fusion.ir import AttentionSpec, Expr, Kind, MaskFacts, Normalizer, Operand, Output, integers
from fusion.ir.expr import ROW_MAX, ROW_SUM, SCORE, C, E, I, J, const, coord, load, size
from fusion.ir.ops import apply, where
from fusion.machine import Machine
from fusion.planning.register_tiles import Target, target_of
from tests import numerics

HERE = target_of(Machine.detect())
#: Code for AVX-512 runs only where it exists; the others run everywhere (LLVM splits vectors that are too wide).
TARGETS = {
    "best": HERE,
    "pairs": replace(HERE, amx=False, pairs="avx512_bf16" in Machine.detect().isa),
    "multiply-add": replace(HERE, amx=False, pairs=False),
    "avx2": Target(lanes=8, tile_rows=4, tile_groups=3),
    "generic": Target(lanes=4),
}

B, H, NQ, NK = map(size, ("B", "H", "Nq", "Nk"))
BATCH, HEAD, I0, I1 = map(coord, ("b0", "b1", "i0", "i1"))
INF, FMIN = math.inf, torch.finfo(torch.float32).min
Sizes = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A score program, twice: as an expression and as a model would write it.

    operands: the tensors that it reads, after V
    score: the expression of the scaled score of a head
    eager: the same in plain torch, from scores [B, H, Nq, Nk], positions i [Nq, 1] and j [Nk], and the tensors
    mask: what is known of the mask
    tensors: draws the tensors
    """

    operands: tuple[Operand, ...] = ()
    score: Callable[[Expr], Expr]
    eager: Callable[..., torch.Tensor]
    mask: MaskFacts | None = None
    tensors: Callable[[Sizes], list[torch.Tensor]] = lambda n: []


def tensor(name: str, rank: int, dtype: str = "float32") -> Operand:
    return Operand(dtype=dtype, rank=rank, name=name)


def read(*index: Expr, kind: Kind = Kind.FLOAT, operand: int = 3) -> Expr:
    return load(operand, index, kind)


def masked(s: torch.Tensor, live: torch.Tensor, fill: float) -> torch.Tensor:
    """Scores with a fill where they are not live; a finite fill is a number of their dtype."""
    return s.masked_fill(~live, fill if math.isinf(fill) else max(fill, torch.finfo(s.dtype).min))


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


def _biased(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return s + bias


def _bucketed(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    distance = (i - j).abs().clamp(max=7)
    return s + table[torch.where(i < j, distance + 8, distance)].permute(2, 0, 1)


def _same_document(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    return masked(s, (document[:, : len(i), None] == document[:, None, : len(j)])[:, None], FMIN)


def _function(name: str, *rest: float) -> Program:
    positive = name in ("log1p", "sqrt", "pow")
    function = getattr(torch, name)
    return Program(
        score=lambda s: apply(name, apply("abs", s) if positive else s, *map(const, rest)),
        eager=lambda s, i, j: function(s.abs() if positive else s, *rest),
    )


PROGRAMS = {
    "plain": Program(eager=lambda s, i, j: s, score=lambda s: s),
    "causal": Program(
        eager=lambda s, i, j: masked(s, j <= i, -INF),
        score=fill_where(CAUSAL, -INF), mask=MaskFacts(live=CAUSAL, key_hi=UP_TO_ROW, fill=-INF),
    ),
    "causal_last_key": Program(
        eager=lambda s, i, j: masked(s, j <= i + len(j) - len(i), FMIN),
        score=fill_where(ALIGNED, FMIN),
        mask=MaskFacts(live=ALIGNED, key_hi=integers.add(UP_TO_ROW, integers.sub(NK, NQ)), fill=FMIN),
    ),
    "window": Program(
        eager=lambda s, i, j: masked(s, (j <= i) & (i - j < 17), FMIN),
        score=fill_where(WINDOW, FMIN),
        mask=MaskFacts(live=WINDOW, key_lo=integers.sub(I0, 16), key_hi=UP_TO_ROW, fill=FMIN),
    ),
    "left_padded": Program(
        eager=lambda s, i, j, mask: masked(s, (j <= i) & mask[:, None, None], FMIN),
        operands=(tensor("mask", 2, "bool"),), score=fill_where(PADDED, FMIN), tensors=_left_padded,
        mask=MaskFacts(live=PADDED, key_hi=UP_TO_ROW, fill=FMIN),
    ),
    "left_padded_inf": Program(
        eager=lambda s, i, j, mask: masked(s, (j <= i) & mask[:, None, None], -INF),
        operands=(tensor("mask", 2, "bool"),), score=fill_where(PADDED, -INF), tensors=_left_padded,
        mask=MaskFacts(live=PADDED, key_hi=UP_TO_ROW, fill=-INF),
    ),
    "bias": Program(
        eager=_biased,
        operands=(tensor("bias", 3),), score=lambda s: apply("fadd", s, read(HEAD, I, J)),
        tensors=lambda n: [torch.randn(n["H"], n["Nq"], n["Nk"])],
    ),
    "transposed_bias": Program(
        eager=_biased,
        operands=(tensor("bias", 3),), score=lambda s: apply("fadd", s, read(HEAD, I, J)),
        tensors=lambda n: [torch.randn(n["H"], n["Nk"], n["Nq"]).transpose(1, 2)],
    ),
    "half_bias": Program(
        eager=_biased,
        operands=(tensor("bias", 2, "float16"),), score=lambda s: apply("fadd", s, read(I, J)),
        tensors=lambda n: [torch.randn(n["Nq"], n["Nk"]).half()],
    ),
    "brain_bias": Program(
        eager=_biased,
        operands=(tensor("bias", 3, "bfloat16"),), score=lambda s: apply("fadd", s, read(HEAD, I, J)),
        tensors=lambda n: [torch.randn(n["H"], n["Nq"], n["Nk"]).bfloat16()],
    ),
    "expanded_mask": Program(
        eager=_biased,
        operands=(tensor("mask", 4),), score=lambda s: apply("fadd", s, read(BATCH, const(0), I, J)),
        tensors=lambda n: [torch.where(torch.rand(n["B"], 1, 1, n["Nk"]) < 0.7, 0.0, FMIN).expand(-1, 1, n["Nq"], -1)],
    ),
    "bool_mask": Program(
        eager=lambda s, i, j, mask: masked(s, mask, -INF),
        operands=(tensor("mask", 4, "bool"),),
        score=lambda s: where(read(BATCH, const(0), I, J, kind=Kind.BOOL), s, const(-INF)),
        tensors=lambda n: [torch.rand(n["B"], 1, n["Nq"], n["Nk"]) < 0.8],
    ),
    "padding": Program(
        eager=lambda s, i, j, mask: masked(s, mask[:, None, None], FMIN),
        operands=(tensor("mask", 2, "bool"),), score=fill_where(read(BATCH, J, kind=Kind.BOOL), FMIN),
        tensors=lambda n: [torch.rand(n["B"], n["Nk"]) < 0.6],
    ),
    "alibi": Program(
        eager=lambda s, i, j, slope: masked(s + slope[:, None, None] * (j - i), j <= i, -INF),
        operands=(tensor("slope", 1),), mask=MaskFacts(live=CAUSAL, key_hi=UP_TO_ROW, fill=-INF),
        score=lambda s: where(
            CAUSAL, apply("fadd", s, apply("fmul", read(HEAD), apply("to_float", integers.sub(J, I)))), const(-INF)
        ),
        tensors=lambda n: [2.0 ** -torch.arange(1.0, n["H"] + 1)],
    ),
    "soft_cap": Program(
        eager=lambda s, i, j: torch.tanh(s / 20.0) * 20.0,
        score=lambda s: apply("fmul", apply("tanh", apply("div", s, const(20.0))), const(20.0)),
    ),
    "bucket_table": Program(
        eager=_bucketed,
        operands=(tensor("table", 2),), score=lambda s: apply("fadd", s, read(BUCKET, HEAD)),
        tensors=lambda n: [torch.randn(16, n["H"])],
    ),
    "documents": Program(
        eager=_same_document,
        operands=(tensor("document", 2, "int64"),), tensors=_documents,
        score=lambda s: where(
            apply("ieq", read(BATCH, I, kind=Kind.INT), read(BATCH, J, kind=Kind.INT)), s, const(FMIN)
        ),
    ),
    "integer_bias": Program(
        eager=lambda s, i, j, bias: s + 0.1 * bias.to(s.dtype),
        operands=(tensor("bias", 2, "int32"),), tensors=lambda n: [torch.randint(-9, 9, (n["Nq"], n["Nk"])).int()],
        score=lambda s: apply("fadd", s, apply("fmul", const(0.1), apply("to_float", read(I, J, kind=Kind.INT)))),
    ),
    "byte_bias": Program(
        eager=lambda s, i, j, bias: s + 0.01 * bias.to(s.dtype),
        operands=(tensor("bias", 1, "uint8"),), tensors=lambda n: [torch.randint(0, 256, (n["Nk"],),
        dtype=torch.uint8)], score=lambda s: apply("fadd", s, apply("fmul", const(0.01), apply("to_float", read(J,
        kind=Kind.INT)))),
    ),
    "every_third": Program(
        eager=lambda s, i, j: torch.where((i + j) % 3 == 0, s, s - 1.0),
        score=lambda s: where(
            apply("ieq", integers.mod(integers.add(I, J), 3), const(0)), s, apply("fadd", s, const(-1.0))
        )
    ),
    "chunks": Program(
        eager=lambda s, i, j: masked(s, i // 16 == j // 16, FMIN),
        score=fill_where(apply("ieq", integers.floordiv(I, 16), integers.floordiv(J, 16)), FMIN),
    ),
    "dilated": Program(
        eager=lambda s, i, j, live: masked(s, live[i - j + len(j)], -INF),
        operands=(tensor("live", 1, "bool"),),
        score=fill_where(read(integers.add(integers.sub(I, J), NK), kind=Kind.BOOL), -INF),
        tensors=lambda n: [torch.rand(n["Nq"] + n["Nk"]) < 0.5],
    ),
    "far_below": Program(
        eager=lambda s, i, j: (s - 2000).masked_fill(j > i, -1500),
        score=lambda s: where(CAUSAL, apply("fadd", s, const(-2000.0)), const(-1500.0)),
    ),
    "temperature": Program(
        eager=lambda s, i, j, t: s * t.exp()[:, None, None],
        operands=(tensor("t", 1),), score=lambda s: apply("fmul", s, apply("exp", read(HEAD))),
        tensors=lambda n: [torch.randn(n["H"])],
    ),
    "row_gate": Program(
        eager=lambda s, i, j, gate: s * gate.tanh()[:, None, :, None],
        operands=(tensor("gate", 2),), score=lambda s: apply("fmul", s, apply("tanh", read(BATCH, I))),
        tensors=lambda n: [torch.randn(n["B"], n["Nq"])],
    ),
    "clamp": Program(
        eager=lambda s, i, j: s.clamp(-0.5, 0.5),
        score=lambda s: apply("maximum", apply("minimum", s, const(0.5)), const(-0.5)),
    ),
    "cosine": _function("cos"),
    "sine": _function("sin"),
    "exponential": Program(
        eager=lambda s, i, j: s.clamp(max=1.0).exp(),
        score=lambda s: apply("exp", apply("minimum", s, const(1.0))),
    ),
    "sigmoid": _function("sigmoid"),
    "log1p": _function("log1p"),
    "expm1": Program(
        eager=lambda s, i, j: s.clamp(max=1.0).expm1(),
        score=lambda s: apply("expm1", apply("minimum", s, const(1.0))),
    ),
    "erf": _function("erf"),
    "atan": _function("atan"),
    "sqrt": _function("sqrt"),
    "power": _function("pow", 1.5),
    "floor": _function("floor"),
    "round": _function("round"),
    "reciprocal_root": Program(
        eager=lambda s, i, j: (s.abs() + 1.0).rsqrt(),
        score=lambda s: apply("rsqrt", apply("fadd", apply("abs", s), const(1.0))),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A spec, what it means in plain torch, and how to draw its operands."""

    spec: AttentionSpec
    program: Program
    group: int
    weight: bool
    sinks: bool
    off_by_one: bool
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
    return Case(
        spec=spec, program=program, group=group, weight=weight, sinks=sinks, off_by_one=off_by_one,
        extras=tuple(extras),
    )  # fmt: skip


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


def eager(c: Case, operands: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The attention of a case as a model would write it, in the dtype of Q, K and V as the spec has it or in another,
    to which all tensors are converted. Laid out as the spec says."""
    spec = c.spec
    q, k, v = (x.to(dtype or getattr(torch, spec.dtype)) for x in operands[:3])
    rest = iter(x if _keeps_dtype(x, dtype) else x.to(q.dtype) for x in operands[3:])
    own = [next(rest) for _ in c.program.operands]
    k, v = (x.repeat_interleave(c.group, 1) for x in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    s = c.program.eager(q @ k.mT * q.shape[-1] ** -0.5, i, j, *own).expand(*q.shape[:3], k.shape[2])
    weight = next(rest) if c.weight else None
    w = s if spec.normalizer is Normalizer.NONE else _normalized(c, s, next(rest) if c.sinks else None)
    out = (w if weight is None else w * weight).to(v.dtype) @ v
    names, order = ("b0", "b1", "i", "e"), spec.output.order
    out = out.to(dtype or getattr(torch, spec.out_dtype)).permute([names.index(name) for name in order]).contiguous()
    return out.permute([order.index(name) for name in names])


def _keeps_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Numbers in float8 take part in no operation; others are converted where a dtype is asked for."""
    return not x.is_floating_point() or (dtype is None and x.dtype.itemsize > 1)


def _normalized(c: Case, s: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """The weights of scores [B, H, Nq, Nk]."""
    n_k = s.shape[-1]
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)], -1)
    if c.off_by_one and s.shape[-1]:
        m = s.amax(-1, keepdim=True)
        e = torch.exp(s - m)
        return (e / (e.sum(-1, keepdim=True) + torch.exp(-m)))[..., :n_k]
    safe = c.spec.normalizer is Normalizer.SAFE_SOFTMAX
    w = (torch.ops.aten._safe_softmax(s, -1) if safe else torch.softmax(s, -1))[..., :n_k]
    return w.nan_to_num() if c.spec.normalizer is Normalizer.ZERO_SOFTMAX else w


def assert_as_exact_as_eager(got: torch.Tensor, c: Case, operands: list[torch.Tensor]) -> None:
    """The house rule for the output of a case, layout included."""
    theirs, exact = eager(c, operands), eager(c, operands, torch.float64)
    numerics.assert_as_exact_as_eager(got, theirs, exact, getattr(torch, c.spec.dtype), check_strides=True)


def assert_calls_as_exact_as_eager(
    got: Sequence[torch.Tensor], c: Case, operands: Sequence[list[torch.Tensor]]
) -> None:
    """The house rule for the outputs of several calls together, each call's layout included."""
    theirs, exact = ([eager(c, given, dtype) for given in operands] for dtype in (None, torch.float64))
    for ours, eagers in zip(got, theirs, strict=True):
        numerics.assert_same_kind("output", ours, eagers, dtype=True, strides=True)
    numerics.assert_as_exact_as_eager(*map(torch.stack, (got, theirs, exact)), getattr(torch, c.spec.dtype))


def eager_gradients(
    c: Case, operands: list[torch.Tensor], grad: torch.Tensor, needs: Sequence[bool], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What autograd makes of `eager`: the gradients of the operands that `needs` marks, in order."""
    given = [
        (x.to(dtype) if dtype and x.is_floating_point() else x).detach().requires_grad_(needed)
        for x, needed in zip(operands, needs, strict=True)
    ]
    out = eager(c, given, dtype)
    return list(torch.autograd.grad(out, [x for x in given if x.requires_grad], grad.to(out.dtype)))


def assert_gradients_as_exact_as_eager(
    got: Sequence[torch.Tensor], c: Case, operands: list[torch.Tensor], grad: torch.Tensor, needs: Sequence[bool]
) -> None:
    """The house rule for the gradients of the operands that `needs` marks."""
    found = beside_eager(got, c, operands, grad, needs)
    numerics.assert_as_exact_as_eager(*found, getattr(torch, c.spec.dtype), name="gradient", check_dtype=False)


def beside_eager(
    got: Sequence[torch.Tensor], c: Case, operands: list[torch.Tensor], grad: torch.Tensor, needs: Sequence[bool]
) -> tuple[dict[str, torch.Tensor], ...]:
    """The gradients of the operands that `needs` marks, eager's, and those in float64, by the operands' names."""
    theirs, exact = (eager_gradients(c, operands, grad, needs, dtype) for dtype in (None, torch.float64))
    names = [operand.name for operand, needed in zip(c.spec.operands, needs, strict=True) if needed]
    return tuple(dict(zip(names, gradients, strict=True)) for gradients in (got, theirs, exact))


def assert_trains_as_exact_as_eager(run: TrainingKernel, c: Case, extents: Sizes) -> None:
    """The house rule for the output of a case and the gradients of all its operands, on drawn tensors."""
    operands, sizes = draw(c, extents)
    out, statistics = run.outputs(operands, sizes)
    assert_as_exact_as_eager(out, c, operands)
    grad, needs = torch.randn_like(out), (True,) * len(operands)
    found = run.backward(grad, out, statistics, operands, sizes, needs)
    assert_gradients_as_exact_as_eager(found, c, operands, grad, needs)


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
