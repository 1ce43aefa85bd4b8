"""The text of every kernel over a grid of attentions, as one line each: name, number of lines, hash.

    python benchmarks/kernel_texts.py > before.txt
    ... change an emitter ...
    python benchmarks/kernel_texts.py > after.txt
    diff before.txt after.txt

Where code has only moved, the two are equal. Texts are written for instruction sets that this machine may lack; nothing
is compiled. `--only WORD` writes the lines that contain the word, `--texts FOLDER` the texts themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import rows as variants
from fusion.codegen.mlir.backward.delta import DeltaErrorKernel, DeltaKernel
from fusion.codegen.mlir.backward.fused import FusedKernel
from fusion.codegen.mlir.backward.keys import KeysKernel
from fusion.codegen.mlir.backward.plan import backward_plan
from fusion.codegen.mlir.backward.plan import unsupported as without_backward
from fusion.codegen.mlir.backward.queries import QueriesKernel
from fusion.codegen.mlir.backward.tile import Problem
from fusion.codegen.mlir.features import FeatureShape, Readout, State
from fusion.codegen.mlir.kernel import emit
from fusion.codegen.mlir.key_block_bounds import KeyBlockBounds
from fusion.codegen.mlir.moments import Moments
from fusion.codegen.mlir.row_kernel import emit_rows
from fusion.codegen.mlir.sparse_kernel import emit_sparse
from fusion.codegen.mlir.strategy import tilings_for
from fusion.codegen.mlir.training import backward_tiling
from fusion.codegen.reference.polynomial import monomials
from fusion.codegen.triton import module
from fusion.codegen.triton.backward import backward_kernels
from fusion.codegen.triton.dtypes import FLOAT8
from fusion.codegen.triton.features import features_module
from fusion.codegen.triton.gradients import unsupported_gradient
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import forward_kernels, split_kernels
from fusion.codegen.triton.sparse_kernel import sparse_module
from fusion.ir import AttentionSpec, Normalizer
from fusion.planning.register_tiles import Target
from tracing import traced

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.codegen.mlir.cases import PROGRAMS, case

TARGETS = {
    "neon": Target(lanes=4, tile_rows=4, tile_groups=4),
    "avx2": Target(lanes=8, tile_rows=4, tile_groups=3),
    "avx512": Target(lanes=16, avx512=True, tile_rows=8, tile_groups=3),
    "pairs": Target(lanes=16, avx512=True, pairs=True, tile_rows=8, tile_groups=3),
    "amx": Target(lanes=16, avx512=True, amx=True, tile_rows=8, tile_groups=3, near_bytes=48 * 1024),
}
SELECTIVE = [
    f"{name} {dtype}" for name in ("row full", "row causal", "row window") for dtype in ("float32", "bfloat16")
]
ORDERS = {
    "": Order(),
    "rotated": Order(rotated=True),
    "described": Order(described=True),
    "persistent": Order(persistent=True),
    "shared": Order(shared=True),
}
Text = tuple[str, str]


def specs() -> Iterator[tuple[str, AttentionSpec]]:
    """Attentions by name: each score program, some of them in other dtypes and with other normalisers, and the
    variants that benchmarks measure."""
    for name in PROGRAMS:
        yield f"{name} float32", case(name).spec
    for name in ("plain", "causal", "left_padded", "bias", "alibi", "soft_cap", "bucket_table", "documents"):
        for dtype in ("bfloat16", "float16"):
            yield f"{name} {dtype}", case(name, dtype).spec
    yield "causal 40 24 grouped", case("causal", "float32", 40, 24, group=2, order=("b0", "i", "b1", "e")).spec
    for name in ("causal", "left_padded_inf", "window"):
        for normalizer in (Normalizer.NONE, Normalizer.SAFE_SOFTMAX):
            yield f"{name} {normalizer.name}", case(name, normalizer=normalizer).spec
        for dtype in ("float32", "bfloat16"):
            yield f"{name} weight {dtype}", case(name, dtype, weight=True).spec
            yield f"{name} sinks {dtype}", case(name, dtype, sinks=True).spec
            yield f"{name} off_by_one {dtype}", case(name, dtype, off_by_one=True).spec
    for name, row in variants.GPU_ROWS.items():
        for dtype in (torch.float32, torch.bfloat16):
            yield f"row {name} {str(dtype)[6:]}", traced(row, dtype)


def needs_of(spec: AttentionSpec) -> tuple[bool, ...]:
    """All gradients that there can be."""
    return tuple(o.torch_dtype.is_floating_point and o.dtype not in FLOAT8 for o in spec.operands)


def mlir_texts(name: str, spec: AttentionSpec, target: Target) -> Iterator[Text]:
    """Forward, row by row, training and backward of a spec."""
    d, d_v = int(spec.d.attr), int(spec.d_v.attr)  # type: ignore[arg-type]
    yield "rows", emit_rows(spec, target, d, d_v).source
    wanted = (3, 2) if name.startswith("row ") else (3,)
    tilings = {tiling: None for planes in wanted for tiling in tilings_for(spec, target, planes)}
    for tiling in tilings:
        if (target.amx or target.pairs) and not tiling.planes:  # the text of AVX-512
            continue
        of = f"planes {tiling.planes}"
        yield f"forward, {of}", emit(spec, tiling, target, d, d_v).source
        if name in SELECTIVE:
            yield f"selective, {of}", emit_sparse(spec, tiling, target, d, d_v).source
        if without_backward(spec) is not None:
            continue
        yield f"statistics, {of}", emit(spec, tiling, target, d, d_v, with_statistics=True).source
        yield from backward_texts(of, spec, Problem(
            spec=spec, plan=backward_plan(spec), tiling=backward_tiling(tiling, target), target=target, d=d, d_v=d_v,
        ))  # fmt: skip


def backward_texts(of: str, spec: AttentionSpec, problem: Problem) -> Iterator[Text]:
    """The kernels for all gradients."""
    needs = needs_of(spec)
    yield f"dq, {of}", QueriesKernel(problem, needs).text().source
    yield f"dk dv, {of}", KeysKernel(problem, needs).text().source
    if spec.normalizer is not Normalizer.NONE:
        for name, kind in (("deltas", DeltaKernel), ("settling", DeltaErrorKernel)):
            yield f"{name}, {of}", kind(problem, (False,) * len(needs)).text().source
    yield f"fused, {of}", FusedKernel(problem, needs).text().source


def triton_texts(spec: AttentionSpec) -> Iterator[Text]:
    """Modules of a spec: forward in its orders, split, backward."""
    d, d_v = int(spec.d.attr), int(spec.d_v.attr)  # type: ignore[arg-type]
    for name, order in ORDERS.items():
        for statistics in (False, True) if not name else (False,):
            kernels = forward_kernels(spec, d, d_v, statistics, order)
            yield f"forward {name}{' statistics' * statistics}", module.module_text(spec, kernels, d, d_v)
    yield "split", module.module_text(spec, split_kernels(spec, d, d_v, False), d, d_v)
    if unsupported_gradient(spec, needs_of(spec)) is None:
        for described in (False, True):
            kernels = backward_kernels(spec, d, d_v, needs_of(spec), described)
            yield f"backward{' described' * described}", module.module_text(spec, kernels, d, d_v)


def approximate_texts() -> Iterator[Text]:
    """Kernels of approximate attention."""
    for d, d_v, degree, planes in ((16, 16, 3, 1), (16, 16, 3, 2), (3, 40, 2, 1), (32, 64, 2, 2)):
        shape, name = (
            FeatureShape(d=d, d_v=d_v, low=monomials(d, degree).below_top, planes=planes),
            f"{d} {d_v} {degree}",
        )
        yield f"mlir amx state {name} planes {planes}", State(shape).text()
        yield f"mlir amx readout {name} planes {planes}", Readout(shape).text()
        yield f"triton features {name}", features_module(d, d_v, degree)
        yield f"triton sparse {d} {d_v}", sparse_module(d, d_v)
    for d in (16, 40, 64, 100):
        for scalar in ("f32", "bf16", "f16"):
            yield f"mlir avx512 moments {d} {scalar}", Moments(d, scalar).text()
            yield f"mlir avx512 key blocks {d} {scalar}", KeyBlockBounds(d, scalar, 64).text()


def texts(only: str = "") -> Iterator[Text]:
    """(name, text) of every kernel of the grid whose name contains `only`."""
    yield from ((name, text) for name, text in approximate_texts() if only in name)
    for name, spec in specs():
        for target_name, target in TARGETS.items():
            if only in f"mlir {target_name} {name}":
                for kind, text in mlir_texts(name, spec, target):
                    yield f"mlir {target_name} {name}, {kind}", text
        if only in f"triton {name}":
            for kind, text in triton_texts(spec):
                yield f"triton {name}, {kind}", text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--texts", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    lines = []
    for name, text in texts(options.only):
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        lines.append(f"{name}: {len(text.splitlines())} lines, {digest}")
        if options.texts is not None:
            options.texts.mkdir(parents=True, exist_ok=True)
            (options.texts / f"{name.replace(' ', '_').replace(',', '')}.txt").write_text(text)
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
