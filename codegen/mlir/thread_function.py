"""The function that every thread of a parallel region runs: its parameters, its part of the workspace, its share of the
work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from .builder import PTR, Builder, Value
from .values import Array, round_up


class Params:
    """The kernel's run-time arguments: 64-bit slots behind one pointer, read once at the function's start. `slots`
    lists the keys in order: ("ptr", n) the address of operand n, ("stride", n, dim) in elements, ("size", name), and
    whatever else the kernel asks for; the launcher fills them in the same order."""

    def __init__(self, b: Builder, pointer: Value):
        self.b, self.pointer = b, pointer
        self.slots: dict[tuple, int] = {}
        self._values: dict[tuple, Value] = {}

    def __getitem__(self, key: tuple) -> Value:
        if key not in self._values:
            slot = self.slots.setdefault(key, len(self.slots))
            hint = "_".join(str(part) for part in key)
            type_ = "!llvm.ptr" if key[0] == "ptr" else "i64"
            with self.b.at_entry():
                address = self.b.at(self.pointer, slot, "i64", f"{hint}_slot")
                self._values[key] = self.b.op(f"llvm.load {address} : !llvm.ptr -> {type_}", type_, hint)
        return self._values[key]

    def float32(self, name: str) -> Value:
        """A parameter that is the bits of a float32."""
        return self.b.bitcast(self.b.convert("arith.trunci", self[(name,)], "i32", f"{name}_bits"), "f32", name)


class ThreadFunction:
    """Base of all kernels. first: parameters whose slots come first. Its parameters are `workspace`, `workspace_bytes`
    (of one thread), `threads` (at most so many run it), `counter` (of portions that threads have taken, and behind it
    of threads that have begun; both 0 at the start of a call), and what else it asks for.

    A thread's number is how many have begun before. OpenMP is not asked: within another team it would answer with
    numbers of that one."""

    name: ClassVar[str] = "attention"
    header: ClassVar[str] = "module {\n"

    def __init__(self, first: Sequence[tuple] = ()):
        self.b = b = Builder()
        self.params = Params(b, Value("%params", PTR))
        for key in first:
            self.params[key]
        self.workspace_bytes = 0
        with b.at_entry():
            self.threads = self.params[("threads",)]
            begun = b.at(self.params[("ptr", "counter")], 1, "i64", "begun")
            several = b.compare("sgt", self.threads, 1, "several_threads")
            self.thread = b.either(several, lambda: self._ticket(begun), lambda: b.constant(0, "i64"), "i64")
            workspace, size = self.params[("ptr", "workspace")], self.params[("workspace_bytes",)]
            self.base = b.row(workspace, self.thread, size, "i8", "mine")

    def _ticket(self, counter: Value) -> Value:
        """How many were drawn before, by all threads."""
        b, one = self.b, self.b.constant(1, "i64")
        return b.op(f"llvm.atomicrmw add {counter}, {one} monotonic : {PTR}, i64", "i64", "ticket")

    def area(self, size: int, hint: str) -> Value:
        """A new part of the thread's workspace, on a cache line; size: bytes."""
        offset = self.workspace_bytes
        self.workspace_bytes += round_up(size, 64)
        with self.b.at_entry():
            return self.b.at(self.base, offset, "i8", hint)

    def array(self, count: int, size: int, hint: str) -> Array:
        """The same for `count` parts of `size` bytes each."""
        return Array(self.b, self.area(count * size, hint), size)

    @contextlib.contextmanager
    def turns(self, count: Value, hint: str) -> Iterator[Value]:
        """A loop over numbers below `count`, which threads take from a common counter, so that blocks of unequal work
        (causal masks) and busy cores even out."""
        counter = self.params[("ptr", "counter")]
        with self.b.taking(lambda: self._ticket(counter), count, hint) as mine:
            yield mine

    def function(self) -> str:
        """The module's text."""
        return f"{self.header}func.func @{self.name}(%params: {PTR}) {{\n{self.b.text()}\n  return\n}}\n}}\n"

    def slots(self) -> tuple[tuple, ...]:
        """The keys of the parameters, in order."""
        return tuple(sorted(self.params.slots, key=self.params.slots.__getitem__))
