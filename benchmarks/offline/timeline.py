"""Clocks that a trip of an inner loop is predicted to take on a multiprocessor, from its disassembled instructions.

The model: every warp of a program runs the same instructions. A part of the multiprocessor issues one instruction of
one of its warps in a clock; each unit takes its own lanes in a clock (`disassembly.LANES`). Asynchronous products go to
the tensor unit one after another, at its dense rate or, where that is slower, as fast as shared memory hands over their
factors (128 bytes a clock); the warps go on until they wait for them. Other products are waited for where they are
issued. Latencies, bank conflicts and cache misses are not modelled: `EFFICIENCY` stands for them.

Two constants are fitted to published figures of peers whose loops were compiled and put through the same model
(`peer_loops`; `triton_static` prints both): H100, forward without a mask. FlexAttention's template at d = 128, 392-408
Tflop/s (model: 407); Triton's tutorial at d = 128, 434-477 (446), and at d = 64, 396-403 (396). Groups of warps with
roles are taken to be independent, which is the best that can be: FlashAttention-3 reaches 497 Tflop/s at d = 64, its
loop in Gluon is predicted at 677, and at 462 with both in step (benchmarks/results/2026-11-27-gluon.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.machine import Machine
from fusion.planning.gpu_clocks import EFFICIENCY, HIDDEN, SHARED_BYTES, WARP_INTERVAL

from .disassembly import LANES, Instruction, Loop

PARTS = 4
"""Of a multiprocessor, each with an instruction issued per clock."""

SUSTAINED = 1.7e9
"""Clocks a second under a full load of matrix products; the data sheet's 1.83e9 are not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Multiply-adds of 16-bit factors per clock and multiprocessor. asynchronous: of wgmma; synchronous: of mma."""

    asynchronous: int
    synchronous: int


RATES = {
    "": Rates(asynchronous=1024, synchronous=1024),
    "wgmma": Rates(asynchronous=2048, synchronous=1270),
}
"""By instruction set: 312 Tflop/s / 108 / 1.41 GHz of an A100, 989.4 Tflop/s / 132 / 1.83 GHz of an H100, whose mma
instructions reach 62 % of that (Luo et al., arXiv 2402.13499, table of mma throughput)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Of one trip. tensor, issue, special, shared: of each resource alone; trip: of one program on its own, waits
    included."""

    tensor: float
    issue: float
    special: float
    shared: float
    trip: float

    @property
    def busiest(self) -> float:
        return max(self.tensor, self.issue, self.special, self.shared)

    def with_residents(self, programs: int) -> float:
        """Of a trip of one program where so many share a multiprocessor."""
        filled = self.busiest + (self.trip - self.busiest) * (1 - HIDDEN if programs > 1 else 1)
        return filled / EFFICIENCY


def clocks_of(loop: Loop, warps: int, rates: Rates) -> Clocks:
    """Clocks of a trip of a program's loop."""
    timeline = _Timeline(warps, rates)
    for _ in range(2):
        before = timeline.now
        for instruction in loop.body:
            timeline.take(instruction)
    tensor, special, shared, issue = (
        sum(map(each, loop.body))
        for each in (timeline.tensor_clocks, timeline.special_clocks, timeline.shared_clocks, timeline.issue_clocks)
    )
    busiest = max(tensor, issue, special, shared)
    return Clocks(tensor=tensor, issue=issue, special=special, shared=shared, trip=max(busiest, timeline.now - before))


class _Timeline:
    """The warps of one program, which advance together. now: clocks gone by; free: when each unit is."""

    def __init__(self, warps: int, rates: Rates):
        self.warps, self.rates = warps, rates
        self.now = 0.0
        self.free = dict.fromkeys(LANES, 0.0)
        self.groups: list[float] = []  # when each group of products that is in flight is done

    def take(self, instruction: Instruction) -> None:
        self.now += max(self.issue_clocks(instruction), WARP_INTERVAL)
        if instruction.product is not None:
            self._multiply(instruction)
        elif instruction.waits is not None:
            unfinished = instruction.waits
            for done in self.groups[: len(self.groups) - unfinished]:
                self.now = max(self.now, done)
            self.groups = self.groups[len(self.groups) - unfinished :] if unfinished else []
        else:
            unit = instruction.unit
            self.free[unit] = max(self.free[unit], self.now) + self._lanes(unit) - self.issue_clocks(instruction)

    def _multiply(self, instruction: Instruction) -> None:
        # The factors of a product come from what other units have computed.
        self.now = max(self.now, *(self.free[unit] for unit in ("alu", "special"))) if not self.groups else self.now
        done = max(self.free["tensor"], self.now) + self.tensor_clocks(instruction)
        self.free["tensor"] = done
        if instruction.closes:
            self.groups.append(done)
        elif not instruction.asynchronous:
            self.now = done

    def issue_clocks(self, instruction: Instruction) -> float:
        return self.warps / PARTS

    def special_clocks(self, instruction: Instruction) -> float:
        return self._lanes("special") if instruction.unit == "special" else 0.0

    def tensor_clocks(self, instruction: Instruction) -> float:
        if (shape := instruction.product) is None:
            return 0.0
        m, n, k = shape
        if instruction.asynchronous:
            rate = self.rates.asynchronous * (2 if instruction.base == "QGMMA" else 1)
            return max(m * n * k / rate, instruction.shared_bytes / SHARED_BYTES) * self.warps / 4
        return m * n * k / self.rates.synchronous * self.warps

    def shared_clocks(self, instruction: Instruction) -> float:
        sharing = 4 if instruction.asynchronous else 1
        return instruction.shared_bytes / SHARED_BYTES * self.warps / sharing

    def _lanes(self, unit: str) -> float:
        """Clocks for which an instruction of all warps takes a unit."""
        return 32 / LANES[unit] * self.warps / PARTS


def residents(shared: int, registers: int, warps: int, machine: Machine) -> int:
    """How many programs share a multiprocessor, whose shared memory is 1 KiB a program more than one may use."""
    by_registers = machine.registers // (4 * machine.wave * warps * -(-max(registers, 1) // 8) * 8)
    return max(1, min((machine.shared_memory + 1024) // (shared + 1024), by_registers, 64 // warps))
