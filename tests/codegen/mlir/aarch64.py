"""Kernels for 64-bit Arm on any machine: LLVM's `opt` and `llc` (17 or newer) make the object, a cross compiler links
it, and QEMU runs it. On Debian these are the packages llvm-19, gcc-aarch64-linux-gnu and qemu-user-static.

    with aarch64.running():
        kernel = Kernel(spec, tilings_for(spec, aarch64.NEON), aarch64.NEON)
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import gc
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from fusion.codegen.cpu import calling, machine_code
from fusion.codegen.cpu.machine_code import MachineCode
from fusion.codegen.mlir import arm
from fusion.machine import Machine
from fusion.planning.register_tiles import target_of

MACHINE = Machine(
    name="an Arm core", kind="cpu", levels=Machine.detect().levels, fast="L2", cores=1, vector_bytes=16,
    isa=frozenset({"neon", "fma"}),
)  # fmt: skip
NEON = target_of(MACHINE)
PAIRS = target_of(replace(MACHINE, isa=MACHINE.isa | {"bf16"}))
TRIPLE, CORE = "aarch64-linux-gnu", "neoverse-n1"
RUNNER = Path(__file__).with_name("aarch64.c")
POINTER = 1 << 32
"""Slots from here on are addresses: sizes and strides are smaller. Others may be, of a process that lies low."""


@functools.cache
def _tools() -> dict[str, str]:
    """Programs by what they do; those that are missing are left out."""
    numbered = [f"-{version}" for version in range(30, 16, -1)]
    names = {
        "opt": [f"opt{end}" for end in numbered],
        "llc": [f"llc{end}" for end in numbered],
        "link": ["aarch64-linux-gnu-gcc"],
        "run": ["qemu-aarch64-static", "qemu-aarch64"],
    }
    found = {what: next(filter(None, map(shutil.which, choices)), None) for what, choices in names.items()}
    return {what: path for what, path in found.items() if path is not None}


def missing() -> str | None:
    """Why kernels for Arm cannot be run here, or None."""
    without = {"opt", "llc", "link", "run"} - _tools().keys()
    packages = "llvm-19, gcc-aarch64-linux-gnu and qemu-user-static (Debian)"
    return f"no program to {' or '.join(sorted(without))} code for Arm; {packages} have them" if without else None


def llvm_text(source: str) -> str:
    """LLVM's own text of a kernel, as versions since 17 read it."""
    from torch_mlir import ir
    from torch_mlir._mlir_libs import _mlirDialectsLLVM as llvm  # type: ignore[attr-defined]
    from torch_mlir.passmanager import PassManager

    with ir.Context():
        module = ir.Module.parse(source)
        PassManager.parse(machine_code.PIPELINE).run(module.operation)
        text = llvm.translate_module_to_llvmir(module.operation)
    text = re.sub(r"^attributes .*$|(?<=\)) #\d+$", "", text, flags=re.M)
    text = re.sub(r" (immarg|captures\([^)]*\)|range\([^)]*\))", "", text)
    masked = r"(@llvm\.masked\..*\bptr>?)"  # these took the alignment as an argument
    text = re.sub(rf"^(?=declare).*?{masked}", lambda match: f"{match[0]}, i32", text, flags=re.M)
    text = re.sub(rf"{masked} align (\d+) (%\w+)", r"\1 \3, i32 \2", text)
    text = re.sub(
        r"\bfloat (f0x[0-9A-F]+|[+-]?inf|[+-]?qnan|-?[0-9.]+e[+-]\d+)", lambda match: f"float {_number(match[1])}", text
    )
    return "\n".join(map(_without_splats, text.splitlines()))


def _number(text: str) -> str:
    """A float32 as the bits of a float64: without the rounding that LLVM now leaves to the reader."""
    number = text.replace("q", "")
    bits = struct.pack("<I", int(text[3:], 16)) if text.startswith("f0x") else struct.pack("<f", float(number))
    return f"0x{struct.unpack('<Q', struct.pack('<d', *struct.unpack('<f', bits)))[0]:016X}"


