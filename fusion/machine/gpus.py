"""GPUs: the limits of each architecture, the machines of published figures, and the device of this computer.

What one program may use (shared memory), what a core has (registers) and how many lanes run together (wave) follow from
the architecture and are stated here alone.

Sources of the architectures: CUDA C++ programming guide, technical specifications per compute capability; AMD's
instruction set guides (CDNA 2 to 4, RDNA 3 and 4). Rates per clock and core are data sheets' rates divided by cores and
boost clock (T4, V100, A100, A10, L40S, H100, B200, MI250X, MI300X, MI355X, RX 7900 XTX, RX 9070 XT); those of sm_87 and
sm_110 are taken from their next of kin.

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
- `4090`: NVIDIA Ada GPU architecture white paper (GeForce RTX 4090): 128 SMs at 2.52 GHz, 165.2 Tflop/s bf16/fp16 with
  float32 sums, 82.6 tf32 and fp32, 330.3 fp8, L2 72 MiB, 24 GB at 1.008 TB/s.

Additions to memory are what the fastest published backwards with one kernel make, which add a float32 number for each
column of a query and block of 128 keys: 4 bytes for 5 * 2 * 128 flop. FlashAttention-3 makes 574.7 Tflop/s (d = 128,
causal, 8,192 queries and keys; pull request 1893 of its repository), FlashAttention-2 63 % of an A100's peak
(2307.08691, 4.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from fusion.errors import UnknownMachineError
from fusion.machine.cpu import GIB, KIB, MIB, MemoryLevel
from fusion.machine.processors import Machine, with_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Limits that all GPUs of one compilation target share.

    shared_memory: bytes that one program may use.
    products: flop of matrix units per clock and core, half precision with float32 sums.
    isa: "wgmma" and "tcgen05", the asynchronous matrix products of Hopper and of Blackwell's data centre parts; "tma",
        the tensor memory accelerator; "fp8", conversions from float8_e4m3fn; "tanh", an instruction for it.
    registers: bytes of a core.
    wave: lanes that run together.
    """

    shared_memory: int
    products: int
    isa: frozenset[str] = frozenset()
    registers: int = 256 * KIB
    wave: int = 32


_TURING = frozenset({"tanh"})
_ADA = _TURING | {"fp8"}
_HOPPER = _ADA | {"wgmma", "tma"}
_BLACKWELL = _ADA | {"tcgen05", "tma"}
_FP8 = frozenset({"fp8"})

ARCHITECTURES = {
    "sm_70": Architecture(shared_memory=96 * KIB, products=1024),
    "sm_75": Architecture(shared_memory=64 * KIB, products=1024, isa=_TURING),
    "sm_80": Architecture(shared_memory=163 * KIB, products=2048, isa=_TURING),
    "sm_86": Architecture(shared_memory=99 * KIB, products=1024, isa=_TURING),
    "sm_87": Architecture(shared_memory=163 * KIB, products=1024, isa=_TURING),
    "sm_89": Architecture(shared_memory=99 * KIB, products=1024, isa=_ADA),
    "sm_90": Architecture(shared_memory=227 * KIB, products=4096, isa=_HOPPER),
    "sm_100": Architecture(shared_memory=227 * KIB, products=8192, isa=_BLACKWELL),
    "sm_103": Architecture(shared_memory=227 * KIB, products=8192, isa=_BLACKWELL),
    "sm_110": Architecture(shared_memory=227 * KIB, products=8192, isa=_BLACKWELL),
    "sm_120": Architecture(shared_memory=99 * KIB, products=1024, isa=_ADA | {"tma"}),
    "sm_121": Architecture(shared_memory=99 * KIB, products=1024, isa=_ADA | {"tma"}),
    "gfx90a": Architecture(shared_memory=64 * KIB, products=1024, isa=_FP8, registers=512 * KIB, wave=64),
    "gfx942": Architecture(shared_memory=64 * KIB, products=2048, isa=_FP8, registers=512 * KIB, wave=64),
    "gfx950": Architecture(shared_memory=160 * KIB, products=4096, isa=_FP8, registers=512 * KIB, wave=64),
    "gfx1100": Architecture(shared_memory=64 * KIB, products=512, isa=_FP8, registers=384 * KIB),
    "gfx1201": Architecture(shared_memory=64 * KIB, products=1024, isa=_FP8, registers=384 * KIB),
}


