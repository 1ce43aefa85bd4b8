"""Instructions that only 64-bit Arm processors have."""

from __future__ import annotations

from .builder import Builder, Value
from .values import vector_of

FEATURES = "+neon,+bf16,-sve"
"""LLVM's names of what kernels with these instructions need, whether or not it knows the processor. Vectors of unknown
width it could not round to bfloat16 (LLVM 19 ends the process)."""
LANES = 4  # float32 elements in a vector
BFDOT = "aarch64.neon.bfdot.v4f32.v8bf16"


class NeonPairs:
    """Products of bfloat16 pairs, in vectors of four."""

    def __init__(self, b: Builder):
        self.b = b

    def add_pair_products(self, total: Value, left: Value, right: Value) -> Value:
        """total + left[2 n] right[2 n] + left[2 n + 1] right[2 n + 1] in lane n, of bf16 left and right. Both products
        and their sum are rounded to odd, so that no step has a preferred direction; denormals are 0."""
        return self.b.intrinsic(BFDOT, total, left, right, type_=vector_of("f32", LANES), hint="sum")

    def narrow(self, low: Value, high: Value) -> Value:
        """8 bf16 from two vectors, rounded to nearest even."""
        return self.b.shuffle(*self._halves(low, high), range(2 * LANES), "line")

    def pairs(self, first: Value, second: Value) -> Value:
        """bf16 elements of two vectors in turns, rounded to nearest even."""
        return self.b.shuffle(
            *self._halves(first, second), [n + half for n in range(LANES) for half in (0, LANES)], "pairs"
        )

    def _halves(self, first: Value, second: Value) -> list[Value]:
        return [self.b.convert("arith.truncf", x, "bf16") for x in (first, second)]
