"""`fusion doctor`: what is installed, which targets work, and what to do about those that do not."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import platform
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fusion import versions
from fusion.machine import MIB

HELP = """What is installed, which targets work, and what to install otherwise.

On every target one small attention is compiled, run, and held against float64."""

EXAMPLES = """examples:
  fusion doctor
  fusion doctor --json

exit codes: 0 at least one target works and nothing that is present is broken; 1 otherwise"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. state: "ok", "missing" (only narrows what can be done) or "broken". advice: what to do, if anything."""

    name: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(arguments: argparse.Namespace) -> int:
    findings = [*_packages(), _entry_point(), _cpp_compiler(), _cache(), _cpu(), _gpu(), _products()]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state:8} {finding.name:{width}}  {finding.found}")
            if finding.advice:
                print(f"{'':8} {'':{width}}  -> {finding.advice}")
    works = any(finding.name.startswith("target") and finding.state == "ok" for finding in findings)
    return int(not works or any(finding.state == "broken" for finding in findings))


_PACKAGES = (
    ("torch", "torch", "pip install torch"),
    ("torch-mlir", "torch_mlir.ir", "pip install torch-mlir, for kernels on CPUs"),
    ("triton", "triton", "pip install triton (Linux), for kernels on GPUs"),
    ("numpy", "numpy", "pip install numpy"),
    ("sympy", "sympy", "pip install sympy"),
    ("rich", "rich", "pip install rich"),
    ("transformers", "transformers", "pip install transformers, for the tests and examples alone"),
    ("matplotlib", "matplotlib", "pip install matplotlib, for plots of the cost model alone"),
)

_OF_VERSIONS = {"torch": versions.untested, "triton": versions.without_facts}


def _packages() -> list[Finding]:
    found = [Finding(name="python", state="ok", found=f"{platform.python_version()} on {platform.platform()}")]
    for name, module, advice in _PACKAGES:
        try:
            importlib.import_module(module)
            version = importlib.metadata.version(name)
            said = _OF_VERSIONS[name](version) if name in _OF_VERSIONS else None
            found.append(Finding(name=name, state="ok", found=version, advice=said or ""))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name=name, state="ok", found="version unknown"))
        except ModuleNotFoundError:
            found.append(Finding(name=name, state="missing", found="not installed", advice=advice))
        except Exception as problem:
            text = f"installed, but cannot be imported: {type(problem).__name__}: {problem}"
            found.append(Finding(name=name, state="broken", found=text, advice=f"{advice}, in place of this one"))
    return found


def _entry_point() -> Finding:
    names = torch.compiler.list_backends(exclude_tags=())
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="fusion"):
        return Finding(name="backend", state="ok", found="torch.compile finds it by its entry point")
    text = 'backend="fusion" works after `import fusion`' if "fusion" in names else "not known to torch"
    return Finding(
        name="backend", state="missing", found=text, advice="pip install . in the checkout, to need no import"
    )


def _cpp_compiler() -> Finding:
    """Inductor's CPU code wants one; ours does not."""
    try:
        from fusion.torch_private.inductor import cpp_compiler

        path = shutil.which(cpp_compiler())
    except Exception:
        path = None
    if path:
        return Finding(name="C++ compiler", state="ok", found=path)
    advice = 'install g++ or clang++, or use options={"inner": "eager"}; attention itself needs none'
    return Finding(
        name="C++ compiler", state="missing", found="Inductor has none for the rest of a model", advice=advice
    )


def _cache() -> Finding:
    from fusion import disk_cache

    try:
        folder = disk_cache.directory()
        with tempfile.TemporaryFile(dir=folder):
            pass
        with contextlib.suppress(FileNotFoundError):
            disk_cache.read("_")
    except disk_cache.Distrusted as problem:
        advice = "let nobody else write there, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        return Finding(name="cache", state="missing", found=f"not used: {problem}", advice=advice)
    except OSError as problem:
        advice = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        return Finding(name="cache", state="broken", found=str(problem), advice=advice)
    ours, all_of_torch = _count(folder), _count(folder.parent)
    found = f"{folder.parent}: {all_of_torch}, of which {ours} in fusion/"
    if disk_cache.enabled():
        return Finding(name="cache", state="ok", found=found)
    advice = "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, to compile each kernel once and not in every process"
    return Finding(name="cache", state="missing", found=f"{found}; not used", advice=advice)


def _count(folder: Path) -> str:
    """Number and size of the files below a folder."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.is_file():
                sizes.append(path.stat().st_size)
    return f"{len(sizes)} files, {sum(sizes) / MIB:.1f} MiB"


def _cpu() -> Finding:
    from fusion.machine import Machine

    try:
        machine = Machine.detect()
        best = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "neon") if flag in machine.isa]
        about = f"{machine.name}, {machine.cores} cores, {torch.get_num_threads()} threads, {', '.join(best[:2])}"
    except Exception as problem:
        return Finding(name="target cpu", state="broken", found=f"{type(problem).__name__}: {problem}", advice=_REPORT)
    return _smoke("cpu", about)


def _products() -> Finding:
    """Which library computes the products of a model's linear layers on the CPU."""
    from fusion.linear import products, speeds

    if reason := products.lacks():
        return Finding(name="linear layers", state="missing", found=f"all by torch's library: {reason}")
    speed = speeds.of_threads(torch.get_num_threads())
    where = "oneDNN where it is faster" if speed.ever_pays else "all by MKL, which is as fast as oneDNN"
    return Finding(name="linear layers", state="ok", found=f"{where} ({speed})")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = (
            "a driver for the GPU, if there is one"
            if built
            else "a build of torch with CUDA or ROCm, if there is a GPU"
        )
        return Finding(name="target gpu", state="missing", found="torch sees no GPU", advice=advice)
    return _smoke("cuda", torch.cuda.get_device_name())


_REPORT = "please report this"


def _smoke(device: str, about: str) -> Finding:
    """One small attention through the backend, against float64."""
    from fusion.api.check import check
    from fusion.cli.bench import causal

    name = "target cpu" if device == "cpu" else "target gpu"
    torch.compiler.reset()
    try:
        outcome = check(causal, [torch.randn(1, 2, 67, 32, dtype=torch.float32, device=device) for _ in range(3)])
    except Exception as problem:
        return Finding(name=name, state="broken", found=f"{about}: {type(problem).__name__}: {problem}", advice=_REPORT)
    if outcome.refusal is not None:
        missing = "install" in outcome.refusal  # the reason says what to do
        state, advice = ("missing", "") if missing else ("broken", _REPORT)
        return Finding(name=name, state=state, found=f"{about}: not fused: {outcome.refusal}", advice=advice)
    found = outcome.errors["output"]
    allowed = f"allowed {found.max_bound:.2g}"
    if outcome.wrong:
        text = f"{about}: wrong by {found.max_error:.2g}, {allowed}"
        return Finding(name=name, state="broken", found=text, advice=_REPORT)
    return Finding(name=name, state="ok", found=f"{about}: fused, error {found.max_error:.2g}, {allowed}")
