"""The tiles that are chosen for the measured variants on four GPUs: all compiled, and which of them spill."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from benchmarks.offline import tile_choices
from fusion.machine import of_target
from fusion.planning import gpu_facts
from fusion.planning.gpu_facts import FEW_SPILLED
from fusion.planning.gpu_feasible import facts_of

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FURTHER = ("sm_86", "sm_103", "sm_120")
"""Targets for which facts of others count (`gpu_facts.SAME_CODE`)."""
WIDTHS = (64, 128, 256)
ROWS = ("full", "causal", "window", "softcap", "alibi", "bias", "table")


@pytest.fixture(autouse=True)
def newest_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "FACTS", gpu_facts.read(gpu_facts.NEWEST))


SPILLING = {
    ("sm_90", "tanh", 128, "attention_backward_keys"),
    ("sm_90", "gather", 256, "attention_backward_queries"),
    ("sm_100", "masked", 128, "attention_forward"),
}
"""(target, kind of program, columns, kernel) whose loop spills: nothing compiled that does not is within `DOUBTED`."""


@pytest.mark.parametrize("name", ROWS)
def test_chosen_tiles_are_compiled_and_do_not_spill(name: str) -> None:
    """In the main loop, but for kernels that are named here."""
    spilling = set()
    for target in TARGETS:
        for d in WIDTHS:
            for chosen in tile_choices.choices_of(tile_choices.Cell(name=name, d=d), of_target(target)):
                fact = chosen.fact
                assert fact is not None and fact.shared <= chosen.machine.shared_memory, chosen.name
                assert not fact.serialised, chosen.name
                if fact.spilled > FEW_SPILLED:
                    spilling.add((target, chosen.work.program, d, chosen.work.kernel))
                    others = facts_of(chosen.work, chosen.machine).values()
                    assert len(others) > 1, f"{chosen.name}: nothing else was tried"
    assert spilling <= SPILLING, spilling - SPILLING


@pytest.mark.long
@pytest.mark.parametrize("target", (*TARGETS, *FURTHER))
@pytest.mark.parametrize("name", ROWS)
def test_facts_are_those_of_kernels(name: str, target: str) -> None:
    """Every kernel compiled again as a call compiles it: variants that share their facts with another included."""
    machine = of_target(target)
    for d in WIDTHS:
        cell = tile_choices.Cell(name=name, d=d)
        for chosen in tile_choices.choices_of(cell, machine):
            kernel = chosen.work.kernel
            facts = tile_choices.compiled(cell, machine, [kernel], {kernel: chosen.tile})[kernel]
            spilled = facts.main.spills / len(facts.main.body)
            named = (target, chosen.work.program, d, kernel) in SPILLING
            assert spilled <= FEW_SPILLED or named, (chosen.name, facts.main.spills)
            assert not facts.main.serialised, chosen.name
