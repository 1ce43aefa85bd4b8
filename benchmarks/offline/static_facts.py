"""What is known of a compiled kernel without running it: its inner loops, and, on NVIDIA devices, how fast they are
predicted to be (`timeline`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fusion.machine import Machine

from .disassembly import Loop, amd_number, disassemble, inner_loops, registers_of
from .timeline import RATES, SUSTAINED, Clocks, clocks_of, residents

_LAYOUT = re.compile(
    r"^#(\w+) = #ttg\.(?:nvidia_mma|amd_mfma)<\{[^}]*warpsPerCTA = \[(\d+), (\d+)\][^}]*instrShape = \[(\d+), (\d+)",
    re.MULTILINE,
)
_PRODUCT = re.compile(r"(?:warp_group_dot|tt\.dot)\b[^\n]*-> tensor<(\d+)x(\d+)x\w+, #(\w+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFacts:
    """Of one kernel.

    shared: bytes.
    registers: of a thread.
    warps: of a program.
    redundancy: how often each result of a product is computed, of the product where that is most.
    residents: programs of which a multiprocessor holds the shared memory and registers.
    loops: those that multiply.
    """

    kernel: str
    shared: int
    registers: int
    warps: int
    redundancy: float
    residents: int
    loops: tuple[Loop, ...]
    machine: Machine

    @property
    def spills(self) -> int:
        """Moves to and from local memory inside the loop where they are most."""
        return max((loop.spills for loop in self.loops), default=0)

    @property
    def serialised(self) -> bool:
        """Whether products of some loop wait for each other."""
        return any(loop.serialised for loop in self.loops)

    @property
    def main(self) -> Loop:
        """Of the loops with the most products that with the fewest instructions: the one without masks and bounds."""
        return min(self.loops, key=lambda loop: (-loop.units["tensor"], len(loop.body)))

    def clocks(self, loop: Loop | None = None) -> Clocks:
        """Of one trip of a loop, of the main one where none is named."""
        rates = RATES["wgmma" if "wgmma" in self.machine.isa else ""]
        return clocks_of(loop or self.main, self.warps, rates)

    def rate(self, flop: float, loop: Loop | None = None) -> float:
        """Flop/s that are predicted of the machine where a trip does so many; what it adds to memory counts where it
        takes longer than the rest."""
        seconds = self.clocks(loop).with_residents(self.residents) / SUSTAINED / self.machine.cores
        added = self.warps * sum(instruction.added_bytes for instruction in (loop or self.main).body)
        return flop / max(seconds, added / self.machine.additions if added else 0.0)


def static_facts(kernel: Any, machine: Machine) -> StaticFacts:
    """kernel: of Triton's compiler."""
    metadata = kernel.metadata
    text, registers = _machine_code(kernel)
    return StaticFacts(
        kernel=metadata.name,
        shared=metadata.shared,
        registers=registers,
        warps=metadata.num_warps,
        redundancy=redundancy(kernel.asm["ttgir"]),
        residents=residents(metadata.shared, registers, metadata.num_warps, machine),
        loops=tuple(inner_loops(text)),
        machine=machine,
    )


def _machine_code(kernel: Any) -> tuple[str, int]:
    """(text, registers of a thread)."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        return text, amd_number(text, "vgpr_count")
    return disassemble(kernel.asm["cubin"]), registers_of(kernel.asm["cubin"])


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
