"""The two products of the kernel for few queries, K q and p V: what their ways have in common.

vectors   row by row
groups    two or four rows at a time, in bf16 pairs
tiles     all rows at a time, on AMX tiles
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Keys [low, high), which a row has to visit, or some row has, of the chunk that begins with key `start`. first:
    `low`, less what it is beyond whole steps of the chunk. rows: how many take turns. k, v: read K and V."""

    start: Value
    first: Value
    low: Value
    high: Value
    rows: Value
    k: Source
    v: Source


Prefetch = Callable[[Value], None]  # asks for rows that are read later, when L keys from this one on are multiplied
Columns = tuple[Value | int, int]
"""Vectors of columns that follow each other: the first's first column, and how many vectors."""


class RowProducts:
    """K q and p V of the rows of a work item, a chunk of keys at a time. Rows take turns: their scores are asked for,
    and their weights given. Each way has

    chunk_keys(columns, most)       keys of a chunk: `most` at most, with so many columns of K and V
    store_query(source, r)          row 0 of `source` is the query of row r
    begin(every)                    the products of all rows, before their scores are asked for
    scores(mine, r, key)            the products of L keys with the query of row r
    weights(r)                      where the weight of row r and the first key of a chunk is put, float32
    weigh(mine, r)                  row r's weights have been put there
    end(every)                      the outputs of all rows, after all have their weights
    add_output(mine, r, target)     add row r's weighted sum of V, e_padded float32 in an order of its own
    in_order(results)               vectors of an output, two or all, as their columns stand in a row

    kernel: has the columns of Q and K and of V, also as they lie in memory (padded)
    rows_at_once: rows that may be multiplied with keys at a time; 1 where no two read the same
    chunk: keys of a chunk at most
    active_rows: a loop over the rows that visit keys of a chunk: their numbers, and which keys
    memory: MLIR's type of elements of K and V that are multiplied, where it is always the same
    """

    memory: ClassVar[str | None] = None

    @classmethod
    def reads(cls, spec: AttentionSpec, number: int) -> bool:
        """Whether K or V (operand 1 or 2) is read where it lies: stored as it is multiplied, rows at one distance."""
        stored = cls.memory in (None, MEMORY_TYPE[spec.operands[number].dtype])
        return stored and spec.values[number] is None and in_line((spec.k, spec.v)[number - 1], J)

    def __init__(self, kernel: RowKernel, rows_at_once: int):
        self.b, self.lanes, self.vector = kernel.b, kernel.lanes, kernel.vector
        self.d, self.d_v, self.d_padded, self.e_padded = kernel.d, kernel.d_v, kernel.d_padded, kernel.e_padded
        self.rows_at_once, self.chunk, self.active_rows = rows_at_once, kernel.chunk, kernel.active_rows
        self.staging = kernel.area(8 * self.lanes * max(self.d_padded, self.e_padded), "staging")
