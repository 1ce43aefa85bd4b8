"""The text of every kind of CPU kernel over attentions and instruction sets, as hashes: `kernel_texts.txt`.

    python -m tests.codegen.mlir.kernel_texts                   renews the file, after a change of what is emitted
    python -m tests.codegen.mlir.kernel_texts --texts FOLDER    writes the texts themselves, to be compared with `diff`

A line of the file is a group of texts: those of one kind of kernel for one instruction set, and those of one attention.
So a change says which kernels changed, and of which attentions. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fusion.codegen.cpu.training import backward_tiling
from fusion.codegen.mlir.approximate.features import FeatureShape, Readout, State
from fusion.codegen.mlir.approximate.moments import Moments
from fusion.codegen.mlir.backward.delta import DELTA_ERRORS, DELTAS
from fusion.codegen.mlir.backward.kernel import BackwardKernel
from fusion.codegen.mlir.backward.lanes import AUX_SUMS, FUSED, KEYS, QUERIES
from fusion.codegen.mlir.backward.tile import Problem
from fusion.codegen.mlir.kernel import emit
from fusion.codegen.reference.polynomial import monomials
from fusion.ir import AttentionSpec, Expr, Kind, Normalizer, Operand, integers
from fusion.ir.expr import HEAD as MIXED_HEAD
from fusion.ir.expr import ROW_MAX, ROW_SUM, WEIGHT, C, E, I, J, const, load
from fusion.ir.ops import apply, where
from fusion.ir.spec import AuxOutput, Mixing, Reduction
from fusion.ir.tile_map import lookup
from fusion.lowering import aux_gradients
from fusion.lowering.backward_plan import backward_plan, unsupported
from fusion.passes.specify.masks import understand
from fusion.planning.register_tiles import AllHeads, ByRows, Target, planes_of, tilings_for
from tests import emulation
from tests.codegen.mlir.cases import BATCH, HEAD, NK, PROGRAMS, case, fill_where, read, tensor

TARGETS = {
    "neon": Target(lanes=4, tile_rows=4, tile_groups=4), "avx2": emulation.AVX2, "avx512": emulation.AVX512,
    "pairs": emulation.PAIRS, "amx": emulation.AMX, "arm pairs": emulation.ARM_PAIRS,
    "amx of float16": emulation.AMX_FP16,
}  # fmt: skip
HASHES = Path(__file__).with_suffix(".txt")
WHOLE = ("plain", "causal bfloat16", "left_padded", "bias bfloat16", "bucket_table float16", "dropout",
         "pages bfloat16")  # fmt: skip
"""Attentions whose every kernel is written, for all instruction sets; of the others three kernels, for three sets."""
SAMPLED = ("avx2", "amx", "amx of float16")
Text = tuple[str, str]
"""Its kind and the text."""


def specs() -> Iterator[tuple[str, AttentionSpec]]:
    """Attentions by name."""
    for name in PROGRAMS:
        yield name, understood(case(name, d=40, d_v=24).spec)
    names = ("plain", "causal", "window", "left_padded", "bias", "brain_bias", "bool_mask", "alibi", "bucket_table")
    for name in names:
        yield f"{name} bfloat16", understood(case(name, "bfloat16", group=2).spec)
        yield f"{name} float16", understood(case(name, "float16", 16, 48).spec)
    for name, dtype in (("causal", "float32"), ("left_padded_inf", "bfloat16")):
        for normalizer in (Normalizer.NONE, Normalizer.SAFE_SOFTMAX, Normalizer.ZERO_SOFTMAX):
            yield f"{name} {normalizer.value}", case(name, dtype, normalizer=normalizer).spec
        for how in ("weight", "sinks", "off_by_one"):
            yield f"{name} {how}", case(name, dtype, 24, **{how: True}).spec
    wide = case("causal", "bfloat16", 160, 128, order=("b0", "i", "b1", "e"), out_dtype="float32").spec
    yield "wide", wide
    yield "auxiliary outputs", replace(case("left_padded", "bfloat16").spec, aux_outputs=auxiliary_outputs())
    yield "auxiliary sums", replace(case("causal").spec, aux_outputs=auxiliary_outputs()[2:])
    yield from more_specs()


def understood(spec: AttentionSpec) -> AttentionSpec:
    """The spec with all that is known of its mask."""
    return replace(spec, mask=understand(spec.score, spec.normalizer) or spec.mask)


def auxiliary_outputs() -> tuple[AuxOutput, ...]:
    """Weights, reductions over keys and queries, statistics of rows."""
    infinite = apply("feq", apply("abs", ROW_MAX), const(math.inf))
    log_sum = where(infinite, ROW_MAX, apply("fadd", ROW_MAX, apply("log", ROW_SUM)))
    square = apply("fmul", WEIGHT, WEIGHT)
    reduced = ((WEIGHT, "i", "j", Reduction.MAX), (square, "i", "j", Reduction.SUM), (square, "j", "i", Reduction.SUM))
    return (
        AuxOutput(value=WEIGHT, dims=("i", "b0", "b1", "j"), dtype="bfloat16"),
        *(AuxOutput(value=value, dims=("b1", "b0", left), dtype="float32", reduction=how, over=over)
          for value, left, over, how in reduced),
        AuxOutput(value=log_sum, dims=("b0", "b1", "i"), dtype="float32"),
    )  # fmt: skip


def more_specs() -> Iterator[tuple[str, AttentionSpec]]:
    """Dropout, caches in pages and in integers, maps of tiles, tables by distance, mixed heads."""
    plain = case("plain", "bfloat16").spec
    drawn = apply("hash", load(3, (), Kind.INT), integers.add(integers.mul(I, NK), J))
    weight = where(apply("ilt", drawn, const(1 << 30)), const(2.0), const(0.0))
    yield "dropout", replace(plain, operands=(*plain.operands, tensor("seed", 0, "int64")), weight=weight)
    for dtype in ("float32", "bfloat16"):
        c = case("left_padded_inf", dtype, group=4)
        table = load(4, (BATCH, integers.floordiv(J, 16)), Kind.INT)
        k, v = ((table, integers.mod(J, 16), index[1], column) for index, column in ((c.spec.k, C), (c.spec.v, E)))
        operands = (*c.spec.operands, tensor("table", 2, "int64"))
        yield f"pages {dtype}", replace(c.spec, k=k, v=v, operands=operands)
    yield "integers", in_integers(plain, "int8", lambda n, index: load(n, index, Kind.INT))
    yield "packed integers", in_integers(case("plain", group=2).spec, "uint8", four_bits)
    float8 = [replace(o, dtype="float8_e4m3fn") for o in plain.operands[1:3]]
    yield "float8", replace(plain, operands=(plain.operands[0], *float8))
    padded = case("left_padded").spec
    live, mixed = lookup(4, (BATCH,), True)
    mask = understand(padded.score, padded.normalizer)
    assert mask is not None
    yield "tile map", replace(
        padded, operands=(*padded.operands, tensor("tiles", 4, "int32")),
        mask=replace(mask, tile_live=live, tile_mixed=mixed),
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        relative = case("causal", dtype).spec
        bias = read(HEAD, integers.add(integers.sub(I, J), NK))
        operands, score = (*relative.operands, tensor("bias", 2)), apply("fadd", relative.score, bias)
        yield f"relative positions {dtype}", replace(relative, operands=operands, score=score)
        yield f"mixed heads {dtype}", mixed_heads(dtype)
    scores_alone = mixed_heads("bfloat16").mixing
    assert scores_alone is not None
    scores_alone = replace(scores_alone, weights=None, own_score=True)
    yield "mixed scores", replace(mixed_heads("bfloat16"), mixing=scores_alone)


def four_bits(number: int, index: tuple[Expr, ...]) -> Expr:
    """An integer of which two lie in a byte, beside each other in the last dimension."""
    *rest, column = index
    byte = load(number, (*rest, integers.floordiv(column, 2)), Kind.INT)
    high = apply("ieq", integers.mod(column, 2), const(1))
    return apply("iwhere", high, integers.floordiv(byte, 16), integers.mod(byte, 16))


def in_integers(spec: AttentionSpec, dtype: str, element) -> AttentionSpec:
    """K and V of `element(operand, index)`, times a scale for each row."""
    k, v = (
        apply("fmul", apply("to_float", element(n, index)), read(*index[:-1], operand=2 + n))
        for n, index in ((1, spec.k), (2, spec.v))
    )
    stored = [Operand(dtype=dtype, rank=4, name=name) for name in "kv"]
    scales = [tensor(f"{name}_scale", 3) for name in "kv"]
    return replace(spec, operands=(spec.operands[0], *stored, *scales), k_value=k, v_value=v)


def mixed_heads(dtype: str) -> AttentionSpec:
    """Scores and weights of five heads mixed, with what is added to them, and a mask."""
    c = case("padding", dtype, 24)
    matrices = [read(HEAD, MIXED_HEAD, operand=n) for n in (4, 5)]
    mixing = Mixing(
        head=HEAD, scores=matrices[0], weights=matrices[1], weighted=apply("fadd", WEIGHT, read(HEAD, operand=6))
    )
    operands = (*c.spec.operands, tensor("pre", 2), tensor("post", 2), tensor("bias", 1))
    live = fill_where(read(BATCH, J, kind=Kind.BOOL), -math.inf)
    score = live(apply("fadd", c.spec.score.args[1], read(HEAD, operand=6)))
    return replace(c.spec, batch=(c.spec.batch[0], integers.integer(5)), operands=operands, score=score, mixing=mixing)


def texts_of(name: str, spec: AttentionSpec, target: Target) -> Iterator[Text]:
    """The kernels of a spec."""
    d, d_v = spec.d.integer, spec.d_v.integer
    if spec.mixing is not None:
        yield "mixed heads", emit(spec, AllHeads(), target, d, d_v).source
        return
    whole = bool(name in WHOLE or spec.aux_outputs)
    if not spec.aux_outputs:
        for count in (1, 4) if whole else (4,):
            yield "rows", emit(spec, ByRows(rows_at_once=count), target, d, d_v).source
    tilings = tilings_for(spec, target)
    for tiling in tilings if whole else tilings[:1]:
        if not spec.aux_outputs:
            yield "forward", emit(spec, tiling, target, d, d_v).source
        if whole and not spec.aux_outputs:
            yield "forward in parts", emit(spec, replace(tiling, cut=True), target, d, d_v).source
        if unsupported(spec) is None:
            if whole:
                yield "training forward", emit(spec, tiling, target, d, d_v, with_statistics=True).source
            plan = backward_plan(spec)
            yield from backward_texts(Problem(
                spec=spec, plan=plan, tiling=backward_tiling(tiling, target), target=target, d=d, d_v=d_v,
            ), whole)  # fmt: skip


def backward_texts(problem: Problem, whole: bool) -> Iterator[Text]:
    """The kernels of all gradients, or one of them with all in it."""
    spec = problem.spec
    needs = tuple(o.torch_dtype.is_floating_point and o.dtype[:6] != "float8" for o in spec.operands)
    if any(value is not None for value in spec.values) or aux_gradients.unsupported(spec, needs) is not None:
        return
    yield "backward fused", BackwardKernel(FUSED, problem, needs).text().source
    if not whole:
        return
    few = replace(problem, tiling=replace(problem.tiling, chain=16))
    for one in (problem, few):
        yield "backward queries", BackwardKernel(QUERIES, one, needs).text().source
        yield "backward keys", BackwardKernel(KEYS, one, needs).text().source
    yield "backward keys", BackwardKernel(KEYS, problem, (False, True, False, *needs[3:])).text().source
    if problem.plan.at_weight is not None:
        yield "backward queries", BackwardKernel(AUX_SUMS, problem, needs).text().source
    if spec.normalizer is not Normalizer.NONE:
        for kind in (DELTAS, DELTA_ERRORS):
            yield "backward delta", BackwardKernel(kind, problem, (False,) * len(needs)).text().source


def approximate_texts() -> Iterator[tuple[str, str, str]]:
    """Instruction set, kind and text of the kernels of approximate attention."""
    for d, d_v, degree, planes in ((16, 16, 3, 1), (16, 16, 3, 2), (3, 40, 2, 1), (32, 64, 2, 2)):
        shape = FeatureShape(d=d, d_v=d_v, low=monomials(d, degree).below_top, planes=planes)
        yield from (("amx", "polynomial", kind(shape).text().source) for kind in (State, Readout))
    for d in (16, 40, 100):
        for scalar in ("f32", "bf16", "f16"):
            yield "avx512", "moments", Moments(d, scalar).text().source


def texts() -> Iterator[tuple[str, str, str, str]]:
    """Attention, instruction set, kind and text of every kernel."""
    yield from (("approximate", *text) for text in approximate_texts())
    for name, spec in specs():
        for target_name, target in TARGETS.items():
            if target.float16 and planes_of(spec, target) == planes_of(spec, emulation.AMX):
                continue  # with the same kernels
            if name in WHOLE or spec.aux_outputs or spec.mixing or target_name in SAMPLED:
                yield from ((name, target_name, *text) for text in texts_of(name, spec, target))


def hashes() -> str:
    """A line for each kind of kernel and instruction set, and for each attention."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, target, kind, text in texts():
        for group in (f"{kind}, {target}", f"attention {name}"):
            groups[group].append(text)
    return "".join(
        f"{group}: {len(members)} texts, {sum(text.count(chr(10)) for text in members)} lines, "
        f"{hashlib.sha256(chr(0).join(members).encode()).hexdigest()[:16]}\n"
        for group, members in sorted(groups.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, metavar="FOLDER")
    if (folder := parser.parse_args().texts) is None:
        HASHES.write_text(hashes())
        return
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, target, kind, text) in enumerate(texts()):
        (folder / f"{number:04d} {name}, {target}, {kind}.mlir").write_text(text)


if __name__ == "__main__":
    main()
