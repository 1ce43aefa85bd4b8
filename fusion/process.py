"""State of the process: settings that the analysis is isolated from, the log, MKL, freed memory, versions of torch and
Triton.

`FUSION_LOGS=info` (or debug, warning) shows the log of this package on standard error, without touching torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import logging
import os
import re
from collections.abc import Iterator

import torch

from fusion.torch_private.autograd import hooks_allowed, recording
from fusion.torch_private.tensors import unset_fake_temporarily
from fusion.torch_private.tracing import disable_proxy_modes_tracing, without_function_modes

log = logging.getLogger("fusion.backend")


@contextlib.contextmanager
def without_autograd_settings() -> Iterator[None]:
    """Switch off the caller's autograd settings during the analysis: hooks on saved tensors, of which a checkpoint
    counts some, or their ban, and anomaly mode, which made-up values would trigger."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks_allowed(), hooks(_same, _same), torch.autograd.set_detect_anomaly(False):
        yield


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """Plain torch on real tensors, whatever compilation is in progress."""
    with (
        unset_fake_temporarily(),
        disable_proxy_modes_tracing(),
        torch.inference_mode(False),
        torch.enable_grad(),
        recording(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


VECTORIZED = (
    torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.log,
    torch.log10, torch.log2, torch.sin, torch.sqrt, torch.tan, torch.tanh, torch.trunc,
)  # fmt: skip
"""Vector functions of MKL, which torch uses for exp, tanh and others on x86."""


@functools.cache
def initialize_mkl() -> None:
    """Call each vector function once, on one element; once in a process, before the first graph is compiled.

    MKL looks for a function's code at the first call. Where several threads make that call at the same time, MKL 2024.2
    may let one of them run code of low accuracy, with relative errors of 5e-5 (pytorch/pytorch#188792). Then torch's
    result is wrong, once in a process. An earlier call by one thread prevents it.
    """
    with without_function_modes(), unset_fake_temporarily(), disable_proxy_modes_tracing():
        for dtype in (torch.float32, torch.float64):
            element = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for function in VECTORIZED:
                function(element)


LARGEST_BLOCK, MOST_RETAINED = 256 << 20, 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@functools.cache
def retain_freed_memory() -> None:
    """Let glibc retain up to 512 MiB that were freed, for blocks of up to 256 MiB; once in a process, before the first
    graph is compiled.

    Otherwise blocks of more than 32 MiB return to the system as soon as they are freed, and so does what exceeds 62 MiB
    at the end of the heap; the next call of a model then has page faults for all of it, which take a tenth of its time.
    Settings of the user's stay in force.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not own:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, MOST_RETAINED)


LEVELS = ("debug", "info", "warning", "error")


def configure_log(value: str | None = None) -> None:
    """Apply FUSION_LOGS. A value that is no level is reported, and changes nothing."""
    value = os.environ.get("FUSION_LOGS", "") if value is None else value
    if not value:
        return
    package = logging.getLogger("fusion")
    if value.lower() not in LEVELS:
        package.warning("FUSION_LOGS=%r is not a level; use one of %s", value, ", ".join(LEVELS))
        return
    package.setLevel(value.upper())
    if not any(isinstance(handler, _Handler) for handler in package.handlers):
        package.addHandler(_Handler())


class _Handler(logging.StreamHandler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))


def untested_torch(version: str) -> str | None:
    """Log line for a version of torch; None for one that this package's metadata admits, which are those that its tests
    were run with (docs/versions.md)."""
    try:
        wanted = next(
            (w for w in importlib.metadata.requires("fusion-attention") or () if re.match(r"torch\b(?!-)", w)), ""
        )
    except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed says nothing
        return None
    bounds = dict(re.findall(r"(>=|<)([\d.]+)", wanted))
    least, beyond = (_minor(bounds[sign]) if sign in bounds else None for sign in (">=", "<"))
    own = _minor(version)
    if (least is None or own >= least) and (beyond is None or own < beyond):
        return None
    return f"torch {version} was not tested with this version of fusion, which asks for {wanted.partition(';')[0]}"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def unknown_triton(version: str, architecture: str | None = None) -> str | None:
    """Log line for a version of Triton without facts of compiled kernels, for an architecture of GPUs or for any."""
    from fusion.planning import gpu_facts

    if (source := gpu_facts.source(version, architecture)) == version:
        return None
    target = f" for {architecture}" if architecture else ""
    by = f"what Triton {source} makes of them" if source else "an estimate"
    return (
        f"nothing is known of GPU kernels{target} compiled by Triton {version}: their tiles are chosen by {by} "
        f"(python -m benchmarks.offline.tile_facts{f' --targets {architecture}' if architecture else ''} finds it out)"
    )


@functools.lru_cache(maxsize=16)
def warn_of_torch(version: str) -> None:
    """Log the line for a version of torch, once in a process."""
    if (warning := untested_torch(version)) is not None:
        log.warning("%s; `fusion verify` compares a model with eager mode", warning)


@functools.lru_cache(maxsize=16)
def warn_of_triton(version: str, architecture: str) -> None:
    """Log the line for a version of Triton and an architecture, once in a process."""
    if (warning := unknown_triton(version, architecture)) is not None:
        log.warning("%s", warning)
