"""`fusion cost` from the outside."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusion.cli import COMMANDS, main
from fusion.cli.cost import elements
from fusion.codegen import reference
from fusion.machine import machine, with_cores
from fusion.machine.processors import of_such_cores
from fusion.passes.specify.masks import understand
from fusion.planning import planner_for
from fusion.planning.plan import peaks_text, plan
from fusion.planning.problem import Problem, attention_of, problem_of
from tests.numerics import assert_as_exact_as_eager, assert_same_in_float64


def test_a_machine_predicts_time_and_honours_the_dtype(capsys):
    arguments = [
        "cost",
        "--N",
        "4096",
        "--d",
        "128",
        "--heads",
        "32",
        "--heads-kv",
        "8",
        "--causal",
        "--machine",
        "h200",
    ]
    assert main([*arguments, "--dtype", "bf16"]) == 0
    half = capsys.readouterr().out
    assert "schedule   block_sparse" in half and "bfloat16 causal" in half and "us" in half
    assert main([*arguments, "--dtype", "fp32"]) == 0
    assert capsys.readouterr().out != half


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", {}),
        ("--causal", {"causal": True}),
        ("--causal --window 100", {"causal": True, "window": 100}),
        ("--heads 4 --heads-kv 2", {"heads": 4, "heads_kv": 2}),
    ],
)
@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_a_processors_plan_is_the_choice_that_kernels_take(capsys, name, words, sizes):
    """The same object as in the report of a model that writes the attention out, and in its kernel's heading."""
    arguments = ["cost", "--N", "512", "--d", "64", "--machine", name, *words.split()]
    problem = Problem(n_q=512, n_k=512, d=64, d_v=64, **sizes)
    choice = planner_for(attention_of(problem), machine(name)).choose(())
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{plan(problem, name).explain()}\nruns       {choice}\n"
    assert plan(problem, name).choice == choice


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_heads_that_share_keys_read_them_once_in_decoding(name):
    sizes = {"n_k": 32768, "d": 128, "d_v": 128, "batch": 16, "dtype": "bf16"}
    grouped = plan(Problem(n_q=1, heads=32, heads_kv=8, **sizes), name)
    assert 1 <= grouped.ratio < 1.01 and grouped.compulsory
    single = plan(Problem(n_q=1, heads=8, heads_kv=8, **sizes), name)
    assert grouped.io < 1.01 * single.io


def test_the_fast_memory_can_be_given(capsys):
    for text, count in (("8192", 8192), ("8K", 8192), ("1M", 1 << 20)):
        assert main(["cost", "--N", "512", "--d", "16", "--M", text]) == 0
        assert f": M = {count} elements of float32" in capsys.readouterr().out
    assert main(["cost", "--M", "4K", "--machine", "h200"]) == 2 and main(["cost", "--M", "0"]) == 2
    assert "M is a positive number, and of a CPU" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "--causal", "--d 16 --N 300", "--dtype bf16 --heads 2", "--N 1"])
@pytest.mark.parametrize("count", ["64", "2000", "8K", "20K", "64K"])
def test_a_tile_fits_the_fast_memory_or_is_refused(capsys, words, count):
    code = main(["cost", "--N", "1024", "--M", count, *words.split(), "--json"])
    out, error = capsys.readouterr()
    if code:
        assert f"--M {elements(count)}: the smallest tile that kernels have here" in error and code == 2
        return
    found = json.loads(out)
    assert found["footprint_elements"] <= found["capacity_elements"] == elements(count) and found["ratio"] >= 1


