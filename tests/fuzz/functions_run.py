"""Runs the functions of many seeds, and tells of those that fail."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict

from tests.fuzz.campaign import BAD, NOTED, Record
from tests.fuzz.check import Result, Verdict, check
from tests.fuzz.functions import program
from tests.fuzz.reduce import reduced
from tests.fuzz.writer import Program

MOST_REDUCED = 25
"""How many failures of a run are made short."""


def run(record: Record, seeds: Iterable[int], seconds: float) -> None:
    """Check the function of each seed. seconds: for making one that fails short."""
    short = 0
    for seed in seeds:
        drawn = program(seed, tied=record.kind == "ties")
        result = check(drawn)
        _count(record, seed, drawn, result)
        if result.verdict not in NOTED and not result.defects:
            continue
        found = {"seed": seed, "verdict": result.verdict.value, "share": min(result.share, 1e300),
                 "message": result.message, "defects": result.defects, "route": drawn.route, "emitter": drawn.emitter,
                 "trained": drawn.trained}  # fmt: skip
        if result.verdict in BAD and seconds and short < MOST_REDUCED:
            short += 1
            smaller, again = reduced(drawn, result, seconds)
            found |= {"program": asdict(smaller), "short message": again.message}
            print(f"\nseed {seed}: {again.verdict.value}: {again.message}\n{text(smaller)}", flush=True)
        record.write(found)


def _count(record: Record, seed: int, drawn: Program, result: Result) -> None:
    valid = result.verdict is not Verdict.INVALID
    seen = valid and drawn.intended
    record.count(
        seed, result.verdict, valid=valid, intended=seen, intended_fused=seen and result.fused > 0,
        intended_not_seen=seen and result.sites == 0, sites=result.sites, fused=result.fused,
        defects=len(result.defects),
    )  # fmt: skip
    record.refusals.update(re.sub(r"\d+|\b[a-z]+(_\w+)?_\d+\b", "*", reason) for reason in result.refusals if seen)
    if valid:
        record.counts.update(f"with {kind}" for kind in drawn.kinds)


def text(program: Program) -> str:
    """A program as one can run it."""
    how = f"# route {program.route}, emitter {program.emitter}, {'trained' if program.trained else 'inference'}"
    return f"{how}\n{program.text}"


def shown(seed: int, tied: bool = False) -> str:
    return f"# seed {seed}\n{text(program(seed, tied))}"
