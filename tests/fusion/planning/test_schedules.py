"""The schedules of kernels: what planners choose is one of them, and their formulas are those of the theory."""

import re
from pathlib import Path

import pytest
import sympy

from examples import io_model
from examples.io_model.schedule import SIZES, TILES
from fusion.machine import machine
from fusion.planning import planner_for
from fusion.planning.schedules import SCHEDULES
from tests.codegen.mlir.cases import case

PAGE = Path(__file__).parents[3] / "docs" / "cost-model.md"


def test_the_page_says_which_schedules_have_kernels():
    rows = re.findall(r"^\| (`\w+`.*) \|$", PAGE.read_text(), flags=re.M)
    listed = {name: row.split(" | ")[-1] for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert listed == {name: ", ".join(item.kernels) or "none" for name, item in io_model.SCHEDULES.items()}


@pytest.mark.parametrize("name", ["cpu", "h200"])
@pytest.mark.parametrize(("program", "sizes"), [("plain", (1, 8, 512, 512)), ("causal", (1, 8, 512, 512))])
def test_what_planners_choose_has_a_kernel(name, program, sizes):
    here = machine(name)
    chosen = planner_for(case(program, "bfloat16").spec, here).choose(sizes)
    assert chosen.schedule in SCHEDULES and here.kind in io_model.schedule(chosen.schedule).kernels


@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas_are_those_that_are_proved_on_the_simulated_memory(name):
    """The sums of the phases' I/O, and the largest of their footprints. Backwards of the theory have no mask, and
    one tile for dK and dV."""
    own, theory = SCHEDULES[name], io_model.schedule(name)
    symbols = {str(symbol): symbol for symbol in (*SIZES, *TILES.values())}
    if own.passes:
        symbols |= {"live": 1, "live_q": 1, "live_v": 1, "B_u": TILES["B_r"], "B_v": TILES["B_c"]}
    read = lambda text: sympy.sympify(text, locals={**symbols, "ceil": sympy.ceiling, "max": sympy.Max})
    assert sympy.expand(read(own.io) - theory.io) == 0
    assert own.skips == (theory.skips or own.passes > 0)
    footprint, largest = read(own.footprint), sympy.Max(*(phase.footprint for phase in theory.phases))
    for step in range(1, 20):
        at = {symbol: 1 + (7 * k + 11 * step) % 97 for k, symbol in enumerate((*SIZES, *TILES.values()))}
        assert footprint.subs(at) == largest.subs(at)


def test_a_schedule_for_masks_is_the_whole_one_without():
    for item in io_model.SCHEDULES.values():
        if item.unmasked:
            whole = io_model.schedule(item.unmasked)
            assert item.skips
            assert item.io.subs({symbol: 1 for symbol in item.io.free_symbols if str(symbol) == "live"}) == whole.io
