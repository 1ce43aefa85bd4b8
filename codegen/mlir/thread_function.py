"""The function that every thread of a parallel region runs: its parameters, its part of the workspace, its share of the
work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from fusion.codegen.mlir.builder import PTR, Builder, Value
from fusion.codegen.mlir.params import Params
from fusion.codegen.mlir.products import round_up


class ThreadFunction:
    """Base of all kernels. first: parameters whose slots come first. Its parameters are `workspace`, `workspace_bytes`
    (of one thread), `counter` (of portions that threads have taken), and what else it asks for."""

    name: ClassVar[str] = "attention"
    header: ClassVar[str] = "module {\nllvm.func @omp_get_thread_num() -> i32\n"

    def __init__(self, first: Sequence[tuple] = ()):
        self.b = b = Builder()
        self.params = Params(b, Value("%params", PTR))
        for key in first:
            self.params[key]
        self.workspace_bytes = 0
        with b.at_entry():
            self._identify()
            workspace, size = self.params[("ptr", "workspace")], self.params[("workspace_bytes",)]
            self.base = b.at(workspace, b.mul(self.thread, size), "i8", "mine")

    def _identify(self) -> None:
        self.thread = self.number_of("omp_get_thread_num", "thread")

    def number_of(self, function: str, hint: str) -> Value:
        """What OpenMP says of the calling thread."""
        number = self.b.op(f"llvm.call @{function}() : () -> i32", "i32", hint)
        return self.b.convert("arith.extsi", number, "i64", hint)

    def area(self, size: int, hint: str) -> Value:
        """A new part of the thread's workspace, on a cache line; size: bytes."""
        offset = self.workspace_bytes
        self.workspace_bytes += round_up(size, 64)
        with self.b.at_entry():
            return self.b.at(self.base, offset, "i8", hint)

    @contextlib.contextmanager
    def turns(self, count: Value, hint: str) -> Iterator[Value]:
        """A loop over numbers below `count`, which threads take from a common counter, so that blocks of unequal work
        (causal masks) and busy cores even out."""
        b, counter, one = self.b, self.params[("ptr", "counter")], self.b.constant(1, "i64")
        take = f"llvm.atomicrmw add {counter}, {one} monotonic : {PTR}, i64"
        with b.taking(lambda: b.op(take, "i64", "next"), count, hint) as mine:
            yield mine

    def function(self) -> str:
        """The module's text."""
        return f"{self.header}func.func @{self.name}(%params: {PTR}) {{\n{self.b.text()}\n  return\n}}\n}}\n"

    def slots(self) -> tuple[tuple, ...]:
        """The keys of the parameters, in order."""
        return tuple(sorted(self.params.slots, key=self.params.slots.__getitem__))