def architecture(name: str) -> Architecture:
    """Limits of an architecture; for one that is not listed those of the next older one of its maker.

    Raises UnknownMachineError where there is none.
    """
    maker = "gfx" if name.startswith("gfx") else "sm_"
    older = [known for known in ARCHITECTURES if known.startswith(maker) and _number(known) <= _number(name)]
    if name.startswith(maker) and older:
        return ARCHITECTURES[max(older, key=_number)]
    raise UnknownMachineError(f"architecture {name!r} is not known; known: {', '.join(ARCHITECTURES)}")


def _number(name: str) -> int:
    """Position of an architecture among those of its maker: gfx numbers have a hexadecimal end."""
    result = re.match(r"gfx(?P<gfx>[0-9a-f]+)|sm_(?P<sm>\d+)", name)
    if result is None:
        return -1
    return int(result["gfx"], 16) if result["gfx"] else int(result["sm"])


def _gpu(
    name: str, target: str, *, cores: int, l2: int, l2_bandwidth: float, memory: int, bandwidth: float,
    half: float, tf32: float, fp32: float, fp8: float, exp_rate: float, launch: float = 4e-6,
    additions: float = 0.0,
) -> Machine:  # fmt: skip
    """A GPU from its data sheet: bytes, bytes/s, flop/s. Triton's default float32 product runs as tf32."""
    limits = architecture(target)
    levels = (
        MemoryLevel(name="shared", capacity=limits.shared_memory, bandwidth=cores * 128 * 1.7e9),
        MemoryLevel(name="L2", capacity=l2, bandwidth=l2_bandwidth, shared=True),
        MemoryLevel(name="HBM", capacity=memory, bandwidth=bandwidth, shared=True),
    )
    rates = {"float16": half, "bfloat16": half, "tfloat32": tf32, "float32": fp32}
    rates |= {"float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return Machine(
        name=name,
        kind="gpu",
        architecture=target,
        levels=levels,
        fast="shared",
        cores=cores,
        matrix_flops=tuple((dtype, rate) for dtype, rate in rates.items() if rate),
        exp_rate=exp_rate,
        launch=launch,
        vector_bytes=4 * limits.wave,
        isa=limits.isa,
        shared_memory=limits.shared_memory,
        registers=limits.registers,
        additions=additions,
    )


_A100 = _gpu(
    "a100", "sm_80", cores=108, l2=40 * MIB, l2_bandwidth=5120 * 1.41e9, memory=80 * GIB, bandwidth=2.039e12,
    half=312e12, tf32=156e12, fp32=19.5e12, fp8=0, exp_rate=108 * 16 * 1.41e9, additions=196e12 / 320,
)  # fmt: skip
_H100 = _gpu(
    "h100", "sm_90", cores=132, l2=50 * MIB, l2_bandwidth=5.5e12, memory=80 * GIB, bandwidth=3.35e12,
    half=989.4e12, tf32=494.7e12, fp32=66.9e12, fp8=1978.9e12, exp_rate=3.9e12, additions=574.7e12 / 320,
)  # fmt: skip
_H200 = _gpu(
    "h200", "sm_90", cores=132, l2=50 * MIB, l2_bandwidth=5.5e12, memory=141 * GIB, bandwidth=4.8e12,
    half=989.4e12, tf32=494.7e12, fp32=66.9e12, fp8=1978.9e12, exp_rate=3.9e12, additions=574.7e12 / 320,
)  # fmt: skip
_B200 = _gpu(
    "b200", "sm_100", cores=148, l2=126 * MIB, l2_bandwidth=10e12, memory=180 * GIB, bandwidth=7.7e12,
    half=2250e12, tf32=1125e12, fp32=75e12, fp8=4500e12, exp_rate=148 * 16 * 1.85e9,
)  # fmt: skip
_MI300X = _gpu(
    "mi300x", "gfx942", cores=304, l2=256 * MIB, l2_bandwidth=17.2e12, memory=192 * GIB, bandwidth=5.3e12,
    half=1307.4e12, tf32=653.7e12, fp32=163.4e12, fp8=2614.9e12, exp_rate=304 * 16 * 2.1e9, launch=6e-6,
)  # fmt: skip

_BY_DRIVER = {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200, "mi300x": _MI300X}