def _without_splats(line: str) -> str:
    """Constant vectors with all their elements. Their number stands in front of them."""
    while match := re.search(r"splat \((\w+) ([^)]+)\)", line):
        before = re.findall(rf"<(\d+) x {match[1]}>", line[: match.start()])
        elements = ", ".join([f"{match[1]} {match[2]}"] * int(before[-1]))
        line = f"{line[: match.start()]}<{elements}>{line[match.end() :]}"
    return line


def compiled(source: str, kind: str, triple: str = TRIPLE, core: str = CORE) -> bytes:
    """What LLVM makes of a kernel's text: "asm" or "obj"."""
    tools, target = _tools(), [f"-mtriple={triple}", f"-mcpu={core}", "-O2"]
    if arm.BFDOT in source:
        target.append(f"-mattr={arm.FEATURES}")
    optimise, write = [tools["opt"], *target], [tools["llc"], *target, f"-filetype={kind}"]
    return _output(write, _output(optimise, llvm_text(source).encode()))


def _output(command: Sequence[str], content: bytes = b"") -> bytes:
    """What a program makes of its input."""
    done = subprocess.run(command, input=content, capture_output=True, check=False)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr.decode()[:2000]}"
    return done.stdout


def _program(source: str, folder: str) -> MachineCode:
    """A program that runs the kernel; its path stands for the owner of the code."""
    number = len(list(Path(folder).iterdir()))
    written, program = Path(folder, f"kernel{number}.o"), Path(folder, f"kernel{number}")
    written.write_bytes(compiled(source, "obj"))
    command = [_tools()["link"], "-static", "-O1", str(RUNNER), str(written), "-lm", "-o", str(program)]
    _output(command)
    return MachineCode(owner=program, address=0)


class _Emulated(calling.Function):
    """The parameters of a call and all memory that they point into go to the program, and what it leaves comes back."""

    def __init__(self, code: MachineCode, count: int):
        self.program, self.count = code.owner, count
        self._layout = struct.Struct(f"{count}q")

    def on(self, threads: int) -> Callable[[int], object]:
        assert threads == 1, "the program has one thread"
        return lambda packed: self._run(calling.memory.own.slots[: self.count].tolist())

    def _run(self, slots: Sequence[int]) -> None:
        regions, places = _regions(), []
        starts = [start for start, _ in regions]
        used: dict[int, int] = {}
        for slot in slots:
            number = bisect.bisect_right(starts, slot) - 1
            start, size = regions[number] if number >= 0 else (0, 0)
            if size and start <= slot <= start + size:
                places.append((used.setdefault(number, len(used)), slot - start))
            else:
                assert slot < POINTER, "an address in no tensor"
                places.append((-1, 0))
        chosen = [regions[number] for number in used]
        head = [len(slots), len(chosen), *slots, *(size for _, size in chosen), *(x for place in places for x in place)]
        content = struct.pack(f"{len(head)}q", *head) + b"".join(ctypes.string_at(*region) for region in chosen)
        left = _output([_tools()["run"], "-cpu", "max", str(self.program)], content)
        for start, size in chosen:
            ctypes.memmove(start, left[:size], size)
            left = left[size:]


def _regions() -> list[tuple[int, int]]:
    """Address and bytes of what a parameter may point into."""
    own = calling.memory.own
    counters = [(own.flag_address, 8), (own.counter_address, 16), (own.arrivals_address, 8 * calling.MOST_CUT)]
    tensors = [own.workspace]  # which may be older than a `gc.freeze`
    with contextlib.suppress(ReferenceError):
        tensors += [x for x in gc.get_objects() if type(x) is torch.Tensor and x.device.type == "cpu"]
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by a transform of another test: without memory
    held = [x.untyped_storage() for x in tensors if not wrapped(x)]
    return sorted({*counters, *((storage.data_ptr(), storage.nbytes()) for storage in held if storage.nbytes())})


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Within it, kernels are compiled for Arm and emulated, on one thread."""
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.object(calling, "compile_text", lambda source, entry: _program(source, folder)))
        stack.enter_context(mock.patch.object(calling, "Function", _Emulated))
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        yield
