"""The run-time arguments of a kernel."""

from __future__ import annotations

from .builder import Builder, Value


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
