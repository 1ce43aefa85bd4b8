"""Facts about the CPU that this process runs on: caches, width and instruction set from the operating system. Levels of
memory, and their sizes."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.errors import OptionError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """A level of memory. `capacity` in bytes, per core (SM, CU) unless `shared`; `bandwidth` in bytes/s, all cores'."""

    name: str
    capacity: int
    bandwidth: float
    shared: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name} {_size(self.capacity)}{'' if self.shared else ' per core'} at {self.bandwidth / 1e9:.0f} GB/s"
        )


def _size(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


_ISA = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512vbmi",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", )  # fmt: skip


LIMITS = {
    "avx2": (("avx512", "amx"), "-avx512f"),
    "avx512": (("avx512_", "amx"), "-avx512bf16,-avx512fp16"),
    "avx512_bf16": (("amx",), ""),
}
"""Values of FUSION_MAX_ISA -> (prefixes of the processor's flags that are not used then, features for LLVM)."""


def limit() -> str:
    """Value of FUSION_MAX_ISA; empty where it is not set. Raises OptionError."""
    value = os.environ.get("FUSION_MAX_ISA", "").lower()
    if value and value not in LIMITS:
        raise OptionError(f"FUSION_MAX_ISA={value} names no instruction set; use one of {', '.join(LIMITS)}, or none")
    return value


def left_out() -> str:
    """Features of the processor that compiled code may not use, as LLVM writes them."""
    return LIMITS[limit()][1] if limit() else ""


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _linux_caches() -> dict[str, int]:
    """Data cache sizes in bytes by level name, from sysfs; empty where there is none."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / part).read_text().strip() for part in ("level", "type", "size"))
        except OSError:
            continue
        if kind in ("Data", "Unified"):
            match = re.fullmatch(r"(\d+)([KMG]?)", size)
            caches[f"L{level}"] = int(match[1]) * {"": 1, "K": KIB, "M": MIB, "G": GIB}[match[2]] if match else 0
    return caches


def cpuinfo() -> dict[str, str]:
    """Fields of /proc/cpuinfo for the first processor; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^([^\t:\n]+?)\s*:\s*(.*)$", text.split("\n\n")[0], flags=re.M))


@functools.cache
def identity() -> list[str]:
    """Properties that a compiler's choice of instructions depends on: maker, model and flags; empty if unknown."""
    fields = cpuinfo()
    known = [fields.get(name, "") for name in ("vendor_id", "cpu family", "model", "flags")]
    return known if all(known) else []


def _linux_cpu() -> tuple[str, set[str], float]:
    """Model name and flags from /proc/cpuinfo, and the clock in Hz (0 where it is not stated)."""
    fields = cpuinfo()
    if not fields:
        return platform.processor() or platform.machine(), set(), 0.0
    flags = {str(flag) for flag in (fields.get("flags") or fields.get("Features") or "").split()}
    if "asimd" in flags:
        flags.update(("neon", "fma"))
    return fields.get("model name", platform.machine()), flags, _clock(fields)


def _clock(fields: dict[str, str]) -> float:
    """The highest clock, or (virtual machines state only the present one) about the present one: plans, and with them
    the last bits of results, are the same in every process."""
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        return round(float(fields.get("cpu MHz", 0)), -2) * 1e6


