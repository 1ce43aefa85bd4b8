"""`fusion doctor`: installed packages, targets that work, and advice for those that do not."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import platform
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from fusion import process
from fusion.machine import MIB

HELP = """What is installed, which targets work, and what to install otherwise.

On every target one small attention is compiled, run, and held against float64."""

EXAMPLES = """examples:
  fusion doctor
  fusion doctor --json

exit codes: 0 at least one target works and nothing that is present is broken; 1 otherwise"""


class Finding(NamedTuple):
    """One line. state: "ok", "missing" (only narrows what can be done) or "broken". advice: what to do, if anything."""

    name: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(arguments: argparse.Namespace) -> int:
    findings = _findings()
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for name, state, found, advice in findings:
            print(f"{state:8} {name:{width}}  {found}" + (f"\n{'':8} {'':{width}}  -> {advice}" if advice else ""))
    works = any(finding.name.startswith("target") and finding.state == "ok" for finding in findings)
    return int(not works or any(finding.state == "broken" for finding in findings))


def _findings() -> list[Finding]:
    """Findings on everything; without torch's compiler, which is not imported where its cache directory cannot be made,
    on what can be looked at."""
    cache = _cache()
    try:
        importlib.import_module("fusion.torch_private.dynamo")
    except Exception as problem:
        if cache.state == "broken":
            return [cache, Finding("torch.compile", "broken", "cannot be imported without that folder", cache.advice)]
        text = f"cannot be imported: {type(problem).__name__}: {problem}"
        return [
            *_packages(),
            cache,
            Finding("torch.compile", "broken", text, "pip install torch, in place of this one"),
        ]
    return [*_packages(), _entry_point(), _cpp_compiler(), cache, _cpu(), _gpu(), _products()]


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


def _unknown_triton(version: str) -> str | None:
    from fusion.machine import of_device

    return process.unknown_triton(version, of_device().architecture if torch.cuda.is_available() else None)


_OF_VERSIONS = {"torch": process.untested_torch, "triton": _unknown_triton}


def _packages() -> list[Finding]:
    result = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    for name, module, advice in _PACKAGES:
        try:
            importlib.import_module(module)
            version = importlib.metadata.version(name)
            result.append(Finding(name, "ok", version, _OF_VERSIONS.get(name, lambda _: None)(version) or ""))
        except importlib.metadata.PackageNotFoundError:
            result.append(Finding(name, "ok", "version unknown"))
        except ModuleNotFoundError:
            result.append(Finding(name, "missing", "not installed", advice))
        except Exception as problem:
            text = f"installed, but cannot be imported: {type(problem).__name__}: {problem}"
            result.append(Finding(name, "broken", text, f"{advice}, in place of this one"))
    return result


def _entry_point() -> Finding:
    names = torch.compiler.list_backends(exclude_tags=())
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="fusion"):
        return Finding("backend", "ok", "torch.compile finds it by its entry point")
    text = 'backend="fusion" works after `import fusion`' if "fusion" in names else "not known to torch"
    return Finding("backend", "missing", text, "pip install . in the checkout, to need no import")


def _cpp_compiler() -> Finding:
    """Inductor's CPU code wants one; ours does not."""
    with contextlib.suppress(Exception):
        from fusion.torch_private.inductor import cpp_compiler

        if path := shutil.which(cpp_compiler()):
            return Finding("C++ compiler", "ok", path)
    advice = 'install g++ or clang++, or use options={"inner": "eager"}; attention itself needs none'
    return Finding("C++ compiler", "missing", "Inductor has none for the rest of a model", advice)


def _cache() -> Finding:
    from fusion import caching

    try:
        folder = caching.directory()
        with tempfile.TemporaryFile(dir=folder):
            pass
        with contextlib.suppress(FileNotFoundError):
            caching.read("_")
    except caching.Distrusted as problem:
        advice = "let nobody else write there, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        return Finding("cache", "missing", f"not used: {problem}", advice)
    except OSError as problem:
        return Finding("cache", "broken", str(problem), "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written")
    result = f"{folder.parent}: {_count(folder.parent)}, of which {_count(folder)} in fusion/"
    if caching.enabled():
        return Finding("cache", "ok", result)
    advice = "unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, to compile each kernel once and not in every process"
    return Finding("cache", "missing", f"{result}; not used", advice)


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
    except Exception as problem:
        return Finding("target cpu", "broken", f"{type(problem).__name__}: {problem}", _REPORT)
    best = [flag for flag in ("amx_fp16", "amx_bf16", "avx512_bf16", "avx512f", "avx2", "neon") if flag in machine.isa]
    about = f"{machine.name}, {machine.cores} cores, {torch.get_num_threads()} threads, {', '.join(best[:2])}"
    return _smoke("cpu", about)


def _products() -> Finding:
    """The library that computes the products of a model's linear layers on the CPU."""
    from fusion.linear import products, speeds

    if reason := products.lacks():
        return Finding("linear layers", "missing", f"all by torch's library: {reason}")
    speed = speeds.of_threads(torch.get_num_threads())
    where = "oneDNN where it is faster" if speed.ever_pays else "all by MKL, which is as fast as oneDNN"
    return Finding("linear layers", "ok", f"{where}; {speed}")


def _gpu() -> Finding:
    if torch.cuda.is_available():
        return _smoke("cuda", torch.cuda.get_device_name())
    advice = "a build of torch with CUDA or ROCm, if there is a GPU"
    if torch.version.cuda or torch.version.hip:
        advice = "a driver for the GPU, if there is one"
    return Finding("target gpu", "missing", "torch sees no GPU", advice)


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
        return Finding(name, "broken", f"{about}: {type(problem).__name__}: {problem}", _REPORT)
    if outcome.refusal is not None:
        state, advice = ("missing", "") if "install" in outcome.refusal else ("broken", _REPORT)  # the reason says it
        return Finding(name, state, f"{about}: not fused: {outcome.refusal}", advice)
    error, allowed = outcome.errors["output"].figures
    text = f"{error:.2g}, allowed {allowed:.2g}"
    if outcome.wrong:
        return Finding(name, "broken", f"{about}: wrong by {text}", _REPORT)
    return Finding(name, "ok", f"{about}: fused, error {text}")
