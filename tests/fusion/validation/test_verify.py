"""`fusion.verify`, `fusion verify`, `fusion repro`, scripts of the dump, and torch's minifier with this backend."""

import functools
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

import fusion
from fusion.api.check import check
from fusion.api.compare import compare_results
from fusion.caching import BoundedCache
from fusion.cli import main
from fusion.errors import ComparisonError
from fusion.runtime.guards import GuardedKernel, GuardedTraining
from fusion.validation import sites
from tests.fusion.validation import faults
from tests.numerics import assert_same

verify = functools.partial(fusion.verify, options={"inner": "eager"})


class Model(torch.nn.Module):
    """Two attentions of one kind and one of another, whose operands are pieces of one tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.project = torch.nn.Linear(16, 48, dtype=dtype)

    def forward(self, x, mask=None):
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            live = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            s = torch.where(live, q @ k.mT, float("-inf"))
            x = x + (s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2).flatten(2)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.fixture
def wrong_kernels(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """Kernels of which a corner is off, in the forward."""
    right = GuardedKernel.__call__

    def wrong(self, operands, sizes):
        result = right(self, operands, sizes)
        result[..., -1:, -1:] += 0.5
        return result

    with monkeypatch.context() as patch:
        patch.setattr(GuardedKernel, "__call__", wrong)
        yield patch


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [False, True])
def test_every_attention_is_compared_on_what_it_reads(dtype, gradients):
    found = verify(Model(dtype), torch.randn(2, 9, 16, dtype=dtype), gradients=gradients)
    assert found.right and len(found.sites) == 3 and not found.wrong
    for number, site in enumerate(found.sites):
        assert site.number == number and "test_verify.py" in site.place and "in forward" in site.place
        assert site.outcome is not None and site.outcome.refusal is None
        names = list(site.outcome.errors)
        assert names[0] == "output" and len(names) == (4 if gradients else 1)
    assert sum(site.script is not None for site in found.sites) == 1
    assert "3 of 3 fused attentions right, of 3 in the model" in str(found) and "right  the whole model" in str(found)


@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_kernel_is_found_in_its_attention_and_in_the_whole():
    found = verify(Model(), torch.randn(2, 9, 16))
    assert not found.right and len(found.wrong) == 3
    assert "WRONG  output: error 0.5" in str(found) and "WRONG  the whole model" in str(found)


def test_a_wrong_gradient_of_one_number_is_found(monkeypatch):
    """Several upstream gradients are looked at where one is beyond the rule, and it is wrong for all of them."""

    def scaled(q, k, v, factor):
        return torch.softmax(q @ k.mT * factor, -1) @ v

    right = GuardedTraining.backward

    def wrong(self, *given):
        *others, last = right(self, *given)
        return [*others, last * 1.01]

    given = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    assert not verify(scaled, *given, torch.tensor(0.4), gradients=True).wrong
    torch._dynamo.reset()
    monkeypatch.setattr(GuardedTraining, "backward", wrong)
    (site,) = verify(scaled, *given, torch.tensor(0.4), gradients=True).wrong
    assert len([name for name, error in site.outcome.errors.items() if error.share > 1]) == 1


@pytest.mark.parametrize("name", ["scale twice", "mask off by one", "wrong sign of the scale"])
def test_a_wrong_analysis_is_found_as_well(monkeypatch, tmp_path, name):
    """What validation refuses to put in place counts as wrong, too, in the script as well."""
    program, further, _, put_in = (faults.FOUND | faults.INJECTED)[name]
    put_in(monkeypatch)
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())
    found = verify(program, *faults.inputs(), *further)
    (site,) = found.wrong
    assert site.outcome is not None and site.outcome.defect and "would differ from eager" in str(site)
    assert _exit_code(tmp_path, site.script()) == 1


def test_what_is_not_compared_says_why():
    def program(q, k, v):
        dropped = F.dropout(torch.softmax(q @ k.mT, -1), 0.5) @ v
        return dropped, torch.softmax(torch.cumsum(q @ k.mT, -1), -1) @ v

    found = verify(program, *faults.inputs())
    assert [site.outcome for site in found.sites] == [None, None] and found.right
    assert "not fused: it draws random numbers" in str(found.sites[0]) and "cumsum" in str(found.sites[1])
    assert found.whole.error is None and "not compared. It draws random numbers." in str(found)


def test_a_model_that_fails_by_itself():
    with pytest.raises(Exception, match="mat1 and mat2|must match|size"):
        verify(torch.nn.Linear(3, 3), torch.randn(2, 4))
    with pytest.raises(ComparisonError, match="fails in eager mode"):
        compare_results(torch.nn.Linear(3, 3), (torch.randn(2, 4),), {}, {})


def test_checkpointed_parts_are_looked_into():
    def layer(x):
        return torch.softmax(x @ x.mT, -1) @ x

    def program(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) + 1

    (site,) = verify(program, torch.randn(2, 9, 4), gradients=True).sites
    assert site.outcome is not None and not site.outcome.wrong and len(site.outcome.errors) > 1


def test_of_several_calls_the_worst_counts(monkeypatch):
    right = GuardedKernel.__call__
    called = []

    def wrong_once(self, operands, sizes):
        called.append(sizes)
        return right(self, operands, sizes) + (len(called) == 2)

    monkeypatch.setattr(GuardedKernel, "__call__", wrong_once)

    def layer(x):
        return torch.softmax(x @ x.mT, -1) @ x

    def program(x):
        for _ in range(3):
            torch._dynamo.graph_break()
            x = layer(x)
        return x

    found = verify(program, torch.randn(2, 9, 4))
    assert len(found.wrong) == 1 and "WRONG  output: error 1, allowed" in str(found)
    assert len({tuple(sizes) for sizes in called}) == 1 and len(called) >= 3


# Scripts


def _exit_code(folder: Path, text: str) -> int:
    """Of a script, run in this process, where faults have been put in."""
    file = folder / "case.py"
    file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(file), run_name="__main__")
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize("random", [False, True])
def test_the_script_is_right_or_wrong_as_the_model_was(tmp_path, wrong_kernels, random):
    found = verify(Model(), torch.randn(2, 9, 16), gradients=False, site=1)
    script = found.sites[1].script
    assert script is not None and found.sites[0].script is None
    text = script(random=random)
    assert ("DATA" in text) == (not random) and "normal_(" in text or not random
    assert _exit_code(tmp_path, text) == 1
    wrong_kernels.undo()
    torch._dynamo.reset()
    assert _exit_code(tmp_path, text) == 0


def test_the_script_has_the_models_own_tensors_with_their_strides(tmp_path):
    read = {}

    class Kept(torch.nn.Module):
        def forward(self, q, k, v, live):
            read.update(q=q, k=k, v=v, live=live)
            return torch.softmax((q @ k.mT).masked_fill(~live, -1e9), -1) @ v

    q, k, v = torch.randn(3, 2, 9, 4).transpose(1, 2).contiguous().transpose(1, 2)
    found = verify(Kept(), q, k, v, torch.rand(9, 9) > 0.4)
    (site,) = found.sites
    space = _space(site.script(), tmp_path)
    given = space["inputs"]()
    for value in read.values():
        (same,) = [other for other in given if other.shape == value.shape and torch.equal(other, value)]
        assert same.stride() == value.stride()
    space = _space(site.script(random=True), tmp_path)
    masks = [value for value in space["inputs"]() if value.dtype is torch.bool]
    assert_same(masks, [read["live"]])


def _space(text: str, folder: Path) -> dict:
    (folder / "script.py").write_text(text)
    return runpy.run_path(str(folder / "script.py"), run_name="script")


def test_the_script_is_one_file_that_runs_elsewhere(tmp_path):
    found = verify(Model(torch.bfloat16), torch.randn(2, 9, 16, dtype=torch.bfloat16))
    text = next(site.script for site in found.sites if site.script)()
    (tmp_path / "case.py").write_text(text)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "case.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right  output: error")


def test_the_dump_has_a_script_of_every_distinct_attention(tmp_path, monkeypatch, wrong_kernels):
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    with torch.no_grad():
        torch.compile(Model(), backend="fusion", dynamic=True, options={"inner": "eager"})(torch.randn(2, 9, 16))
    monkeypatch.delenv("FUSION_DUMP")
    scripts = sorted((tmp_path / "graph_000").glob("*_attention_*.py"))
    assert len(scripts) == 2
    assert [_exit_code(tmp_path, script.read_text()) for script in scripts] == [1, 1]


# The command line


MODEL = """
import torch