def core_count(root: Path = Path("/")) -> int:
    """Cores that this process may use. Hardware threads of a core share its multiply-add units, so that they count as
    one; the quota of a cgroup may allow for fewer. root: of the file system."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {_line(root / topology.format(number)) or str(number) for number in processors}
    return min([len(cores), *_quotas(root)])


def _quotas(root: Path) -> Iterator[int]:
    """Whole cores that the processor time of each cgroup of this process suffices for, where it is limited."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        unified, names = not controllers, controllers.split(",")
        if not unified and "cpu" not in names:
            continue
        base = root / "sys/fs/cgroup" / controllers
        place = base / path.strip("/")
        for folder in (place, *place.parents):
            if unified:
                quota, period = [*_line(folder / "cpu.max").split(), "", ""][:2]
            else:
                quota, period = _line(folder / "cpu.cfs_quota_us"), _line(folder / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit() and int(period):
                yield max(1, -(-int(quota) // int(period)))
            if folder == base:
                break


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mac_cpu() -> tuple[str, set[str], float, dict[str, int]]:
    """Model name, flags, clock, caches from sysctl (Apple silicon states no clock)."""
    lines = _run("sysctl", "machdep.cpu", "hw").splitlines()
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = {flag.lower().replace(".", "_") for flag in fields.get("machdep.cpu.features", "").split()}
    flags |= {flag.lower() for flag in fields.get("machdep.cpu.leaf7_features", "").split()}
    if platform.machine() == "arm64":
        flags.update(("neon", "fma"))
        flags |= {"bf16"} if fields.get("hw.optional.arm.FEAT_BF16") == "1" else set()
    keys = {"L1": "hw.perflevel0.l1dcachesize", "L2": "hw.perflevel0.l2cachesize", "L3": "hw.l3cachesize"}
    sizes = {level: fields.get(key, fields.get(key.replace("perflevel0.", ""))) for level, key in keys.items()}
    caches = {level: int(size) for level, size in sizes.items() if size and int(size)}
    name, clock = fields.get("machdep.cpu.brand_string", platform.machine()), fields.get("hw.cpufrequency", 0)
    return name, flags, float(clock or 0), caches


@functools.cache
def amx_enabled() -> bool:
    """Ask the operating system for the tile registers, once per process; False where it refuses."""
    from fusion.torch_private.devices import init_amx

    try:
        return init_amx()
    except (AttributeError, RuntimeError):
        return False


def _with_tiles(isa: frozenset[str]) -> frozenset[str]:
    """Flags with all of AMX that this process may use: Linux does not list products of float16."""
    from fusion.torch_private.devices import amx_has_float16

    if "amx_tile" not in isa:
        return isa
    if not amx_enabled():
        return frozenset(flag for flag in isa if not flag.startswith("amx"))
    try:
        return isa | {"amx_fp16"} if amx_has_float16() else isa
    except (AttributeError, RuntimeError):
        return isa


def read() -> dict[str, Any]:
    """The fields of the `Machine` that this process may use. Peak: cores x 2 multiply-add ports x lanes x 2 x clock;
    unknowns are low."""
    if platform.system() == "Darwin":
        name, flags, clock, caches = _mac_cpu()
    else:
        (name, flags, clock), caches = _linux_cpu(), _linux_caches()
    beyond = LIMITS[limit()][0] if limit() else ()
    isa = _with_tiles(frozenset(flag for flag in flags & {*_ISA, "neon", "bf16"} if not flag.startswith(beyond)))
    width = 64 if "avx512f" in isa else 32 if "avx2" in isa else 16
    clock = clock or 2.5e9
    cores = core_count()
    caches = {"L1": 32 * KIB, "L2": 512 * KIB} | caches
    lanes = width // 4
    peak = cores * (2 if "fma" in isa else 1) * lanes * 2 * clock
    # Sustained bytes a clock and core: two loads from L1, half a vector from L2, a quarter from the shared cache, 4
    # from memory.
    per_clock = {"L1": 2 * width, "L2": width / 2, "L3": width / 4}
    levels = [
        MemoryLevel(name=key, capacity=size, bandwidth=cores * clock * per_clock[key], shared=key == "L3")
        for key, size in sorted(caches.items())
        if key in per_clock
    ]
    levels.append(MemoryLevel(name="memory", capacity=_memory_size(), bandwidth=cores * clock * 4, shared=True))
    return {
        "name": name,
        "kind": "cpu",
        "levels": tuple(levels),
        "fast": "L2",
        "cores": cores,
        "vector_bytes": width,
        "isa": isa,
        "matrix_flops": tuple(_cpu_rates(peak, isa, cores, clock).items()),
        "exp_rate": cores * lanes * clock / 7,  # a degree-5 polynomial: about 14 vector operations on two ports
        "launch": 5e-6,
        "clock": clock,
    }


def _cpu_rates(peak: float, isa: frozenset[str], cores: int, clock: float) -> dict[str, float]:
    """Multiply-add rates by dtype: dot products do two a lane; AMX 1024 flop a clock and core (Intel's manual)."""
    bf16 = cores * 1024 * clock if "amx_bf16" in isa else 2 * peak if isa & {"avx512_bf16", "bf16"} else peak
    float16 = bf16 if "amx_fp16" in isa else peak
    return {"float32": peak, "float64": peak / 2, "bfloat16": bf16, "float16": float16, "tfloat32": peak}


def _memory_size() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * GIB
