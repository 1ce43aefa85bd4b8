"""Facts of a compiled kernel, from its machine code: inner loops, instruction by instruction, and what they spill.

`disassemble` makes the text of a binary for NVIDIA devices; for AMD's the compiler leaves its text. `inner_loops` finds
the loops of a text which contain no other.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fusion.codegen.triton.ahead_of_time import amd_number

_PRODUCTS = ("HGMMA", "HMMA", "IMMA", "QGMMA", "UTCHMMA", "UTCQMMA")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_x?_?\d+):|^(\.LBB\d+_\d+):.*(?:=>This|Parent) ")
_TARGET = re.compile(r"`\((\.L_x?_?\d+)\)|^(\.LBB\d+_\d+)")
_AMD_LINE = re.compile(r"^\t()()([a-z]\w*)([^;]*)")
_BRANCHES = ("BRA", "s_branch", "s_cbranch")
_LAYOUT = re.compile(
    r"^#(\w+) = #ttg\.(?:nvidia_mma|amd_mfma)<\{[^}]*warpsPerCTA = \[(\d+), (\d+)\][^}]*instrShape = \[(\d+), (\d+)",
    re.MULTILINE,
)
_PRODUCT = re.compile(r"(?:warp_group_dot|tt\.dot)\b[^\n]*-> tensor<(\d+)x(\d+)x\w+, #(\w+)>")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. name: with its suffixes; operands: the rest of its text."""

    name: str
    operands: str

    @property
    def base(self) -> str:
        """The name without suffixes."""
        return self.name.partition(".")[0]

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix product, of NVIDIA's or AMD's devices."""
        return self.base in _PRODUCTS or self.name.startswith(("v_mfma", "v_wmma"))

    @property
    def spills(self) -> bool:
        """Whether it moves a register to or from local memory."""
        return self.base in ("LDL", "STL") or self.name.startswith(("scratch_load", "scratch_store"))

    @property
    def product(self) -> tuple[int, int, int] | None:
        """(m, n, k) of a matrix product; of a warp group's where it is one (wgmma)."""
        if self.base not in ("HGMMA", "HMMA", "QGMMA"):
            return None
        if (sizes := re.search(r"\.(\d+)x(\d+)x(\d+)", self.name)) is not None:
            return int(sizes[1]), int(sizes[2]), int(sizes[3])
        packed = re.search(r"\.(\d{2})(\d)(\d+)\.", self.name + ".")  # HMMA.16816 is 16 x 8 x 16
        return (int(packed[1]), int(packed[2]), int(packed[3])) if packed else None

    @property
    def asynchronous(self) -> bool:
        """Whether it is a product that a warp group issues and waits for later."""
        return self.base in ("HGMMA", "QGMMA")

    @property
    def closes(self) -> bool:
        """Whether it ends a group of asynchronous products that can be waited for."""
        return self.asynchronous and "gsb0" in self.operands

    @property
    def waits(self) -> int | None:
        """How many groups of products may be unfinished after it, where it is a wait for them."""
        found = re.search(r"gsb0, 0x([0-9a-f]+)", self.operands) if self.name.startswith("WARPGROUP.DEPBAR") else None
        return int(found[1], 16) if found else None


@dataclass(frozen=True, slots=True)
class Loop:
    """An inner loop: the instructions of one trip, in the order of addresses."""

    body: tuple[Instruction, ...]

    @property
    def products(self) -> dict[str, int]:
        """Matrix products by kind and shape."""
        shapes = [(i.base, "x".join(map(str, i.product))) for i in self.body if i.product is not None]
        return dict(Counter(f"{base} {shape}" for base, shape in shapes))

    @property
    def spills(self) -> int:
        """Instructions that move registers to and from local memory."""
        return sum(instruction.spills for instruction in self.body)

    @property
    def exponentials(self) -> tuple[int, int]:
        """(all, those issued while an asynchronous product is in flight, also one of the trip before)."""
        closed, begun, every, under = 0, False, 0, 0
        for turn in range(2):
            for instruction in self.body:
                if instruction.asynchronous:
                    closed, begun = closed + instruction.closes, not instruction.closes
                elif instruction.waits is not None:
                    closed = min(closed, instruction.waits)
                elif turn and instruction.name.startswith("MUFU.EX2"):
                    every, under = every + 1, under + (closed > 0 or begun)
        return every, under

    @property
    def serialised(self) -> bool:
        """Whether each asynchronous product waits for the one before: what ptxas does for want of registers."""
        closed = sum(instruction.closes for instruction in self.body)
        issued = sum(instruction.asynchronous for instruction in self.body)
        return issued > 4 and closed == issued