def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v

def plain(q, k, v):
    return q + k + v

def inputs():
    return tuple(torch.randn(1, 2, 9, 4) for _ in range(3))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> str:
    (tmp_path / "verified_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "verified_model.py")


def test_verify_and_repro_of_a_right_model(capsys, model):
    assert main(["verify", f"{model}:attend"]) == 0
    assert "1 of 1 fused attentions right" in capsys.readouterr().out
    assert main(["verify", f"{model}:attend", "--gradients", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["right"] and len(found["sites"][0]["errors"]) == 4 and found["whole"]["failure"] is None
    assert main(["repro", f"{model}:attend"]) == 0
    assert "wrote repro.py" in capsys.readouterr().out and Path("repro.py").is_file()


@pytest.mark.usefixtures("wrong_kernels")
def test_verify_and_repro_of_a_wrong_kernel(capsys, model, tmp_path):
    assert main(["verify", f"{model}:attend"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert main(["repro", f"{model}:attend", "--json", "--output", "case.py"]) == 1
    assert json.loads(capsys.readouterr().out) | {"place": ""} == {
        "file": "case.py", "site": 0, "place": "", "wrong": True,
    }  # fmt: skip
    assert _exit_code(tmp_path, Path("case.py").read_text()) == 1


def test_a_wrong_request(capsys, model):
    for name, more, message in (
        ("plain", (), "has no attention that fusion would run; its attentions: none was found"),
        ("attend", ("--site", "3"), "has no attention 3 that fusion would run; its attentions: [0]"),
        ("attend", ("--output", "no/folder/x.py"), "cannot be written: .*name another file"),
        (
            "attend",
            ("--tensor", "2x2"),
            "cannot be run on these inputs: verify was asked to run attend, which fails in eager mode: TypeError",
        ),
    ):
        assert main(["repro", f"{model}:{name}", *more]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert re.search(message.replace("[0]", r"\[0\]"), told), told


# torch's minifier


@pytest.mark.usefixtures("wrong_kernels")
def test_torchs_minifier_makes_a_wrong_graph_smaller(tmp_path, monkeypatch):
    def program(q, k, v):
        return torch.sigmoid(torch.softmax((torch.relu(q) + 1) @ k.mT, -1) @ v) * 2

    monkeypatch.setenv("TORCH_COMPILE_DEBUG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    minified = {"repro_after": "dynamo", "repro_level": 4, "debug_dir_root": str(tmp_path)}
    with torch.no_grad(), torch._dynamo.config.patch(minified):
        with pytest.raises(BackendCompilerFailed, match="Bad accuracy detected"):
            torch.compile(program, backend="fusion")(*faults.inputs())
        (launcher,) = tmp_path.rglob("minifier_launcher.py")
        torch._dynamo.reset()
        monkeypatch.setattr("fusion.inner_compiler.compile_rest", lambda module, *_: module)  # for speed
        monkeypatch.setattr(sys, "argv", [str(launcher)])
        runpy.run_path(str(launcher), run_name="__main__")
    text = (tmp_path / "repro.py").read_text()
    assert "softmax" in text and "sigmoid" not in text and "relu" not in text


def test_operands_that_the_graph_makes_by_operations_named_like_pythons_own(tmp_path):
    """`sum`, `max` or `and` name a node of the graph, and no argument of a function."""

    class Made(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.rand(8) + 0.5) for _ in "ab")
            self.table, self.flags = torch.nn.Parameter(torch.rand(9, 8)), torch.rand(9, 9, 3) > 0.2

        def scales(self):
            a, b = self.a, self.b
            yield from (
                (a * b).sum(),
                a.max(),
                a.amax(),
                a.min(),
                a.mean(),
                a.norm(),
                a @ b,
                self.table[2, 3],
                a.prod(),
            )
            yield from (
                self.table.max(-1).values,
                self.table.sum(-1),
                self.table.index_select(0, torch.arange(9))[:, :1],
            )
            yield from (a.cumsum(0)[0], a.sort().values[0], a.std(), torch.stack([a, b]).sum(), torch.dot(a, b).abs())
            yield from (torch.linalg.vector_norm(a), a.logsumexp(0), a.var(), a.median(), F.linear(a, self.table)[0])

        def masks(self):
            yield from (
                self.flags.any(-1),
                self.flags.all(-1),
                self.flags.sum(-1) > 1,
                self.flags.long().cumsum(-1)[..., -1] > 1,
            )

        def forward(self, q, k, v):
            for scale in self.scales():
                q = q + torch.softmax(q @ k.mT * scale, -1) @ v
            for mask in self.masks():
                q = q + torch.softmax((q @ k.mT).masked_fill(~mask, -1e9), -1) @ v
            return q

    model, inputs = Made(), [torch.randn(1, 2, 9, 8) / 3 for _ in range(3)]
    found = verify(model, *inputs, gradients=True, site=0)
    assert len(found.sites) == 26 and not found.wrong, found
    for site in found.sites:
        assert site.outcome is not None and site.outcome.refusal is None, site
    assert any("gradient of sum_1" in title for title in found.sites[0].outcome.errors)
    space = _space(found.sites[0].script(), tmp_path)
    names = list(inspect.signature(space["attention"]).parameters)
    outcome = check(space["attention"], space["inputs"](), gradients=names[:4])
    assert [*outcome.errors] == ["output", *(f"gradient of {name}" for name in names[:4])]


@pytest.mark.parametrize("narrow", [False, True])
def test_results_in_float64_are_judged_where_something_on_the_way_is_not(narrow):
    """A model that computes in float64 throughout has no more exact reference; one that widens its result has."""

    def attend(q, k, v):
        return ((q @ k.mT).softmax(-1) @ v).double()

    dtype = torch.float32 if narrow else torch.float64
    found = fusion.verify(attend, *(torch.randn(1, 2, 40, 16, dtype=dtype) for _ in "qkv"))
    assert found.right and (found.whole.error is not None) == narrow
    assert ("the whole model was not compared" in str(found)) == ("not fused" in str(found)) == (not narrow)
