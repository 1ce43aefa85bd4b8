"""Machines: named ones, the one this runs on, the two-level model."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fusion.errors import OptionError, ProblemError, UnknownMachineError
from fusion.machine import (
    INTERPRETER,
    NAMED,
    Machine,
    MemoryLevel,
    cpu,
    dtype_bytes,
    dtype_name,
    machine,
    of_target,
    with_cores,
)
from fusion.planning.cpu import cpu_time
from fusion.planning.problem import Problem
from fusion.planning.register_tiles import target_of
from fusion.torch_private import devices
from tests.numerics import assert_same_in_float64


@pytest.mark.parametrize("name", NAMED)
def test_named_machines_are_whole(name):
    found = machine(name.upper())
    assert found is NAMED[name] and found.name == name and found.kind == "gpu"
    assert found.shared_memory > 0 and found.registers > 0 and found.launch > 0
    bandwidths = [level.bandwidth for level in found.levels]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert found.flops("bf16") >= found.flops("float32")


def test_published_figures():
    h200 = machine("h200")
    assert (h200.cores, h200.flops("bfloat16"), h200.main.bandwidth, h200.exp_rate) == (132, 989.4e12, 4.8e12, 3.9e12)
    assert h200.fast_elements("bfloat16") == (227 + 256) * 1024 // 2
    assert machine("mi300x").cores == 304


def test_a_gpu_by_its_target_and_figures():
    assert machine("sm_90") is machine("h200") and machine("gfx1100").architecture == "gfx1100"
    gpu = machine("sm_89:cores=46,clock=2.5e9,l2=36e6,memory=12e9,bandwidth=0.5e12")
    assert (gpu.cores, gpu.level("L2").capacity, gpu.main.bandwidth) == (46, 36_000_000, 0.5e12)
    assert gpu.flops("float16") == 46 * 2.5e9 * 1024 and "fp8" in gpu.isa
    assert machine("sm_89:cores=128,clock=2.52e9,flops=165e12").flops("bf16") == 165e12
    for name in ("sm_89:corse=46", "sm_89:cores", "sm_89:cores=many"):
        with pytest.raises(UnknownMachineError, match="figures are cores=NUMBER, clock=NUMBER"):
            machine(name)


def test_unknown_machine_lists_the_known():
    with pytest.raises(UnknownMachineError) as caught:
        machine("h20")
    for name in ("cpu", *NAMED):
        assert name in str(caught.value)
    with pytest.raises(UnknownMachineError, match="no memory level 'L4'"):
        machine("h200").level("L4")


def _device(
    monkeypatch, called: str, cores: int = 132, capability: tuple[int, int] = (9, 0), l2: int = 50 << 20
) -> None:
    """One GPU, as its driver describes it: clocks in kHz."""
    import torch

    properties = SimpleNamespace(
        name=called, major=capability[0], minor=capability[1], multi_processor_count=cores, clock_rate=1_500_000,
        memory_clock_rate=8_000_000, memory_bus_width=256, L2_cache_size=l2, total_memory=24 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.mark.parametrize(
    ("called", "cores", "name", "capability", "l2"),
    [
        ("NVIDIA H200", 132, "h200", (9, 0), 50 << 20),
        ("NVIDIA H100 80GB HBM3", 132, "h100", (9, 0), 50 << 20),
        ("NVIDIA A100-SXM4-80GB", 108, "a100", (8, 0), 40 << 20),
    ],
)
def test_the_gpu_of_this_computer_by_its_name(monkeypatch, called, cores, name, capability, l2):
    _device(monkeypatch, called, cores, capability, l2)
    assert machine("cuda") == machine("cuda:0") == NAMED[name]


@pytest.mark.parametrize(
    ("called", "capability"),
    [("NVIDIA RTX A1000 Laptop GPU", (8, 6)), ("NVIDIA GH200 480GB", (9, 0)), ("NVIDIA A100X", (8, 0))],
)
def test_names_that_contain_another(monkeypatch, called, capability):
    """A smaller device, or one with other memory: it is what its driver says."""
    _device(monkeypatch, called, 16, capability)
    found = machine("cuda")
    assert (found.name, found.architecture, found.cores) == (called, f"sm_{capability[0]}{capability[1]}", 16)


def test_a_named_gpu_has_the_cache_that_its_driver_says(monkeypatch):
    _device(monkeypatch, "NVIDIA H200", l2=60 << 20)
    assert machine("cuda").level("L2").capacity == 60 << 20


def test_a_part_of_a_named_gpu_has_the_cores_that_it_has(monkeypatch):
    _device(monkeypatch, "NVIDIA H100 PCIe", 114)
    found = machine("cuda")
    assert found.cores == 114
    assert_same_in_float64(found.flops("bfloat16"), 989.4e12 * 114 / 132)


def test_a_gpu_that_is_not_listed_is_what_its_driver_says(monkeypatch):
    _device(monkeypatch, "NVIDIA L4", 58, (8, 9))
    found = machine("cuda")
    assert (found.name, found.architecture, found.cores) == ("NVIDIA L4", "sm_89", 58)
    assert found.shared_memory == 99 << 10 and found.registers == 256 << 10 and found.wave == 32
    assert found.main.bandwidth == 2 * 8e9 * 256 / 8 and found.flops("bfloat16") == 58 * 1.5e9 * 1024


def test_a_geforce_multiplies_at_half_the_rate(monkeypatch):
    _device(monkeypatch, "NVIDIA GeForce RTX 4090", 128, (8, 9))
    assert machine("cuda").flops("bfloat16") == 128 * 1.5e9 * 512


def test_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnknownMachineError, match="there is no GPU here"):
        machine("cuda")


def test_architectures():
    """Limits of a compilation target; of one that is not listed, those of the next older one."""
    assert of_target("sm_90").shared_memory == 227 << 10 and "wgmma" in of_target("sm_90a").isa
    assert of_target("sm_86").shared_memory == 99 << 10 and of_target("sm_88").shared_memory == 163 << 10
    assert of_target("gfx942").wave == 64 and of_target("gfx1101").wave == 32
    assert INTERPRETER.interpreted and not of_target("sm_80").interpreted
    for name in ("sm_50", "gfx8", "risc"):
        with pytest.raises(UnknownMachineError, match="known: sm_70"):
            of_target(name)


def test_detected_cpu():
    found = Machine.detect()
    assert found is Machine.detect() is machine(None) is machine("cpu")
    assert found.kind == "cpu" and 1 <= found.cores <= os.cpu_count()
    capacities = [level.capacity for level in found.levels]
    assert (
        capacities[0] >= 8 * 1024
        and found.levels[-1].name == "memory"
        and "L2" in [level.name for level in found.levels]
    )
    assert found.vector_bytes in (16, 32, 64)
    assert (found.vector_bytes == 64) == ("avx512f" in found.isa)
    assert 1e9 < found.flops("float32") < 1e15


def _files(root, **contents: str):
    """A file system with these files; their names have two underscores for a slash."""
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_hardware_threads_of_a_core_count_once(monkeypatch, tmp_path):
    """Eight of them, of which this process may use five, on four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 7}, raising=False)
    assert cpu.core_count(tmp_path) == 5
    place = "sys__devices__system__cpu__cpu{}__topology__thread_siblings_list"
    topology = {place.format(n): f"{n % 4},{n % 4 + 4}" for n in range(8)}
    assert cpu.core_count(_files(tmp_path, **topology)) == 4


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpu.max": "max 100000"}, 8),
        ({"proc__self__cgroup": "0::/", "sys__fs__cgroup__cpu.max": "250000 100000"}, 3),
        ({"proc__self__cgroup": "0::/a/b", "sys__fs__cgroup__a__cpu.max": "50000 100000",
          "sys__fs__cgroup__a__b__cpu.max": "400000 100000"}, 1),
        ({"proc__self__cgroup": "2:cpuset:/\n1:cpu,cpuacct:/job",
          "sys__fs__cgroup__cpu,cpuacct__job__cpu.cfs_quota_us": "200000",
          "sys__fs__cgroup__cpu,cpuacct__job__cpu.cfs_period_us": "100000"}, 2),
        ({"proc__self__cgroup": "1:cpu:/", "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1",
          "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000"}, 8),
        ({"proc__self__cgroup": "0::/elsewhere"}, 8),
    ],
)  # fmt: skip
def test_a_quota_of_processor_time_counts_as_cores(monkeypatch, tmp_path, files: dict[str, str], cores: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpu.core_count(_files(tmp_path, **files)) == cores


def test_detection_without_an_operating_system_that_helps(monkeypatch):
    import fusion.machine.cpu as cpu

    monkeypatch.setattr(cpu, "_linux_caches", dict)
    monkeypatch.setattr(cpu, "_linux_cpu", lambda: ("unknown", set(), 0.0))
    monkeypatch.setattr(cpu.platform, "system", lambda: "Linux")
    found = Machine(**cpu.read())
    assert found.vector_bytes == 16 and found.isa == frozenset()
    assert found.level("L2").capacity == 512 * 1024


def test_detection_on_a_mac(monkeypatch):
    import fusion.machine.cpu as cpu

    text = (
        "machdep.cpu.brand_string: Apple M2\nhw.perflevel0.l1dcachesize: 131072\nhw.perflevel0.l2cachesize: 16777216\n"
    )
    text += "hw.optional.arm.FEAT_BF16: 1\n"
    monkeypatch.setattr(cpu.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(cpu, "_run", lambda *command: text)
    found = Machine(**cpu.read())
    assert found.name == "Apple M2" and found.isa == {"neon", "fma", "bf16"}
    assert (found.level("L1").capacity, found.level("L2").capacity) == (131072, 16777216)


def test_impossible_machines_are_refused():
    level = MemoryLevel(name="L1", capacity=1, bandwidth=1.0)
    base = {"name": "x", "kind": "cpu", "levels": (level,), "fast": "L1", "cores": 1, "vector_bytes": 16}
    cases = (({"kind": "fpga"}, "known: cpu, gpu"), ({"cores": 0}, "at least one core"), ({"fast": "L9"}, "no level"))
    for wrong, message in cases:
        with pytest.raises(ProblemError, match=message):
            Machine(**{**base, **wrong})


def test_fewer_cores_are_slower():
    one = with_cores(machine("h200"), 66)
    assert one.cores == 66 and one.flops("bf16") == machine("h200").flops("bf16") / 2
    assert one.main.bandwidth == machine("h200").main.bandwidth
    assert with_cores(machine("h200"), 10**6).cores == 132


def test_dtypes():
    import torch

    assert [dtype_name(dtype) for dtype in (torch.bfloat16, "bf16", "bfloat16")] == ["bfloat16"] * 3
    assert dtype_bytes(torch.float32) == 4
    with pytest.raises(ProblemError, match="known: float64"):
        dtype_name(torch.int32)


@pytest.mark.parametrize(
    ("limit", "width", "absent"), [("avx2", 32, "avx512"), ("avx512", 64, "avx512_"), ("avx512_bf16", 64, "amx")]
)
def test_the_instruction_set_can_be_limited(limit, width, absent, monkeypatch):
    monkeypatch.setenv("FUSION_MAX_ISA", limit)
    found = Machine(**cpu.read())
    assert not [flag for flag in found.isa if flag.startswith(absent)]
    assert found.vector_bytes <= width


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("float16", [True, False])
def test_tiles_of_float16_are_asked_for(tiles: bool, float16: bool, monkeypatch):
    """Linux does not list them. Where they are, float16 is predicted to take more time than bfloat16 by its softmax
    alone, and less than in two planes."""
    flags = {"avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16", "fma", "amx_tile", "amx_bf16"}
    monkeypatch.setattr(cpu, "_linux_cpu", lambda: ("a Xeon", flags, 2e9))
    monkeypatch.setattr(cpu, "amx_enabled", lambda: tiles)
    monkeypatch.setattr(devices, "amx_has_float16", lambda: float16)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = Machine(**cpu.read())
    target = target_of(found)
    assert (target.amx, target.float16) == (tiles, tiles and float16)
    tile = {"B_r": np.array([64]), "B_c": np.array([256])}
    problems = [Problem(n_q=512, n_k=512, d=64, d_v=64, dtype=dtype) for dtype in ("float16", "bfloat16")]
    times = [cpu_time(found, problem, tile, target.register_tile(1), skip=False) for problem in problems]
    differ = {name for name in times[0].resources if times[0].at(0)[name] != times[1].at(0)[name]}
    assert (differ == {"softmax"}) == target.float16
    if target.float16:
        planes = replace(found, isa=found.isa - {"amx_fp16"})
        split = cpu_time(planes, problems[0], tile, target.register_tile(2), skip=False)
        assert times[1].total < times[0].total < split.total
    assert (found.flops("float16") == found.flops("bfloat16")) == target.float16


def test_a_limit_that_is_none(monkeypatch):
    monkeypatch.setenv("FUSION_MAX_ISA", "sse9")
    with pytest.raises(OptionError, match="FUSION_MAX_ISA=sse9 names no instruction set; use one of avx2, avx512"):
        Machine(**cpu.read())


@pytest.mark.skipif(
    "avx512f" not in Machine.detect().isa or shutil.which("objdump") is None,
    reason="needs a processor that has more than AVX2, and objdump",
)
def test_limited_kernels_have_no_instruction_beyond(monkeypatch, tmp_path):
    """None that LLVM chooses by itself either: mask registers and all from 16 on are AVX-512's alone."""
    pytest.importorskip("torch_mlir", reason="kernels need torch-mlir")
    from fusion.codegen.cpu import machine_code
    from fusion.codegen.mlir.kernel import emit
    from fusion.planning.register_tiles import tilings_for
    from tests.codegen.mlir.cases import TARGETS, case

    spec, target = case("plain", "float32", 8).spec, TARGETS["avx2"]
    source = emit(spec, tilings_for(spec, target)[0], target, 8, 8).source

    def newer(limit: str) -> set[str]:
        monkeypatch.setenv("FUSION_MAX_ISA", limit)
        file = tmp_path / "kernel.o"
        file.write_bytes(machine_code._object(machine_code._engine(source)))
        listing = subprocess.run(["objdump", "-d", file], capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"%zmm\d+|%k[0-7]|%[xy]mm(?:1[6-9]|[23]\d)", listing))

    assert newer("") and not newer("avx2")
