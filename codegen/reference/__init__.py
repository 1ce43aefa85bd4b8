"""The reference interpreter: executes any `AttentionSpec` in plain torch, one obvious step after the other.

    run(spec, operands, sizes)                          the attention
    run_all(spec, operands, sizes)                      the same, and its further outputs
    backward(spec, grad, operands, sizes, needs)        gradients, by torch's own autograd through the same steps
    supports, reads, compile, compile_training          the same as an emitter (see `fusion.codegen.emitter`)

It is what every emitter is tested against, and what runs where no emitter can. It materialises the score matrix; its
backward does so for a block of query rows at a time, so that memory stays linear in the number of queries.
"""

from __future__ import annotations

from fusion.codegen.reference.backward import backward
from fusion.codegen.reference.forward import run, run_all
from fusion.codegen.reference.kernels import (
    ReferenceGradient,
    ReferenceKernel,
    compile,
    compile_training,
    reads,
    supports,
)

__all__ = [
    "ReferenceGradient", "ReferenceKernel", "backward", "compile", "compile_training", "reads", "run", "run_all",
    "supports",
]  # fmt: skip
