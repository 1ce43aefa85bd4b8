"""Versions of torch and Triton that this package was tested with, and the warning for others: once in the log, and by
`fusion doctor`."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re

log = logging.getLogger("fusion.backend")


def untested(version: str) -> str | None:
    """Log line for a version of torch; None for one that this package's metadata admits, which are those that its tests
    were run with (docs/versions.md)."""
    try:
        wanted = next((w for w in importlib.metadata.requires("fusion") or () if re.match(r"torch\b(?!-)", w)), "")
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


def without_facts(version: str) -> str | None:
    """Log line for a version of Triton of whose compiled kernels no facts are recorded."""
    from fusion.planning import gpu_facts

    if gpu_facts.file_of(version).exists():
        return None
    return (
        f"nothing is known of GPU kernels compiled by Triton {version}: their tiles are chosen by an estimate "
        "(python benchmarks/tile_facts.py finds it out)"
    )


@functools.lru_cache(maxsize=16)
def tell(version: str) -> None:
    """Log the line for a version of torch, once in a process."""
    if (said := untested(version)) is not None:
        log.warning("%s; `fusion verify` compares a model with eager mode", said)


@functools.lru_cache(maxsize=16)
def tell_of_triton(version: str) -> None:
    """Log the line for a version of Triton, once in a process."""
    if (said := without_facts(version)) is not None:
        log.warning("%s", said)
