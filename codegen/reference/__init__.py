"""The reference interpreter: executes any `AttentionSpec` in plain torch, one obvious step after the other.

It is an emitter (`fusion.codegen.emitter`), the reference for tests of all others, and the fall-back where no other can
run. It materialises the score matrix; `backward`, by torch's own autograd through the same steps, does so for a block
of query rows at a time, so that memory stays linear in the number of queries.
"""

from __future__ import annotations

from .backward import backward
from .forward import run, run_all
from .kernels import ReferenceGradient, ReferenceKernel, compile, compile_training, reads, supports

__all__ = [
    "ReferenceGradient", "ReferenceKernel", "backward", "compile", "compile_training", "reads", "run", "run_all",
    "supports",
]  # fmt: skip