def inner_loops(text: str) -> list[Loop]:
    """The loops of a disassembled kernel that contain no other and multiply matrices, in the order of addresses."""
    labels: dict[str, int] = {}
    lines: list[Instruction] = []
    back: list[tuple[int, int]] = []
    for line in text.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1] or label[2]] = len(lines)
        elif (found := _LINE.match(line) or _AMD_LINE.match(line)) is not None:
            lines.append(instruction := Instruction(found[3], found[4].strip()))
            target = _TARGET.search(instruction.operands) if found[3].startswith(_BRANCHES) else None
            if target is not None and (at := labels.get(target[1] or target[2])) is not None:
                back.append((at, len(lines)))
    inner = [(a, b) for a, b in back if not any((c, d) != (a, b) and a <= c and d <= b for c, d in back)]
    loops = [Loop(tuple(lines[a:b])) for a, b in dict.fromkeys(inner)]
    return [loop for loop in loops if any(i.multiplies for i in loop.body)]


def disassemble(binary: bytes) -> str:
    """The text of a binary for NVIDIA devices."""
    return _run(binary, "nvdisasm", "-c")


def registers_of(binary: bytes) -> int:
    """Registers of a thread."""
    usage = _run(binary, "cuobjdump", "--dump-resource-usage")
    return max(map(int, re.findall(r"REG:(\d+)", usage)), default=0)


def _run(binary: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [os.path.join(_folder(), tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _folder() -> str:
    """Where Triton's own assembler and its companions are."""
    from triton.backends.nvidia.compiler import get_ptxas

    return os.path.dirname(get_ptxas(90).path)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFacts:
    """Facts of one kernel.

    shared: bytes.
    registers: of a thread.
    redundancy: how often each result of a product is computed, of the product where that is most.
    loops: those that multiply.
    """

    shared: int
    registers: int
    redundancy: float
    loops: tuple[Loop, ...]

    @property
    def serialised(self) -> bool:
        """Whether products of some loop wait for each other."""
        return any(loop.serialised for loop in self.loops)

    @property
    def main(self) -> Loop:
        """Main loop: the shortest of those with the most products, which is the one without masks and bounds."""
        return min(self.loops, key=lambda loop: (-sum(i.multiplies for i in loop.body), len(loop.body)))


def static_facts(kernel: Any) -> StaticFacts:
    """Facts of a kernel of Triton's compiler."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers = amd_number(text, "vgpr_count")
    else:
        text, registers = disassemble(kernel.asm["cubin"]), registers_of(kernel.asm["cubin"])
    loops = tuple(inner_loops(text))
    repeated = redundancy(kernel.asm["ttgir"])
    return StaticFacts(shared=kernel.metadata.shared, registers=registers, redundancy=repeated, loops=loops)


def redundancy(text: str) -> float:
    """How often each element of a product is computed, of the product where that is most: by how much the warps and
    the instruction of its layout exceed its tile. text: Triton's form for GPUs."""
    layouts = {name: tuple(map(int, rest)) for name, *rest in _LAYOUT.findall(text)}
    most = 1.0
    for rows, columns, name in _PRODUCT.findall(text):
        if name in layouts:
            warps_m, warps_n, m, n = layouts[name]
            most = max(most, max(1.0, warps_m * m / int(rows)) * max(1.0, warps_n * n / int(columns)))
    return most
