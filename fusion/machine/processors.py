"""The planner's model of a processor: memory levels, arithmetic and special-function rates.

A `Machine` comes from the system it runs on (`Machine.detect()`), or from a table of published figures or a driver's
answers (`fusion.machine.gpus`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from fusion.errors import ProblemError, UnknownMachineError
from fusion.machine import cpu
from fusion.machine.cpu import MemoryLevel

_BYTES = {"float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}


def dtype_name(dtype: object) -> str:
    """The full name ("bfloat16") of a torch dtype, a numpy dtype, or a full or short name ("bf16")."""
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in _BYTES:
        raise ProblemError(
            f"dtype {dtype!r} is not one that attention is planned for; known: {', '.join([*_BYTES, *_SHORT])}"
        )
    return name


def dtype_bytes(dtype: object) -> int:
    """Bytes of one element."""
    return _BYTES[dtype_name(dtype)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A processor as the planner sees it. Rates are of the whole machine.

    kind: "cpu" or "gpu".
    levels: memory from the fastest to the slowest; the last one holds everything.
    fast: the level whose capacity is the M of the theory.
    cores: of a CPU that the process may use, hardware threads of a core counted once; or streaming multiprocessors
        (compute units) of a GPU.
    vector_bytes: width of a vector register (CPU) or of a warp's word (GPU: 4 bytes a lane).
    isa: of CPUs, instruction-set flags in the spelling of Linux ("avx512f", "amx_bf16", "neon"); of GPUs, those of
        `fusion.machine.gpus.Architecture`.
    architecture: compilation target of GPU kernels ("sm_90", "gfx942").
    matrix_flops: (dtype, flop/s) pairs, a multiply-add counted as two.
    exp_rate: exponentials/s.
    launch: s for starting one kernel.
    clock: Hz, of CPUs.
    shared_memory: bytes that one program of a GPU may use.
    registers: bytes of registers per core of a GPU.
    additions: measured bytes/s of float32 numbers that a GPU's programs add to memory; 0 where unknown.
    """

    name: str
    kind: str
    levels: tuple[MemoryLevel, ...]
    fast: str
    cores: int
    vector_bytes: int
    isa: frozenset[str] = frozenset()
    architecture: str = ""
    matrix_flops: tuple[tuple[str, float], ...] = ()
    exp_rate: float = 1.0
    launch: float = 0.0
    clock: float = 0.0
    shared_memory: int = 0
    registers: int = 0
    additions: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "gpu"):
            raise ProblemError(f"machine kind {self.kind!r}; known: cpu, gpu")
        if self.cores < 1 or not self.levels or any(level.capacity < 1 for level in self.levels):
            raise ProblemError(f"machine {self.name!r} needs at least one core and memory levels of positive capacity")
        if self.fast not in {level.name for level in self.levels}:
            raise ProblemError(
                f"machine {self.name!r} has no level {self.fast!r}; it has {[level.name for level in self.levels]}"
            )

    def level(self, name: str) -> MemoryLevel:
        for level in self.levels:
            if level.name == name:
                return level
        raise UnknownMachineError(
            f"{self.name} has no memory level {name!r}; it has {[level.name for level in self.levels]}"
        )

    @property
    def main(self) -> MemoryLevel:
        """The slow memory, which holds everything."""
        return self.levels[-1]

    def fast_elements(self, dtype: object) -> int:
        """M: elements of `dtype` that one core's fast memory holds (on GPUs shared memory and registers)."""
        return (self.level(self.fast).capacity + self.registers) // dtype_bytes(dtype)

    def flops(self, dtype: object) -> float:
        """Multiply-add rate for products of `dtype` with float32 accumulation, flop/s."""
        rates, name = dict(self.matrix_flops), dtype_name(dtype)
        if name in rates:
            return rates[name]
        return rates["float32"] / 2 if name == "float64" else rates["float32"]

    @property
    def interpreted(self) -> bool:
        """Whether this is Triton's interpreter, which replaces a GPU where there is none."""
        return self.architecture == "interpreter"

    @property
    def wave(self) -> int:
        """Lanes of a GPU that run together (a warp of NVIDIA, a wave of AMD)."""
        return self.vector_bytes // 4

    def lanes(self) -> int:
        """Elements of float32 in one vector register."""
        return max(1, self.vector_bytes // 4)

    def __str__(self) -> str:
        levels = ", ".join(map(str, self.levels))
        peak = self.flops("float32") / 1e9
        return f"{self.name} ({self.kind}, {self.cores} cores; {levels}; {peak:.0f} Gflop/s float32)"

    @staticmethod
    @functools.cache
    def detect() -> Machine:
        """The CPU this process runs on (cached). Rates are derived from its width and clock."""
        return Machine(**cpu.read())


def with_cores(base: Machine, cores: int) -> Machine:
    """Machine with only `cores` of its cores in use: rates and unshared bandwidths shrink in proportion."""
    cores = max(1, min(cores, base.cores))
    return base if cores == base.cores else of_such_cores(base, cores)


def of_such_cores(base: Machine, cores: int) -> Machine:
    """Machine with so many of these cores, which may be more than there are."""
    share = cores / base.cores
    levels = tuple(
        level if level.shared else replace(level, bandwidth=level.bandwidth * share) for level in base.levels
    )
    rates = tuple((dtype, rate * share) for dtype, rate in base.matrix_flops)
    return replace(base, cores=cores, levels=levels, matrix_flops=rates, exp_rate=base.exp_rate * share)


def seconds_text(value: float) -> str:
    return _in_units(value, {1.0: "s", 1e-3: "ms", 1e-6: "us"}) or f"{value / 1e-9:.3g} ns"


def bytes_text(value: float) -> str:
    return _in_units(value, {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}) or f"{value:.0f} B"


def flops_text(value: float) -> str:
    return _in_units(value, {1e15: "Pflop", 1e12: "Tflop", 1e9: "Gflop", 1e6: "Mflop"}) or f"{value:.0f} flop"


def _in_units(value: float, units: dict[float, str]) -> str:
    """Value in the largest unit that it reaches; "" where it reaches none."""
    return next((f"{value / unit:.3g} {name}" for unit, name in units.items() if value >= unit), "")