_WITHOUT_LIMIT = 1 << 40
INTERPRETER = replace(
    _gpu(
        "interpreter", "sm_90", cores=1, l2=50 * MIB, memory=GIB,
        **dict.fromkeys(("l2_bandwidth", "bandwidth", "half", "tf32", "fp32", "fp8", "exp_rate"), 1e9),
    ),
    architecture="interpreter",
    isa=_HOPPER - {"tanh"},
    shared_memory=_WITHOUT_LIMIT,
    registers=_WITHOUT_LIMIT,
)  # fmt: skip
"""Triton's interpreter, which runs GPU kernels on CPU tensors: every form of a kernel, in tiles of any size."""


FIGURES = {"cores": int, "clock": float, "l2": int, "memory": int, "bandwidth": float, "flops": float}
"""Figures of a GPU that `of_architecture` takes: multiprocessors, Hz, bytes, bytes, bytes/s, flop/s of products in half
precision with float32 sums."""

GEFORCE = 0.5
"""Share of its architecture's rate that such products have on a GeForce, as NVIDIA's white papers of Turing, Ampere
(GA102), Ada and Blackwell (RTX) state them: an RTX 4090 makes 165.2 Tflop/s with 128 cores at 2.52 GHz."""


def of_architecture(
    target: str, cores: int = 128, clock: float = 1.5e9, flops: float | None = None, **known: Any
) -> Machine:
    """A GPU of which little more than its architecture is known: the named one of this architecture where there is one
    and nothing else is stated, else one with rates in proportion to cores and clock (Hz).

    flops: of products in half precision with float32 sums, flop/s; by default those of the architecture's data centre
    and workstation parts.
    known: l2, memory (bytes) and bandwidth (bytes/s). An L2 cache moves some 32 bytes per clock and core. It is assumed
    to add the share of it that an A100's does where kernels are made of the same instructions; elsewhere, nothing.
    """
    limits = architecture(target)
    rate = flops or cores * clock * limits.products
    given = {"l2": 32 * MIB, "memory": 16 * GIB, "bandwidth": 1e12} | known
    l2_bandwidth = max(2 * given["bandwidth"], cores * clock * 32)
    alike = target.startswith("sm_") and _number(target) >= 80 and not limits.isa & {"wgmma", "tcgen05"}
    share = _A100.additions / _A100.level("L2").bandwidth if alike else 0.0
    return _gpu(
        target,
        target,
        cores=cores,
        l2_bandwidth=l2_bandwidth,
        additions=share * l2_bandwidth,
        half=rate,
        tf32=rate / 2,
        fp32=cores * clock * 256,
        fp8=2 * rate if "fp8" in limits.isa else 0,
        exp_rate=cores * clock * 16,
        **given,
    )


_4090 = replace(
    of_architecture("sm_89", cores=128, clock=2.52e9, flops=165.2e12, l2=72 * MIB, memory=24 * GIB, bandwidth=1.008e12),
    name="4090",
)
NAMED = {**_BY_DRIVER, "4090": _4090}


def of_target(target: str) -> Machine:
    """A machine with a compilation target ("sm_90", "gfx942"): a named one where there is one."""
    named = {gpu.architecture: gpu for gpu in (_A100, _H200, _B200, _MI300X)}
    return named.get(target) or of_architecture(target)


def of_device(index: int | None = None) -> Machine:
    """Machine of a CUDA or ROCm device: a named one by its driver's name, with its cores and L2 cache, or one from its
    properties. Raises UnknownMachineError where there is no device."""
    import torch

    if not torch.cuda.is_available():
        raise UnknownMachineError(f"there is no GPU here; machines by name: {', '.join(NAMED)}")
    result = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    target = result.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{result.major}{result.minor}"
    for name in re.findall(r"\w+", result.name.lower()):
        if name in _BY_DRIVER and _BY_DRIVER[name].architecture == target:  # an "RTX A1000" is no A100
            known = with_cores(_BY_DRIVER[name], result.multi_processor_count)
            l2 = known.level("L2").capacity if torch.version.hip else result.L2_cache_size
            levels = (replace(level, capacity=l2) if level.name == "L2" else level for level in known.levels)
            return replace(known, levels=tuple(levels))
    cores, clock = result.multi_processor_count, 1e3 * result.clock_rate
    machine = of_architecture(
        target,
        cores=cores,
        clock=clock,
        flops=cores * clock * architecture(target).products * (GEFORCE if "geforce" in result.name.lower() else 1),
        l2=result.L2_cache_size,
        memory=result.total_memory,
        bandwidth=2 * 1e3 * result.memory_clock_rate * result.memory_bus_width / 8,
    )
    return replace(machine, name=result.name)
