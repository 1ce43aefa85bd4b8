"""The text of every Triton kernel over a grid of attentions, as one line each: name, number of lines, hash.

    python -m tests.codegen.triton.kernel_texts > before.txt
    ... change an emitter ...
    python -m tests.codegen.triton.kernel_texts > after.txt
    diff before.txt after.txt

Where code has only moved, the two are equal. Nothing is compiled. Those of CPU kernels are kept in a file:
`tests/codegen/mlir/kernel_texts.py`. `--only WORD` writes the lines that contain the word, `--texts FOLDER` the texts
themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.common import rows as variants
from fusion.codegen.triton import module
from fusion.codegen.triton.backward import backward_kernels
from fusion.codegen.triton.dtypes import FLOAT8
from fusion.codegen.triton.features import features_module
from fusion.codegen.triton.gradients import unsupported_gradient
from fusion.codegen.triton.key_loop import Order
from fusion.codegen.triton.launch import forward_kernels, split_kernels
from fusion.ir import AttentionSpec, Normalizer
from tests.codegen.mlir.cases import PROGRAMS, case

ORDERS = {
    "": Order(),
    "rotated": Order(rotated=True),
    "described": Order(described=True),
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
            yield f"row {name} {str(dtype)[6:]}", variants.traced(row, dtype)


def needs_of(spec: AttentionSpec) -> tuple[bool, ...]:
    """All gradients that there can be."""
    return tuple(o.torch_dtype.is_floating_point and o.dtype not in FLOAT8 for o in spec.operands)


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
    for d, d_v, degree in ((16, 16, 3), (3, 40, 2), (32, 64, 2)):
        yield f"triton features {d} {d_v} {degree}", features_module(d, d_v, degree)


def texts(only: str = "") -> Iterator[Text]:
    """(name, text) of every kernel of the grid whose name contains `only`."""
    yield from ((name, text) for name, text in approximate_texts() if only in name)
    for name, spec in specs():
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
