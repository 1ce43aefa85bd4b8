"""What an entry says of its schedule: where there is a kernel, and what the planner makes of it."""

import re
from pathlib import Path

import pytest

from fusion.machine import Machine, machine
from fusion.planning.plan import Problem, plan
from fusion.planning.planner import planner_for
from fusion.planning.schedules import SCHEDULES, schedule
from tests.codegen.mlir.cases import case

PAGE = Path(__file__).parents[3] / "docs" / "cost-model.md"


def test_the_page_says_which_schedules_have_kernels():
    rows = re.findall(r"^\| (`\w+`.*) \|$", PAGE.read_text(), flags=re.M)
    listed = {name: row.split(" | ")[-1] for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert listed == {name: ", ".join(item.kernels) or "none" for name, item in SCHEDULES.items()}


@pytest.mark.parametrize("name", ["cpu", "h200"])
@pytest.mark.parametrize(("program", "sizes"), [("plain", (1, 8, 512, 512)), ("causal", (1, 8, 512, 512))])
def test_what_planners_choose_has_a_kernel(name, program, sizes):
    here = machine(name)
    chosen = planner_for(case(program, "bfloat16").spec, here).choose(sizes)
    assert schedule(chosen.schedule).runs_on(here.kind)


@pytest.mark.parametrize("name", ["cpu", "h200"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_processor_is_planned_with_kernels_alone(name, direction, causal):
    problem = Problem(n_q=512, n_k=512, d=64, d_v=64, causal=causal)
    chosen = plan(problem, name, direction=direction)
    assert schedule(chosen.schedule).runs_on(chosen.machine.kind) and "no kernel" not in str(chosen)


def test_a_plan_without_a_kernel_says_so():
    problem = Problem(n_q=512, n_k=512, d=64, d_v=64)
    assert str(plan(problem, "h200", "key_stationary")).endswith(", no kernel of it")
    assert str(plan(problem, "cpu", "key_stationary")).endswith(", no kernel of it")
    assert str(plan(problem, Machine.two_level(400), "small_cache")).endswith(", no kernel of it")
    assert "no kernel" not in str(plan(problem, Machine.two_level(4000), "flash"))


def test_a_schedule_for_masks_is_the_whole_one_without():
    for item in SCHEDULES.values():
        if item.unmasked:
            whole = schedule(item.unmasked)
            assert item.skips
            assert item.io.subs({symbol: 1 for symbol in item.io.free_symbols if str(symbol) == "s"}) == whole.io
