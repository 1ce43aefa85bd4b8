"""The function that every thread of a parallel region runs: its parameters, its part of the workspace, its share of the
work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .builder import PTR, Builder, Value
from .values import SIZE, Array, round_up


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """MLIR text, and what the launcher must know of it."""

    source: str
    slots: tuple[tuple, ...]  # parameters in order
    fixed_bytes: int  # of a thread's workspace ...
    step_bytes: int = 0  # ... which has so many more for each of ceil(n_k / key_step) steps
    rows: int = 1  # rows of a work item at most
    key_step: int = 1  # keys of a step
    may_flag: bool = False  # whether the kernel may raise the flag for large values
    across_heads: bool = False  # an item's rows may be of several heads that read the same keys
    part_bytes: int = 0  # what each part of an item's keys leaves in memory; 0: they may not be cut
    part_step: int = 1  # keys of which each part, and each window of rows, has a multiple
    windowed: bool = False  # whether packed rows may be those of a window
    entry: str = "attention"  # the function


class ThreadFunction:
    """Base of all kernels. Its parameters are `workspace`, `workspace_bytes`
    (of one thread), `threads` (at most so many run it), `counter` (of portions that threads have taken, and behind it
    of threads that have begun; both 0 at the start of a call), and what else it asks for.

    A thread's number is how many have begun before. OpenMP is not asked: within another team it would answer with
    numbers of that one."""

    name: ClassVar[str] = "attention"
    header: ClassVar[str] = "module {\n"

    def __init__(self):
        self.b = b = Builder()
        self.params = Params(b, Value("%params", PTR))
        self.workspace_bytes = 0
        with b.at_entry():
            self.threads = self.params[("threads",)]
            begun = b.at(self.params[("ptr", "counter")], 1, "i64", "begun")
            several = b.compare("sgt", self.threads, 1, "several_threads")
            self.thread = b.either(several, lambda: self._ticket(begun), lambda: b.constant(0, "i64"), "i64")
            workspace, size = self.params[("ptr", "workspace")], self.params[("workspace_bytes",)]
            self.base = b.row(workspace, self.thread, size, "i8", "mine")

    def _ticket(self, counter: Value) -> Value:
        """Number of tickets drawn before, by all threads."""
        b, one = self.b, self.b.constant(1, "i64")
        return b.op(f"llvm.atomicrmw add {counter}, {one} monotonic : {PTR}, i64", "i64", "ticket")

    def area(self, size: int, hint: str) -> Value:
        """A new part of the thread's workspace, on a cache line; size: bytes."""
        offset = self.workspace_bytes
        self.workspace_bytes += round_up(size, 64)
        with self.b.at_entry():
            return self.b.at(self.base, offset, "i8", hint)

    def array(self, count: int, size: int, hint: str, scalar: str = "i8") -> Array:
        """Array of `count` parts of `size` elements each."""
        return Array(self.b, self.area(count * size * SIZE[scalar], hint), size, scalar)

    @contextlib.contextmanager
    def dynamic_loop(self, count: Value, hint: str) -> Iterator[Value]:
        """A loop over numbers below `count`, which threads take from a common counter, so that blocks of unequal work
        (causal masks) and busy cores even out."""
        counter = self.params[("ptr", "counter")]
        with self.b.taking(lambda: self._ticket(counter), count, hint) as mine:
            yield mine

    def kernel_text(self, beyond: int = 0, **known: Any) -> KernelText:
        """The module. beyond: bytes of workspace behind what was asked for; known: other fields of the text."""
        function = f"func.func @{self.name}(%params: {PTR}) {{\n{self.b.text()}\n  return\n}}"
        slots = tuple(sorted(self.params.slots, key=self.params.slots.__getitem__))
        return KernelText(
            source=f"{self.header}{function}\n}}\n", slots=slots, fixed_bytes=self.workspace_bytes + beyond,
            entry=self.name, **known,
        )  # fmt: skip
