"""Program behind `python <generated module>`: compare its kernel with the reference interpreter on random tensors."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from fusion.exactness import errors, widened
from fusion.ir.spec import AttentionSpec

from .. import reference
from ..reference.operands import Operands
from .launch import Kernel

_SMALL = {"Nq": 50, "Nk": 70}


def check_module(path: str, text: str, arguments: Sequence[str] | None = None) -> None:
    """Run the kernel of a spec (as JSON, line breaks allowed) in the interpreter, or on a GPU where there is one, and
    print its errors and eager's against float64. Sizes are taken from the command line (`Nq=128 B0=4`), by default
    small. Exits with 1 where the house rule is broken."""
    spec = AttentionSpec.from_json(text.replace("\n", ""))
    parser = argparse.ArgumentParser(prog=Path(path).name, description=f"Check the kernel of {spec}.")
    parser.add_argument("sizes", nargs="*", help=f"name=value of {', '.join(spec.sizes)}")
    given = dict(pair.split("=") for pair in parser.parse_args(arguments).sizes)
    sizes = [int(given.get(name, _SMALL.get(name, 2))) for name in spec.sizes]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = Operands(spec, dict(zip(spec.sizes, sizes, strict=True)), seed=0, largest=math.inf).tensors()
    operands = [tensor.to(device) for tensor in made]
    got = Kernel(spec)(operands, sizes).double()
    exact = reference.run(spec, list(map(widened, operands)), sizes, torch.float64)
    eager = reference.run(spec, operands, sizes, getattr(torch, spec.dtype)).double()
    what, regular = f"{device}, sizes {dict(zip(spec.sizes, sizes, strict=True))}", exact.isfinite() & eager.isfinite()
    if not regular.any():
        print(f"{what}: nothing finite to compare")
        return
    found = errors(got[regular], eager[regular], exact[regular], getattr(torch, spec.out_dtype))
    report(what, found.max_error, found.max_bound, found.share <= 1)


def report(what: str, error: float, allowed: float, holds: bool) -> None:
    """Print a comparison; exits with 1 where the rule does not hold."""
    print(f"{what}: error {error:.3g}, allowed {allowed:.3g}")
    if not holds:
        raise SystemExit(1)
