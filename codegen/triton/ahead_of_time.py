"""Kernels compiled for a GPU that is not there: Triton's signature of a launch, registers and spills by ptxas."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.ir.spec import AttentionSpec
from fusion.machine import of_target
from fusion.planning.choice import Tile

from . import module
from .descriptors import boxes
from .dtypes import FLOAT8
from .expressions import Writer

POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "bool": "*i1",
    **{dtype: f"*{name}" for dtype, name in FLOAT8.items()},
    "uint8": "*u8",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
}
"""Triton's names of pointers, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Registers of a kernel's threads (AMD's: vector registers), bytes that a thread spills, and a program's bytes of
    shared memory."""

    kernel: str
    registers: int
    spills: int
    shared: int

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.registers} registers, {self.spills} bytes spilled, "
            f"{self.shared} bytes of shared memory"
        )


def resources(spec: AttentionSpec, function: Any, sizes: tuple[int, int], tile: Tile, target: str) -> Resources:
    """Resources of a spec's kernel for d and d_v, compiled for a GPU. Raises RuntimeError if it is refused."""
    import triton
    from triton.compiler import ASTSource

    kinds, constants, attributes = signature(spec, function.arg_names, sizes, tile, target)
    source = ASTSource(fn=function, signature=kinds, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=gpu_target(target), options={**tile.options(), **module.EXACT})
    if target.startswith("gfx"):
        spills = amd_number(made.asm["amdgcn"], "private_segment_fixed_size")
        found = {"registers": amd_number(made.asm["amdgcn"], "vgpr_count"), "spills": spills}
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = registers_of(assembled(made.asm["ptx"], target, Path(folder) / "kernel"))
    return Resources(kernel=function.__name__, shared=made.metadata.shared, **found)


def registers_of(said: str) -> dict[str, int]:
    """Registers and spilled bytes, from what ptxas says."""
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))
    return {"registers": max(map(int, re.findall(r"Used (\d+) registers", said)), default=0), "spills": spills}


def amd_number(text: str, name: str) -> int:
    """A number of the metadata at the end of AMD's machine code, such as "vgpr_count"; 0 where it is not there."""
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    return int(found[1]) if found else 0


def assembled(ptx: str, target: str, place: Path) -> str:
    """Messages of ptxas about a kernel, which it writes to `place`; Triton brings an assembler for each generation.
    Raises RuntimeError where it refuses the kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"\.target (sm_\w+)", ptx)
    text = place.with_suffix(".ptx")
    text.write_text(ptx)
    name = f"--gpu-name={architecture[1] if architecture else target}"
    command = [get_ptxas(int(target[3:])).path, "-v", name, str(text), "-o", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refused the kernel for {target}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def gpu_target(architecture: str) -> Any:
    """Triton's record of a compilation target ("sm_90", "gfx942")."""
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, of_target(architecture).wave)
    return GPUTarget("cuda", int(architecture[3:]), 32)


def signature(
    spec: AttentionSpec, names: Sequence[str], sizes: tuple[int, int], tile: Tile, target: str
) -> tuple[dict, dict, dict]:
    """Types, constants and alignment of a kernel's arguments: strides are multiples of 16, inner ones 1."""
    writer = Writer(spec=spec)
    dtypes = {writer.operand(n): operand.dtype for n, operand in enumerate(spec.operands)}
    results = {"out": spec.out_dtype, "dout": spec.out_dtype}
    results |= dict.fromkeys(("dead", "tile_list", "tile_counts"), "int32")
    results |= {f"d{'qkv'[n]}": spec.operands[n].dtype for n in range(3)}
    results |= {f"aux{k}": aux.dtype for k, aux in enumerate(spec.aux_outputs)}
    inner = {f"{writer.operand(n)}_stride_{operand.rank - 1}" for n, operand in enumerate(spec.operands)}
    inner |= {f"d{'qkv'[n]}_stride_{spec.operands[n].rank - 1}" for n in range(3)} | {"out_stride_e", "dout_stride_e"}
    inner |= {f"aux{k}_stride_{len(aux.dims) - 1}" for k, aux in enumerate(spec.aux_outputs)}
    given = {**tile.constants(), "PRECISION": "ieee", "UNIT_TANH": "tanh" in of_target(target).isa}
    described = {
        name: f"tensordesc<{POINTERS[box.dtype(spec)][1:]}{block}>"
        for box in boxes(spec, *sizes).values()
        for name, block in box.blocks(given[box.size]).items()
    }
    kinds, constants, attributes = {}, {}, {}
    for position, name in enumerate(names):
        stem = name.removesuffix("_ptr")
        if stem != name:
            kinds[name] = POINTERS[results.get(stem) or dtypes.get(stem) or "float32"]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif name in described:
            kinds[name] = described[name]
        elif name in given or name in inner:
            kinds[name], constants[name] = "constexpr", given.get(name, 1)
        else:
            kinds[name] = "i32"
            if "_stride_" in name:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return kinds, constants, attributes
