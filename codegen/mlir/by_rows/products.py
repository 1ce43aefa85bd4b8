"""The two products of the kernel for few queries, K q and p V: what their ways have in common.

vectors   by vector instructions, one, two or four rows at a time
tiles     all rows at a time, on AMX tiles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fusion.ir.expr import J
from fusion.ir.spec import AttentionSpec
from fusion.lowering.addresses import in_line

from ..builder import Value
from ..rows import RowReader, SharedRows
from ..scope import MEMORY_TYPE

if TYPE_CHECKING:
    from .kernel import RowKernel

STEP = 32  # keys that are read together at most: those that rows take turns at, which the first-level cache holds

Source = RowReader | SharedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChunk:
    """Keys [low, high) that some row has to visit, of the chunk that begins with key `start`. first, stop: steps of the
    chunk around them. rows: how many there are. k, v: read K and V."""

    start: Value
    first: Value
    low: Value
    high: Value
    stop: Value
    rows: Value
    k: Source
    v: Source


class RowProducts:
    """K q and p V of the rows of a work item, a chunk of keys at a time, for all keys that any of them visits. Each way
    has

    chunk_keys(columns)            keys of a chunk at most, with so many columns of K and V
    store_query(source, r)         row 0 of `source` is the query of row r
    begin(every)                   the products of all rows with the keys, to `kernel.scores`
    weigh(every, r)                the weights of row r's keys from `first` to `stop` have taken their place; 0 for
                                   those that it does not visit
    end(every)                     the outputs of all rows, after all have their weights
    add_output(every, r, target)   add row r's weighted sum of V, e_padded float32 in an order of its own
    in_order(results)              vectors of an output, two or all, as their columns stand in a row

    memory: MLIR's type of elements of K and V that are multiplied, where it is always the same
    """

    memory: ClassVar[str | None] = None

    @classmethod
    def reads(cls, spec: AttentionSpec, number: int) -> bool:
        """Whether K or V (operand 1 or 2) is read where it lies: stored as it is multiplied, rows at one distance."""
        stored = cls.memory in (None, MEMORY_TYPE[spec.operands[number].dtype])
        return stored and spec.values[number] is None and in_line((spec.k, spec.v)[number - 1], J)

    def __init__(self, kernel: RowKernel):
        self.b, self.lanes, self.vector = kernel.b, kernel.lanes, kernel.vector
        self.d_padded, self.e_padded = kernel.d_padded, kernel.e_padded
        self.chunk, self.scores, self.staging = kernel.chunk, kernel.scores, kernel.staging

    def weight(self, every: KeyChunk, r: Value, key: Value) -> Value:
        """Address of the weight of row r and a key, or its score."""
        return self.b.at(self.scores[r], self.b.sub(key, every.start), "f32")
