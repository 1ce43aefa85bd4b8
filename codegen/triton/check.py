"""What `python <generated module>` does: compare its kernel with the reference interpreter on random tensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from fusion.codegen import reference
from fusion.codegen.triton.launch import Kernel
from fusion.exactness import errors
from fusion.ir.expr import C, E, Expr, I, J, coord, loads, walk
from fusion.ir.ops import evaluate
from fusion.ir.spec import AttentionSpec

_SMALL = {"Nq": 50, "Nk": 70}


def check_module(path: str, text: str, arguments: Sequence[str] | None = None) -> None:
    """Run the kernel of a spec (as JSON, line breaks allowed) in the interpreter, or on a GPU where there is one.

    Sizes are taken from the command line (`Nq=128 B0=4`), by default small. Prints the errors of the kernel and of the
    reference in the model's own dtype, both against float64; exits with 1 where the first is more than twice the second
    plus rounding.
    """
    spec = AttentionSpec.from_json(text.replace("\n", ""))
    parser = argparse.ArgumentParser(prog=Path(path).name, description=f"Check the kernel of {spec}.")
    parser.add_argument("sizes", nargs="*", help=f"name=value of {', '.join(spec.sizes)}")
    given = dict(pair.split("=") for pair in parser.parse_args(arguments).sizes)
    sizes = [int(given.get(name, _SMALL.get(name, 2))) for name in spec.sizes]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands = [tensor.to(device) for tensor in random_operands(spec, sizes)]
    got = Kernel(spec)(operands, sizes).double()
    exact = reference.run(spec, [o.double() if o.is_floating_point() else o for o in operands], sizes, torch.float64)
    eager = reference.run(spec, operands, sizes, getattr(torch, spec.dtype)).double()
    regular = exact.isfinite() & eager.isfinite()
    if not regular.any():
        print(f"{device}, sizes {dict(zip(spec.sizes, sizes, strict=True))}: nothing finite to compare")
        return
    found = errors(got[regular], eager[regular], exact[regular], getattr(torch, spec.out_dtype))
    told = f"error {found.max_error:.3g}, allowed {found.max_bound:.3g}"
    print(f"{device}, sizes {dict(zip(spec.sizes, sizes, strict=True))}: {told}")
    if not found.share <= 1:
        raise SystemExit(1)


def random_operands(spec: AttentionSpec, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors just large enough for the indices that the spec uses: normal floats, true booleans, integer zeros."""
    known = dict(zip(spec.sizes, sizes, strict=True))

    def value(expr: Expr) -> int:
        return int(evaluate(expr, lambda leaf: torch.tensor(known[leaf.name])))

    axes = {coord(f"b{n}"): value(extent) for n, extent in enumerate(spec.batch)}
    axes |= {I: value(spec.n_q), J: value(spec.n_k), C: value(spec.d), E: value(spec.d_v)}
    axes |= {coord(name): axes[I if name[0] == "i" else J] for name in ("i0", "i1", "j0", "j1")}
    extents = [[1] * operand.rank for operand in spec.operands]
    everything = [load for e in spec.expressions() for load in loads(e)]
    for operand, index in [(0, spec.q), (1, spec.k), (2, spec.v), *((p.operand, p.args) for p in everything)]:
        for dim, expr in enumerate(index):
            extents[operand][dim] = max(extents[operand][dim], _largest(expr, axes, known) + 1)
    made = []
    for operand, shape in zip(spec.operands, extents, strict=True):
        if operand.torch_dtype.is_floating_point:
            made.append(torch.randn(shape).to(operand.torch_dtype))
        else:
            made.append(
                torch.ones(shape, dtype=torch.bool)
                if operand.dtype == "bool"
                else torch.zeros(shape, dtype=operand.torch_dtype)
            )
    return made


def _largest(expr: Expr, axes: dict[Expr, int], known: dict[str, int]) -> int:
    """The largest value of an index; what is read from tensors of integers is zero."""
    used = [axis for axis in axes if any(part is axis for part in walk(expr))]
    grid = torch.meshgrid(*(torch.arange(axes[axis]) for axis in used), indexing="ij") if used else ()
    places = dict(zip(used, grid, strict=True))

    def leaf(part: Expr):
        if part.op == "load":
            return lambda *index: torch.zeros_like(index[0])
        return places[part] if part in places else torch.tensor(known[part.name])

    return int(evaluate(expr, leaf).max())


__all__ = ["check_module", "random_operands"]
