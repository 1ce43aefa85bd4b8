"""What the planner knows of a processor: memory levels, arithmetic and special-function rates.

A `Machine` comes from the system it runs on (`Machine.detect()`), from a table of published figures
(`machine("h200")`), or is the two-level model of the theory (`Machine.two_level(M)`). Nothing of this package is
imported here but its errors.

Sources of the named machines (dense rates, no sparsity):

- `a100`: NVIDIA A100 white paper (SXM 80 GB): 108 SMs, 192 KiB L1 + shared memory (163 KiB a block), 312 Tflop/s
  bf16/fp16, 156 tf32, 19.5 fp32, 2.039 TB/s, L2 40 MiB at 5120 B/clock, 16 special functions a clock and SM at 1.41
  GHz.
- `h100`, `h200`: NVIDIA Hopper white paper and H200 data sheet (SXM): 132 SMs, 227 KiB shared memory a block, 989.4
  Tflop/s bf16/fp16, 494.7 tf32, 1978.9 fp8, 66.9 fp32, L2 50 MiB, 3.35 (H200: 4.8) TB/s; 3.9e12 special functions/s
  (FlashAttention-3, 2407.08608, 3.1); L2 about 5.5 TB/s (published micro-benchmarks; NVIDIA gives none).
- `b200`: NVIDIA Blackwell architecture brief: 148 SMs, 227 KiB a block, 256 KiB tensor memory a SM, 2250 Tflop/s
  bf16/fp16, 4500 fp8, L2 126 MiB, 7.7 TB/s; special functions 16 a clock and SM at 1.85 GHz; L2 bandwidth
  is not published, 10 TB/s is assumed.
- `mi300x`: AMD CDNA 3 white paper: 304 CUs, 64 KiB LDS, 512 KiB vector registers, 1307.4 Tflop/s bf16/fp16, 2614.9
  fp8, 163.4 fp32, L2 4 MiB x 8, Infinity Cache 256 MiB at 17.2 TB/s, 5.3 TB/s; transcendentals at a quarter of 64
  lanes a clock and CU at 2.1 GHz.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion.errors import ProblemError, UnknownMachineError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_BYTES = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
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
class MemoryLevel:
    """One level of memory. `capacity` in bytes, per core (SM, CU) unless `shared`; `bandwidth` in bytes/s, all cores
    together.
    """

    name: str
    capacity: int
    bandwidth: float
    shared: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name} {_size(self.capacity)}{'' if self.shared else ' per core'} at {self.bandwidth / 1e9:.0f} GB/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A processor as the planner sees it. Rates are of the whole machine.

    levels: from the fastest to the slowest, the last one holds everything. `fast` names the level whose capacity is
    the M of the theory. vector_bytes: width of a vector register (CPU) or of a warp's word (GPU: 4 bytes a lane).
    isa: instruction-set flags in the spelling of Linux ("avx512f", "amx_bf16", "neon"). matrix_flops: (dtype, flop/s)
    pairs, a multiply-add counted as two. exp_rate: exponentials/s. launch: s for starting one kernel. clock: Hz, of
    CPUs. shared_memory, registers: bytes per core that one block may use (0 on CPUs).
    """

    name: str
    kind: str
    levels: tuple[MemoryLevel, ...]
    fast: str
    cores: int
    vector_bytes: int
    isa: frozenset[str] = frozenset()
    matrix_flops: tuple[tuple[str, float], ...] = ()
    exp_rate: float = 1.0
    launch: float = 0.0
    clock: float = 0.0
    shared_memory: int = 0
    registers: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "gpu", "model"):
            raise ProblemError(f"machine kind {self.kind!r}; known: cpu, gpu, model")
        if self.cores < 1 or not self.levels or any(level.capacity < 1 for level in self.levels):
            raise ProblemError(f"machine {self.name!r} needs at least one core and memory levels of positive capacity")
        if self.fast not in {level.name for level in self.levels}:
            raise ProblemError(
                f"machine {self.name!r} has no level {self.fast!r}; it has {[level.name for level in self.levels]}"
            )

    def level(self, name: str) -> MemoryLevel:
        """The level of that name."""
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
        """M: elements of `dtype` that the fast memory of one core holds (on GPUs shared memory and registers
        together).
        """
        return (self.level(self.fast).capacity + self.registers) // dtype_bytes(dtype)

    def flops(self, dtype: object) -> float:
        """Multiply-add rate for products of `dtype` with float32 accumulation, flop/s."""
        rates, name = dict(self.matrix_flops), dtype_name(dtype)
        if name in rates:
            return rates[name]
        return rates["float32"] / 2 if name == "float64" else rates["float32"]

    def lanes(self, dtype: object = "float32") -> int:
        """Elements in one vector register."""
        return max(1, self.vector_bytes // dtype_bytes(dtype))

    def __str__(self) -> str:
        levels = ", ".join(map(str, self.levels))
        peak = self.flops("float32") / 1e9
        return f"{self.name} ({self.kind}, {self.cores} cores; {levels}; {peak:.0f} Gflop/s float32)"

    @staticmethod
    def detect() -> Machine:
        """The CPU this process runs on (cached). Rates are derived from its width and clock."""
        from fusion.machine.cpu import detect

        return detect()

    @staticmethod
    def two_level(capacity: int, dtype: object = "float32") -> Machine:
        """The model of the theory: a fast memory of `capacity` elements and a slow one; time counts the elements
        moved, nothing else.
        """
        if capacity < 1:
            raise ProblemError(f"a fast memory of {capacity} elements was asked for; give at least 1")
        size = dtype_bytes(dtype)
        levels = (
            MemoryLevel(name="fast", capacity=capacity * size, bandwidth=float("inf")),
            MemoryLevel(name="slow", capacity=1 << 62, bandwidth=float(size), shared=True),
        )
        return Machine(
            name=f"two-level M={capacity}",
            kind="model",
            levels=levels,
            fast="fast",
            cores=1,
            vector_bytes=size,
            matrix_flops=(("float32", float("inf")),),
            exp_rate=float("inf"),
        )


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def _gpu(
    name: str,
    *,
    cores: int,
    shared: int,
    registers: int,
    l2: int,
    l2_bandwidth: float,
    memory: int,
    bandwidth: float,
    half: float,
    tf32: float,
    fp32: float,
    fp8: float,
    exp_rate: float,
    launch: float = 4e-6,
) -> Machine:
    """A GPU from its data sheet: sizes in bytes, bandwidths in bytes/s, rates in flop/s. Triton's default float32
    product runs as tf32.
    """
    levels = (
        MemoryLevel(name="shared", capacity=shared, bandwidth=cores * 128 * 1.7e9),
        MemoryLevel(name="L2", capacity=l2, bandwidth=l2_bandwidth, shared=True),
        MemoryLevel(name="HBM", capacity=memory, bandwidth=bandwidth, shared=True),
    )
    rates = {
        "float16": half,
        "bfloat16": half,
        "tfloat32": tf32,
        "float32": fp32,
        "float8_e4m3fn": fp8,
        "float8_e5m2": fp8,
    }
    return Machine(
        name=name,
        kind="gpu",
        levels=levels,
        fast="shared",
        cores=cores,
        vector_bytes=128 if name != "mi300x" else 256,
        matrix_flops=tuple((dtype, rate) for dtype, rate in rates.items() if rate),
        exp_rate=exp_rate,
        launch=launch,
        shared_memory=shared,
        registers=registers,
    )


_A100 = _gpu(
    "a100",
    cores=108,
    shared=163 * KIB,
    registers=256 * KIB,
    l2=40 * MIB,
    l2_bandwidth=5120 * 1.41e9,
    memory=80 * GIB,
    bandwidth=2.039e12,
    half=312e12,
    tf32=156e12,
    fp32=19.5e12,
    fp8=0,
    exp_rate=108 * 16 * 1.41e9,
)
_H100 = _gpu(
    "h100",
    cores=132,
    shared=227 * KIB,
    registers=256 * KIB,
    l2=50 * MIB,
    l2_bandwidth=5.5e12,
    memory=80 * GIB,
    bandwidth=3.35e12,
    half=989.4e12,
    tf32=494.7e12,
    fp32=66.9e12,
    fp8=1978.9e12,
    exp_rate=3.9e12,
)
_H200 = _gpu(
    "h200",
    cores=132,
    shared=227 * KIB,
    registers=256 * KIB,
    l2=50 * MIB,
    l2_bandwidth=5.5e12,
    memory=141 * GIB,
    bandwidth=4.8e12,
    half=989.4e12,
    tf32=494.7e12,
    fp32=66.9e12,
    fp8=1978.9e12,
    exp_rate=3.9e12,
)
_B200 = _gpu(
    "b200",
    cores=148,
    shared=227 * KIB,
    registers=256 * KIB,
    l2=126 * MIB,
    l2_bandwidth=10e12,
    memory=180 * GIB,
    bandwidth=7.7e12,
    half=2250e12,
    tf32=1125e12,
    fp32=75e12,
    fp8=4500e12,
    exp_rate=148 * 16 * 1.85e9,
)
_MI300X = _gpu(
    "mi300x",
    cores=304,
    shared=64 * KIB,
    registers=512 * KIB,
    l2=256 * MIB,
    l2_bandwidth=17.2e12,
    memory=192 * GIB,
    bandwidth=5.3e12,
    half=1307.4e12,
    tf32=653.7e12,
    fp32=163.4e12,
    fp8=2614.9e12,
    exp_rate=304 * 16 * 2.1e9,
    launch=6e-6,
)

NAMED = {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200, "mi300x": _MI300X}


def _named_gpu() -> Machine | None:
    """The named machine that the current GPU is, by what its driver calls it; None where there is none or it is not
    listed.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    called = torch.cuda.get_device_name().lower()
    return next((found for name, found in NAMED.items() if name in called), None)


def machine(name: str | Machine | None = None) -> Machine:
    """The machine of that name ("cpu", or None, is the one this runs on; "cuda" its GPU); a `Machine` is returned as
    it is.

    Raises UnknownMachineError, which lists the valid names.
    """
    if isinstance(name, Machine):
        return name
    key = "cpu" if name is None else str(name).lower()
    if key in ("cpu", "this", "detect"):
        return Machine.detect()
    if key in NAMED:
        return NAMED[key]
    if key.split(":")[0] == "cuda" and (found := _named_gpu()) is not None:
        return found
    raise UnknownMachineError(
        f"machine {name!r} is not known; known: cpu (this computer), {', '.join(NAMED)}, or a fusion.machine.Machine"
    )


def with_cores(base: Machine, cores: int) -> Machine:
    """The same machine using only `cores` of its cores: rates and unshared bandwidths shrink in proportion (never
    grow).
    """
    cores = max(1, min(cores, base.cores))
    share = cores / base.cores
    levels = tuple(
        level if level.shared else replace(level, bandwidth=level.bandwidth * share) for level in base.levels
    )
    rates = tuple((dtype, rate * share) for dtype, rate in base.matrix_flops)
    return replace(base, cores=cores, levels=levels, matrix_flops=rates, exp_rate=base.exp_rate * share)
