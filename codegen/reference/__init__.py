"""The reference interpreter: executes any `AttentionSpec` in plain torch, one obvious step after the other.

    run(spec, operands, sizes)                          the attention
    backward(spec, grad, operands, sizes, needs)        gradients, by torch's own autograd through the same steps

It is what every emitter is tested against, and what runs where no emitter can. It materialises the score matrix; its
backward does so for a block of query rows at a time, so that memory stays linear in the number of queries.
"""

from __future__ import annotations

from fusion.codegen.reference.backward import backward
from fusion.codegen.reference.forward import run

__all__ = ["backward", "run"]
