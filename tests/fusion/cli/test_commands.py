"""`fusion explain`, `bench` and `doctor` as a shell sees them: output, JSON, exit codes, messages."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fusion
from fusion import caching, cli
from fusion.cli import COMMANDS, main
from fusion.cli import doctor as doctor_command
from fusion.runtime import kernels
from fusion.runtime.guards import GuardedKernel

MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, q, k, v, scale=1.0):
        return torch.softmax(q @ k.mT * scale, -1) @ v

def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v

def returns_more(q, k, v):
    s = q @ k.mT
    w = torch.softmax(s, -1)
    return w @ v, w, s

def plain(x):
    return torch.relu(x)

def build():
    return Model()

def broken_build():
    raise RuntimeError("no weights")

def inputs():
    return tuple(torch.randn(1, 2, 9, 4) for _ in range(3))

named = {"q": torch.randn(1, 2, 9, 4), "k": torch.randn(1, 2, 9, 4), "v": torch.randn(1, 2, 9, 4), "scale": 0.5}
single = torch.randn(3, 3)
number = 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "some_model.py").write_text(MODEL)
    return str(tmp_path / "some_model.py")


def test_without_a_command_there_is_help_and_the_version_is_told(capsys):
    assert main([]) == 0 and "fusion [-h]" in (help_text := capsys.readouterr().out)
    assert all(name in help_text for name in COMMANDS)
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith(f"fusion {fusion.__version__}, torch ")


def test_a_report_shows_itself_in_a_notebook_and_in_one_line():
    report = fusion.explain(lambda q, k, v: torch.softmax(q @ k.mT / 5, -1) @ v, *torch.randn(3, 1, 2, 9, 4))
    assert repr(report) == "<Report: 1 of 1 attentions fused; print it, or to_html(path)>"
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "&lt;h1&gt;" in shown and "<script" not in shown


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", ["Model", "attend", "build"])
def test_explain_of_a_class_a_function_and_a_factory(capsys, model, name):
    code, out, _ = run(capsys, "explain", f"{model}:{name}")
    assert code == 0 and "1 of 1 attention site fused" in out and "some_model.py" in out


def test_explain_takes_keyword_arguments_and_a_page(capsys, model, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, "explain", f"{model}:Model", "--inputs", "named", "--html", str(page))
    assert code == 0 and "s * 0.5" in out and page.read_text().startswith("<!doctype html>")
    code, out, _ = run(capsys, "explain", f"{model}:attend", "--inputs", f"{model}:inputs")
    assert code == 0


def test_explain_of_tensors_by_shape(capsys, model):
    shape = "1x2x8x4:bfloat16"
    code, out, _ = run(capsys, "explain", f"{model}:attend", "--tensor", shape, "--tensor", shape, "--tensor", shape)
    assert code == 0 and "bfloat16" in out


def test_explain_of_a_module_by_name(capsys, model, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(model).parent))
    assert run(capsys, "explain", "some_model:attend")[0] == 0


def test_explain_prints_json(capsys, model):
    code, out, _ = run(capsys, "explain", f"{model}:returns_more", "--json")
    report = json.loads(out)
    assert code == 0 and report["fused"] == 0 and report["total"] == 1
    assert report["sites"][0]["advice"].startswith("Use nothing elsewhere")
    _, out, _ = run(capsys, "explain", f"{model}:attend", "--json", "--compare")
    report = json.loads(out)
    (attention,) = report["sites"][0]["attentions"]
    assert attention["program"] == "softmax(s / 4)" and attention["plan"]["io_elements"] > 0
    assert report["comparison"]["entries"]["fusion"]["seconds"] > 0


def test_options_of_the_backend(capsys, model):
    for command in ("explain", "verify"):
        code, out, _ = run(capsys, command, f"{model}:attend", "--option", "emitter=reference", "--json")
        assert code == 0 and json.loads(out)["sites"]
    attentions = json.loads(run(capsys, "explain", f"{model}:attend", "--option", "emitter=reference", "--json")[1])
    assert attentions["sites"][0]["attentions"][0]["kernel_lines"] == 0
    code, _, err = run(capsys, "explain", f"{model}:attend", "--option", "emiter=reference")
    assert code == 2 and "Did you mean 'emitter'?" in err
    code, _, err = run(capsys, "bench", f"{model}:attend", "--option", "strict")
    assert code == 2 and "--option 'strict' has no value; write NAME=VALUE" in err
    code, _, err = run(capsys, "explain", f"{model}:attend", "--option", "verify=7")
    assert code == 2 and "option 'verify' is 7" in err


def test_the_page_names_model_command_and_versions(capsys, model, tmp_path):
    page = tmp_path / "page.html"
    run(capsys, "explain", f"{model}:attend", "--option", "tile_maps=never", "--html", str(page))
    text = page.read_text()
    assert "<title>fusion report: attend</title>" in text and f"fusion explain {model}:attend" in text
    assert f"torch {torch.__version__.partition('+')[0]}" in text and "tile_maps" in text


def test_explain_shows_what_a_gpu_would_run_without_one(capsys, model):
    assert main(["explain", f"{model}:attend", "--machine", "h200"]) == 0
    text = capsys.readouterr().out
    assert "machine    h200" in text and "runs       tiles of" in text and "tl.dot(" in text
    assert re.search(r"# attention_forward: \d+ registers, \d+ bytes spilled, \d+ bytes of shared memory", text)
    assert main(["explain", f"{model}:attend", "--machine", "sm_89", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["gpu"]
    assert entry["machine"] == "sm_89" and "tl.dot(" in entry["source"]
    assert main(["explain", f"{model}:attend", "--machine", "cpu"]) == 2
    assert "machine 'cpu' is no GPU; name one (h200)" in capsys.readouterr().err


def test_one_option_writes_the_kernels_of_this_computer_or_of_a_gpu(capsys, model, tmp_path):
    path = tmp_path / "kernel"
    assert main(["explain", f"{model}:attend", "--kernel", str(path)]) == 0
    assert "in a shell --kernel FILE" in capsys.readouterr().out
    assert path.read_text().startswith("// out = softmax(") and path.read_text().count("func.func @attention") == 1
    assert main(["explain", f"{model}:attend", "--kernel", str(path), "--machine", "h200"]) == 0
    assert "tl.dot(" not in capsys.readouterr().out and "tl.dot(" in path.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a computer without a GPU")
def test_a_device_that_is_not_there(capsys, model):
    assert main(["explain", f"{model}:Model", "--device", "cuda"]) == 2
    message = capsys.readouterr().err
    assert "there is no --device cuda" in message and "fusion explain --machine h200 shows" in message


def test_completion_knows_every_command_and_option(capsys):
    with pytest.raises(SystemExit):
        main(["--completion"])
    script = (
        capsys.readouterr().out
        + """
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fusion; echo "${COMPREPLY[@]}"; }
complete_words fusion d; complete_words fusion cost --m; complete_words fusion verify --g"""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["doctor", "--machine", "--gradients"]


def test_progress_is_what_was_begun_last_and_stands_on_terminals_alone(capsys, monkeypatch):
    log = logging.getLogger("fusion.progress")
    monkeypatch.setattr(cli, "INTERVAL", 0.001)

    def work() -> str:
        with cli.progress_shown():
            for number in range(3):
                log.info("attention %d of 3", number + 1)
            end = time.monotonic() + 20
            while sys.stderr.isatty() and "3 of 3" not in (text := sys.stderr.getvalue()) and time.monotonic() < end:
                time.sleep(0.001)
            return text if sys.stderr.isatty() else ""

    assert work() == "" and capsys.readouterr().err == ""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert re.search(r"^ +0 s  attention 3 of 3$", work(), flags=re.M)
    assert not log.handlers


def test_strict_is_an_exit_code(capsys, model):
    assert run(capsys, "explain", f"{model}:attend", "--strict")[0] == 0
    assert run(capsys, "explain", f"{model}:returns_more", "--strict")[0] == 1
    assert run(capsys, "explain", f"{model}:plain", "--inputs", "single", "--strict")[0] == 1


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("some_model.py", (), "names no callable; write FILE.py:NAME"),
        ("missing.py:Model", (), "there is no file 'missing.py'"),
        ("no_such_module_here:Model", (), "cannot be imported.*give a file"),
        ("{model}:Modle", (), "there is no 'Modle'; callables there: Model, attend"),
        ("{model}:number", (), "is a int, which cannot be called"),
        ("{model}:broken_build", (), "raised RuntimeError: no weights; name a function"),
        ("{model}:attend", ("--inputs", "number"), "are a int; make them a tuple"),
        ("{model}:attend", ("--inputs", "nothing"), "there is no 'nothing'"),
        ("{model}:attend", ("--tensor", "2x"), "write its shape and dtype"),
        ("{model}:attend", ("--tensor", "2x2:number"), "write its shape and dtype"),
        (
            "{model}:attend",
            ("--tensor", "2x2"),
            "on these inputs: explain was asked to run attend, which fails in eager mode: TypeError",
        ),
        (
            "{model}:attend",
            ("--inputs", "namedd"),
            "--inputs namedd: there is no 'namedd'; values there: .* named, .*single",
        ),
        ("{model}:attend", ("--html", "/nonexistent/a.html"), "there is no folder /nonexistent; make it"),
        ("{model}:attend", ("--kernel", "/nonexistent/a"), "--kernel /nonexistent/a: there is no folder /nonexistent"),
    ],
)
def test_a_wrong_request_says_what_to_write(capsys, model, target, more, message):
    code, out, err = run(capsys, "explain", target.format(model=model), *more)
    assert code == 2 and not out
    assert re.search(message, " ".join(err.split())), err


def test_inputs_go_to_the_device(capsys, model):
    code, _, err = run(capsys, "explain", f"{model}:attend", "--inputs", "named", "--device", "meta")
    assert code == 2 and "scale" in err  # attend takes none
    code, out, err = run(capsys, "explain", f"{model}:attend", "--device", "meta")
    assert code == 0 and "there is no emitter for device" in out, err


def test_files_without_inputs_and_files_that_fail(capsys, tmp_path):
    (tmp_path / "bare.py").write_text("def attend(q):\n    return q\n")
    code, _, err = run(capsys, "explain", f"{tmp_path / 'bare.py'}:attend")
    assert code == 2 and "define inputs or example_inputs in its file, or give --inputs NAME or --tensor" in err
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    code, _, err = run(capsys, "explain", f"{tmp_path / 'wrong.py'}:attend")
    assert code == 2 and "cannot be run: ZeroDivisionError" in err


def test_bench_of_a_variant(capsys):
    argv = ("bench", "--variant", "causal", "--N", "65", "--heads", "2", "--d", "16", "--seconds", "0.01")
    code, out, _ = run(capsys, *argv)
    assert code == 0 and "causal 1x2x65x16 float32" in out and "speed-up" in out and "Half of them took " in out
    code, out, _ = run(capsys, *argv, "--json")
    (found,) = json.loads(out).values()
    assert set(found["entries"]) == {"eager", "inductor", "fusion"}


def test_bench_of_a_model(capsys, model):
    code, out, _ = run(capsys, "bench", f"{model}:attend", "--seconds", "0.01")
    assert code == 0 and f"{model}:attend" in out


def test_bench_says_no_when_fusion_is_wrong(capsys, monkeypatch):
    from fusion.api.compare import Comparison, Measured

    def wrong(function, *args, **kwargs):
        entries = [Measured(name=n, seconds=1.0, error=1.0, allowed=0.5) for n in ("eager", "inductor", "fusion")]
        return Comparison(entries=tuple(entries), turns=3, threads=1, device="cpu")

    monkeypatch.setattr("fusion.api.compare.compare", wrong)
    assert run(capsys, "bench", "--variant", "full", "--N", "8")[0] == 1


def test_bench_of_nothing(capsys):
    code, _, err = run(capsys, "bench", "--N", "0")
    assert code == 2 and "--N 0: there is nothing to run; give a positive size" in err


def test_verify_of_a_model_without_attention(capsys, model):
    code, out, _ = run(capsys, "verify", f"{model}:plain", "--inputs", "single")
    assert code == 0 and "no attention was found, so nothing was compared but the whole model" in out


@pytest.mark.parametrize("command", [fusion.explain, fusion.verify, fusion.compare])
def test_calls_that_fail_say_so_in_the_same_words(command):
    def attend(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    name, q = command.__name__, torch.randn(1, 2, 9, 4)
    for wrong in [(), (q, q, torch.randn(3, 3)), (q, q.bfloat16(), q)]:
        with pytest.raises(
            fusion.FusionError, match=f"{name} was asked to run attend, which fails in eager mode: .*Error"
        ):
            command(attend, *wrong)
    with pytest.raises(fusion.FusionError, match=f"{name} was given 'bert-base', an object of type str, which"):
        command("bert-base", q)
    with pytest.raises(fusion.FusionError, match=f"{name} was given an object of type Tensor, which cannot be called"):
        command(q, q)


@pytest.fixture
def quick_doctor(monkeypatch):
    monkeypatch.setattr(
        doctor_command, "_cpp_compiler", lambda: doctor_command.Finding(name="C++", state="ok", found="")
    )


def test_doctor(capsys, quick_doctor):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "torch-mlir" in out and "target cpu" in out and "fused, error" in out
    code, out, _ = run(capsys, "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert findings["target cpu"]["state"] == "ok"


def test_doctor_says_what_to_install(capsys, quick_doctor, monkeypatch):
    kernels.forget()
    reason = "torch-mlir cannot be imported (No module named 'torch_mlir'); install torch-mlir to have CPU kernels"
    monkeypatch.setattr("fusion.codegen.cpu.unavailable", lambda: reason)
    monkeypatch.setitem(sys.modules, "torch_mlir.ir", None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "install torch-mlir to have CPU kernels" in out and "pip install torch-mlir, for kernels on CPUs" in out


def test_doctor_finds_a_wrong_kernel(capsys, quick_doctor, monkeypatch):
    monkeypatch.setattr("fusion.codegen.reference.run", lambda spec, operands, sizes: operands[0] * 0)
    monkeypatch.setattr(GuardedKernel, "__call__", lambda self, operands, sizes: operands[0] * 0)
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "wrong by" in out and "please report this" in out


def test_doctor_finds_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file))
    finding = doctor_command._cache()
    assert finding.state == "broken" and "set TORCHINDUCTOR_CACHE_DIR" in finding.advice


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_doctor_diagnoses_a_cache_without_which_torch_cannot_be_imported(tmp_path, folder):
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
    command = [sys.executable, "-m", "fusion.cli", "doctor", "--json"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout) if finding["state"] == "broken"}
    assert {"cache", "torch.compile"} == {*findings} and str(tmp_path / "file") in findings["cache"]["found"]
    assert all("set TORCHINDUCTOR_CACHE_DIR" in finding["advice"] for finding in findings.values())


def test_doctor_says_where_the_caches_are_and_how_large(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "other").write_bytes(bytes(1 << 20))
    caching.store("kernel.o", bytes(1 << 19))
    finding = doctor_command._cache()
    assert (finding.state, finding.found) == (
        "ok",
        f"{tmp_path}: 2 files, 1.5 MiB, of which 1 files, 0.5 MiB in fusion/",
    )
    with torch.compiler.config.patch(force_disable_caches=True):
        finding = doctor_command._cache()
    assert finding.state == "missing" and "not used" in finding.found and "FORCE_DISABLE_CACHES" in finding.advice


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_every_command_prints_json(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and f"examples:\n  fusion {name}" in out and "--json" in out


def test_the_command_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "fusion.cli", "cost", "--N", "64", "--json"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0 and json.loads(done.stdout)["schedule"]


@pytest.mark.parametrize("arguments", ["", "--completion", "cost"])
def test_a_reader_that_stops_is_no_error(arguments):
    script = f"{sys.executable} -m fusion.cli {arguments} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
