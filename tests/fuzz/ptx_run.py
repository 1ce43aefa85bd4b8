"""Runs random specs as GPU kernels: compiled by Triton for a target, and executed as PTX (`tests/ptx`)."""

from __future__ import annotations

from collections.abc import Iterable

from tests.fuzz import specs_run
from tests.fuzz.campaign import Record


def run(record: Record, seeds: Iterable[int], seconds: float) -> None:
    specs_run.run(record, seeds, seconds, specs_run.as_ptx)