def cost_of(capsys, words):
    assert main(["cost", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_queries_are_the_last_ones_unless_an_offset_is_given(capsys, name):
    words = f"--N 1 --Nk 32768 --d 128 --window 4096 --causal --machine {name}"
    assert cost_of(capsys, words)["bound_elements"] == 4096 * 256 + 256
    assert cost_of(capsys, f"{words} --offset 0")["bound_elements"] == 512
    i, j = torch.arange(60)[:, None], torch.arange(100)
    for offset, given in ((40, ""), (7, "--offset 7")):
        live = int(((j <= i + offset) & (j > i + offset - 30)).sum())
        found = cost_of(capsys, f"--N 60 --Nk 100 --d 16 --window 30 --causal --machine {name} {given}")
        assert round(found["flops"]) == 2 * live * 32
    assert main(["cost", "--offset", "3"]) == 2
    assert "--offset 3 moves no mask" in capsys.readouterr().err


def test_shares_above_the_peak_say_why():
    there = replace(machine("cpu"), clock=2.6e9, isa=machine("cpu").isa - {"amx_bf16"})
    found = plan(Problem(n_q=512, n_k=512, d=64, d_v=64), there)
    least = found.flops / found.rates[0]
    assert "99 % of the multiply-add peak at the nominal 2.6 GHz," in peaks_text([found], least / 0.99)
    above = "110 % of the multiply-add peak at the nominal 2.6 GHz (above 100 %: the processor runs faster than that),"
    assert above in peaks_text([found], least / 1.1)


@pytest.mark.parametrize("name", ["cpu", "h200"])
@pytest.mark.parametrize("sizes", [{}, {"causal": True}, {"causal": True, "window": 100}])
def test_sizes_take_the_time_of_the_attention_that_they_stand_for(name, sizes):
    problem = Problem(n_q=2048, n_k=2048, d=64, d_v=64, heads=4, heads_kv=4, **sizes)
    assert plan(problem, name).resources == plan(attention_of(problem), name).resources


def test_the_formula_gives_its_number_again():
    for n in (1000, 2048, 3001):
        found = plan(Problem(n_q=n, n_k=n, d=64, d_v=64, causal=True, window=700), "h200")
        text, _, value = found.formula.rpartition(" = ")
        assert round(eval(text, {"ceil": math.ceil})) == round(float(value)) == round(found.io)


def test_a_density_bounds_what_every_such_mask_moves(capsys):
    words = "--N 512 --d 64 --density 0.2 --machine cpu"
    found = cost_of(capsys, words)
    assert_same_in_float64(found["bound_elements"], 0.2 * 512 * 64 + 512 * 64 + 0.2 * 512 * 128)
    assert found["bound_kind"].startswith("compulsory for every mask of this density")
    assert found["ratio"] >= 1


@pytest.mark.parametrize("name", ["cpu", "h200"])
@pytest.mark.parametrize("causal", [False, True])
def test_shares_of_the_peaks_are_those_of_the_machines_figures(name, causal):
    n, d, heads, here = 1024, 64, 6, machine(name)
    found = plan(Problem(n_q=n, n_k=n, d=d, d_v=d, heads=heads, heads_kv=2, causal=causal), here)
    here = with_cores(here, torch.get_num_threads()) if name == "cpu" else here
    scores = heads * (n * (n + 1) / 2 if causal else n * n)
    assert_same_in_float64(found.peaks(2e-3)[0], scores * 2 * 2 * d / here.flops("float32") / 2e-3)
    moved = 4 * (heads * n * 2 * d + 2 * n * 2 * d)
    assert_same_in_float64(found.peaks(2e-3)[1], moved / here.main.bandwidth / 2e-3)
    assert "% of the multiply-add peak" in found.explain() and "of the memory's bandwidth" in found.explain()


def test_the_attention_of_a_problem_is_that_problem():
    problem = Problem(n_q=60, n_k=100, d=16, d_v=24, batch=2, heads=6, heads_kv=3, causal=True, diagonal=40, window=30)
    spec = attention_of(problem)
    found = problem_of(spec, ())
    assert spec.mask == understand(spec.score)
    assert (found.batch, found.heads, found.heads_kv, found.d_v) == (2, 6, 3, 24)
    q, k, v = torch.randn(2, 6, 60, 16), torch.randn(2, 3, 100, 16), torch.randn(2, 3, 100, 24)
    i, j = torch.arange(60)[:, None] + 40, torch.arange(100)
    live = (j <= i) & (j > i - 30)

    def eager(*qkv):
        return F.scaled_dot_product_attention(*qkv, attn_mask=live, enable_gqa=True)

    exact = eager(q.double(), k.double(), v.double())
    assert_as_exact_as_eager(reference.run(spec, [q, k, v], ()), eager(q, k, v), exact)


def test_json(capsys):
    assert main(["cost", "--N", "512", "--heads", "64", "--machine", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == "flash" and found["tile"]["B_r"] >= 16 and found["seconds"] > 0
    assert found["formula"].endswith(f"= {int(found['io_elements'] / 64)}") and "tiles of" in found["runs"]
    assert found["flops"] == 64 * 4 * 512 * 512 * 64 and found["peak_flops_per_second"] == 66.9e12
    assert_same_in_float64(found["share_of_peak"], found["flops"] / found["seconds"] / 66.9e12)
    assert_same_in_float64(
        found["share_of_bandwidth"], found["compulsory_bytes"] / found["seconds"] / found["bandwidth_bytes_per_second"]
    )
    assert found["ratio"] == found["io_elements"] / found["bound_elements"]
    assert found["limited_by"] in found["resource_seconds"]


def test_crossing_is_printed_for_a_bound(capsys):
    assert main(["cost", "--N", "8192", "--d", "16", "--bound", "1", "--machine", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "degree 3, 969 features" in text and "faster than exact from N = " in text
    assert main(["cost", "--N", "8192", "--d", "64", "--bound", "9"]) == 0
    assert "no polynomial of at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--N", "-4"], "n_q=-4"),
        (["--N", "0"], "n_q=0: there is nothing to move"),
        (["--machine", "z80"], "machine 'z80' is not known; known: cpu"),
        (["--dtype", "int8"], "int8"),
        (["--heads", "6", "--heads-kv", "4"], "6 query heads do not divide over 4"),
    ],
)
def test_impossible_requests_end_with_a_message_and_code_2(capsys, arguments, message):
    assert main(["cost", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fusion cost: ")
    assert re.search(message, error)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["cost", "--help"])
    assert caught.value.code == 0
    assert "examples:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("dtype", "name"), [("float64", "cpu"), ("tf32", "cpu"), ("fp8", "cpu"), ("float64", "h200"), ("tf32", "h200")]
)
def test_dtypes_that_no_kernel_multiplies_get_one_advice(capsys, dtype, name):
    assert main(["cost", "--dtype", dtype, "--machine", name]) == 2
    advice = (
        "products of kernels take float32 (as tf32 where torch's switches allow it), bfloat16, float16 and, on GPUs "
    )
    assert advice in capsys.readouterr().err


def test_times_of_this_computer_are_those_on_torchs_threads(monkeypatch):
    problem, here = Problem(n_q=1024, n_k=1024, d=64, d_v=64, heads=8, heads_kv=8), machine("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: here.cores)
    every = plan(problem)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = plan(problem)
    assert (one.machine.cores, every.machine.cores) == (1, here.cores) and one.choice == every.choice
    assert one.time > every.time or here.cores == 1
    assert plan(problem, of_such_cores(here, 64 * here.cores)).machine.cores == 64 * here.cores
