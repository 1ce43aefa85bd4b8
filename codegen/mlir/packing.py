"""Packed rows of a thread: a range of one side's rows, and which rows they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.errors import KernelCompilationError

from .builder import Builder, Value
from .rows import RowReader

SLOTS = 64
STATE_BYTES = 8 * SLOTS


class PackedRows:
    """Rows [low, high) of what some readers read are packed. state: `STATE_BYTES` of the thread's memory, which hold
    low, high and the identity of what is read."""

    def __init__(self, b: Builder, state: Value):
        self.b, self.low, self.state = b, state, state
        self.high = b.at(state, 1, "i64")

    def clear(self) -> None:
        """At the start of the kernel: nothing is packed."""
        self.b.store(self.b.constant(-1, "i64"), self.low)

    def note(self, readers: Sequence[RowReader], part: Value | None = None) -> None:
        """Forget what is packed where other rows are read from here on than before, or another part of them."""
        b, own = self.b, [] if part is None else [part]
        values = [*(b.as_value(v, "i64") for reader in readers for v in reader.identity()), *own]
        if len(values) + 2 > SLOTS:
            raise KernelCompilationError(
                f"keys and values that {len(values)} numbers tell apart; a kernel has room for {SLOTS - 2}: give them "
                "fewer batch dimensions"
            )
        changed: Value = b.compare("slt", b.load(self.low, "i64"), 0, "nothing")
        for slot, value in enumerate(values, start=2):
            old = b.load(b.at(self.state, slot, "i64"), "i64", "seen")
            changed = b.or_(changed, b.compare("ne", old, value), "changed")
        zero = b.constant(0, "i64")
        with b.when(changed):
            for slot, value in enumerate([zero, zero, *values]):
                b.store(value, b.at(self.state, slot, "i64"))

    def extend(self, low: Value | int, high: Value, step: int, pack: Callable[[Value], None]) -> None:
        """Make sure that rows [low, high) are packed (low on a step), and what lies between them and those that are:
        `pack(row)` packs a step from that row on."""
        b = self.b
        have_low, have_high = b.load(self.low, "i64", "have_lo"), b.load(self.high, "i64", "have_hi")
        end = b.mul(b.ceil_div(high, step), step, "end")
        low = b.as_value(low, "i64")
        empty = b.compare("sge", have_low, have_high, "empty")
        have_low, have_high = b.select(empty, low, have_low), b.select(empty, low, have_high)
        before, behind = b.most(b.sub(have_low, low), 0, "before"), b.most(b.sub(end, have_high), 0, "behind")
        with b.loop(0, b.add(before, behind), step, hint="r") as r:
            start = b.select(b.compare("slt", r, before), low, b.sub(have_high, before), "start")
            pack(b.add(start, r, "row"))
        b.store(b.least(low, have_low), self.low)
        b.store(b.most(end, have_high), self.high)
