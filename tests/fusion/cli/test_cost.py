"""`fusion cost` from the outside."""

import json
import re

import pytest
import torch
import torch.nn.functional as F

from fusion.cli import COMMANDS, main
from fusion.codegen import reference
from fusion.machine import machine
from fusion.passes.specify.masks import understand
from fusion.planning.from_sizes import attention_of
from fusion.planning.from_spec import problem_of
from fusion.planning.plan import Problem, plan
from fusion.planning.planner import planner_for
from fusion.planning.texts import tile_text
from tests.numerics import assert_as_exact_as_eager, assert_same_in_float64


def test_table_for_the_two_level_model(capsys):
    assert main(["cost", "--N", "1024", "--d", "64", "--M", "1000"]) == 0
    text = capsys.readouterr().out
    assert "M = 1000 elements" in text and "* chosen: small_cache" in text
    for name in ("flash", "key_stationary", "rabe_staats", "split_k", "small_cache", "materialized"):
        assert f"  {name} " in text
    assert "predicted" in text.splitlines()[3]


def test_memory_is_given_in_elements_with_or_without_a_unit(capsys):
    assert main(["cost", "--N", "1024", "--M", "2K"]) == 0
    assert "M = 2048 elements" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["cost", "--M", "64Q"])
    assert "'64Q' is no number of elements" in capsys.readouterr().err


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
    assert "* chosen: block_sparse" in half and "bfloat16 causal" in half and "us" in half
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
    text = capsys.readouterr().out
    assert f"\n  runs {choice}\n" in text and f"* chosen: {plan(problem, name)}\n" in text
    (starred,) = [line for line in text.splitlines() if line.startswith("*  ")]
    assert plan(problem, name).choice == choice and tile_text(plan(problem, name).tile) in starred
    assert main([*arguments, "--schedule", choice.schedule]) == 0
    assert capsys.readouterr().out.endswith(f"\nruns       {choice}\n")


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_heads_that_share_keys_read_them_once_in_decoding(name):
    sizes = {"n_k": 32768, "d": 128, "d_v": 128, "batch": 16, "dtype": "bf16"}
    grouped = plan(Problem(n_q=1, heads=32, heads_kv=8, **sizes), name)
    assert 1 <= grouped.ratio < 1.01 and grouped.compulsory
    single = plan(Problem(n_q=1, heads=8, heads_kv=8, **sizes), name)
    assert grouped.io < 1.01 * single.io


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
    assert main(["cost", "--N", "512", "--M", "20000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "flash" and found["M"] == 20000
    flash = next(item for item in found["schedules"] if item["schedule"] == "flash")
    assert_same_in_float64(flash["io"] / found["bound"], flash["ratio"])
    assert flash["tile"]["B_c"] == 1
    assert found["formula"].endswith(f"= {int(flash['io'])}")


def test_one_schedule_is_explained(capsys):
    assert main(["cost", "--N", "512", "--M", "20000", "--schedule", "key_stationary"]) == 0
    text = capsys.readouterr().out
    assert "schedule   key_stationary" in text and "ratio" in text


def test_symbolic(capsys):
    assert main(["cost", "--symbolic", "--schedule", "flash"]) == 0
    text = capsys.readouterr().out
    assert "B_r* = (M - d - d_v)/(d + d_v + 3)" in text and "4*N**2*d**2/M" in text and "2402.07443" in text


def test_symbolic_for_all_schedules(capsys):
    assert main(["cost", "--symbolic"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}:" in text for name in ("flash", "split_k", "polynomial", "certified_sparse"))


def test_backward(capsys):
    assert main(["cost", "--N", "512", "--M", "20000", "--backward"]) == 0
    assert "backward_small_cache" in capsys.readouterr().out


def test_polynomial_is_weighed_when_features_are_given(capsys):
    assert main(["cost", "--N", "131072", "--d", "8", "--M", "400", "--features", "45"]) == 0
    assert "* chosen: polynomial" in capsys.readouterr().out


def test_crossing_is_printed_for_a_bound(capsys):
    assert main(["cost", "--N", "8192", "--d", "16", "--bound", "1", "--machine", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "degree 3, 969 features" in text and "faster than exact from N = " in text
    assert main(["cost", "--N", "8192", "--d", "8", "--bound", "1", "--M", "400"]) == 0
    assert re.search("by I/O alone from N = [0-9]+ on", capsys.readouterr().out)
    assert main(["cost", "--N", "8192", "--d", "64", "--bound", "9", "--M", "40000"]) == 0
    assert "no polynomial of at most" in capsys.readouterr().out


def test_sweep_writes_a_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    assert main(["cost", "--N", "256", "--d", "16", "--sweep", "M", "--output", str(path)]) == 0
    assert path.exists() and str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--M", "3"], "no schedule for .* M=3 elements; the smallest tiles need: small_cache 4"),
        (["--M", "0"], "0 elements"),
        (["--N", "-4"], "n_q=-4"),
        (["--N", "0"], "n_q=0: there is nothing to move"),
        (["--machine", "z80"], "machine 'z80' is not known; known: cpu"),
        (["--schedule", "flush"], "schedule 'flush' is not known; known: flash"),
        (["--dtype", "int8"], "int8"),
        (["--heads", "6", "--heads-kv", "4"], "6 query heads do not divide over 4"),
        (["--M", "200", "--schedule", "flash"], "its smallest tile needs 259"),
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
