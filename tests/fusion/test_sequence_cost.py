"""The cost model between devices: formulas, bound, choice, and what `fusion cost` prints of them."""

import itertools
import json
from dataclasses import replace

import pytest

from fusion.cli import main
from fusion.machine import machine
from fusion.planning.plan import plan
from fusion.planning.problem import Problem
from fusion.sequences import SCHEDULES
from fusion.sequences.cost import LINKS, cheapest
from fusion.sequences.schedules import across

GRID = [
    (across(Problem(n_q=n, n_k=n, d=64, d_v=64, heads=heads, heads_kv=heads, **mask), devices), heads % devices == 0)
    for n, heads, devices in itertools.product((1024, 65536), (1, 8, 32), (2, 8, 16))
    for mask in ({}, {"causal": True}, {"causal": True, "window": 256})
]


def test_without_a_mask_no_schedule_sends_less_than_the_bound():
    full = [(traffic, divides) for traffic, divides in GRID if traffic.layouts["ring"].needed.all()]
    assert full
    for traffic, divides in full:
        bound = traffic.bound()
        assert bound is not None and bound > 0
        for schedule in SCHEDULES:
            if divides or schedule != "all_to_all":
                assert traffic.sent(schedule)[0] >= bound, (traffic, schedule)


def test_exchanged_heads_are_near_the_bound():
    traffic = across(Problem(n_q=4096, n_k=4096, d=64, d_v=64, heads=64, heads_kv=64), 8)
    assert traffic.sent("all_to_all")[0] * 8 == traffic.bound() * 9


@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"causal": True, "window": 100}))
def test_the_ring_formula_is_the_mean_over_processes(mask):
    traffic = across(Problem(n_q=1024, n_k=1024, d=64, d_v=32, heads=4, heads_kv=2, **mask), 8)
    for schedule in ("ring", "zigzag"):
        assert traffic.of_ring(schedule).mean(1).tolist() == list(traffic.sent(schedule))


def test_dead_blocks_are_those_of_the_mask():
    causal = across(Problem(n_q=64, n_k=64, d=8, d_v=8, causal=True), 4)
    assert causal.layouts["ring"].needed.tolist() == [[key <= row for key in range(4)] for row in range(4)]
    window = across(Problem(n_q=64, n_k=64, d=8, d_v=8, causal=True, window=8), 4)
    needed = [[row - 1 <= key <= row for key in range(4)] for row in range(4)]
    assert window.layouts["ring"].needed.tolist() == needed


def test_scores_are_counted_on_the_process_that_computes_them():
    problem = Problem(n_q=512, n_k=512, d=8, d_v=8, causal=True)
    layouts, blocks = across(problem, 4).layouts, [64 * 64 * (n + 1) for n in range(8)]
    assert layouts["ring"].pairs.tolist() == [sum(blocks[2 * n : 2 * n + 2]) for n in range(4)]
    assert layouts["zigzag"].pairs.tolist() == [sum(blocks) / 4] * 4


@pytest.mark.parametrize("name", ("h200", "cpu"))
def test_the_schedule_chosen_has_the_least_predicted_time(name):
    target = machine(name)
    for traffic, divides in GRID:
        names = [schedule for schedule in SCHEDULES if divides or schedule != "all_to_all"]
        times = {s: traffic.seconds(s, target, "float32", LINKS[target.kind], trained=True) for s in names}
        assert times[cheapest(traffic, names, target, "float32")] == min(times.values())


@pytest.mark.parametrize("devices", (2, 8, 64))
@pytest.mark.parametrize("n", (4096, 1 << 17, 1 << 20))
def test_devices_are_no_faster_than_as_many_times_one(n, devices):
    problem = Problem(n_q=n, n_k=n, d=128, d_v=128, heads=64, heads_kv=64, dtype="bf16")
    traffic, target = across(problem, devices), machine("h200")
    one = plan(problem, target).time - target.launch
    for schedule in SCHEDULES:
        assert traffic.seconds(schedule, target, "bf16", 450e9, trained=False) > one / devices, schedule


@pytest.mark.parametrize("name", ("h200", "mi300x", "sm_75"))
@pytest.mark.parametrize("dtype", ("float64", "float32", "float16", "fp8"))
@pytest.mark.parametrize("empty", ("heads", "n_q", "n_k", "d", "d_v", ""))
def test_every_size_has_a_time(name, dtype, empty):
    for d in (1, 80, 2048):
        full = across(Problem(n_q=96, n_k=96, d=d, d_v=d, heads=6, heads_kv=2), 2)
        sizes = {} if not empty else {empty: 0} | ({"key_heads": 0} if empty == "heads" else {})
        traffic, target = replace(full, **sizes), machine(name)
        for schedule in SCHEDULES:
            assert 0 < traffic.seconds(schedule, target, dtype, 450e9, trained=True) < 1


def test_a_window_goes_by_the_ring_and_many_heads_change_hands():
    target = machine("h200")
    window = across(
        Problem(n_q=1 << 20, n_k=1 << 20, d=128, d_v=128, heads=32, heads_kv=32, causal=True, window=4096), 64
    )
    assert cheapest(window, ("gather", "ring"), target, "bfloat16") == "ring"
    full = across(Problem(n_q=1 << 20, n_k=1 << 20, d=128, d_v=128, heads=32, heads_kv=32, causal=True), 8)
    assert cheapest(full, SCHEDULES, target, "bfloat16") == "all_to_all"


def test_the_command_prints_what_devices_send(capsys):
    arguments = "cost --N 65536 --d 128 --heads 8 --causal --dtype bf16 --machine h200 --devices 4".split()
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "4 devices, 450 GB/s from each" in text and all(name in text for name in (*SCHEDULES, "bound"))
    assert main([*arguments, "--json", "--link", "25e9"]) == 0
    slow = json.loads(capsys.readouterr().out)["across"]
    assert main([*arguments, "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)["across"]
    assert {row["schedule"] for row in slow} == {*SCHEDULES, "mesh"}
    seconds = [{row["schedule"]: row["training_seconds"] for row in rows} for rows in (slow, fast)]
    assert all(seconds[0][name] > seconds[1][name] for name in SCHEDULES)


@pytest.mark.parametrize("wrong", (["--devices", "0"], ["--devices", "2", "--link", "-1"]))
def test_numbers_of_devices_and_links_are_positive(wrong, capsys):
    assert main(["cost", "--N", "64", *wrong]) == 2
    assert "give positive numbers" in capsys.readouterr().err
