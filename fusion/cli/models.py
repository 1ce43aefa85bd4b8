"""`fusion explain`, `fusion verify` and `fusion repro`: commands about a model of the user's."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import logging
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from fusion.cli.cost import MACHINES
from fusion.errors import ComparisonError, StrictError, TargetError
from fusion.options import Options
from fusion.torch_private.tensors import FAKE_TENSOR_LOG, tree_map

Result = TypeVar("Result")
INPUT_NAMES = ("inputs", "example_inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A callable and the arguments of one call of it."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]

    def run(self, command: Callable[..., Result], **keywords: Any) -> Result:
        """The result of a command on the callable and its arguments. Raises TargetError where it cannot be run."""
        FAKE_TENSOR_LOG.setLevel(logging.CRITICAL)  # what fails in tracing is said in a sentence, without torch's stack
        try:
            return command(self.function, *self.args, options=self.options, **keywords, **self.kwargs)
        except Exception as raised:
            problem = getattr(raised, "inner_exception", raised)  # torch wraps what a backend raises
            if isinstance(problem, StrictError):
                raise problem from None
            why = str(problem) if isinstance(problem, ComparisonError) else f"{type(problem).__name__}: {problem}"
            raise TargetError(f"{self.name} cannot be run on these inputs: {why}") from problem


def add_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Declares the target and where its inputs come from."""
    parser.add_argument(
        "target",
        metavar="FILE.py:NAME",
        nargs="?" if optional else None,
        help="a model or function, as FILE.py:NAME or package.module:NAME; a class, or a function without parameters, "
        "is called to make the model",
    )
    parser.add_argument(
        "--inputs",
        metavar="NAME",
        help="where the inputs are: a name in the same file, or FILE.py:NAME; a function is called. A tuple or list is "
        f"the arguments, a dict the keyword arguments (default: {' or '.join(INPUT_NAMES)} in the same file)",
    )
    parser.add_argument(
        "--tensor",
        metavar="SHAPE[:DTYPE]",
        action="append",
        default=[],
        help="a random tensor as the next argument, e.g. 2x8x1024x64 or 1x128:int64; may be given several times",
    )
    parser.add_argument("--device", default="cpu", help="device of the model and its inputs (default %(default)s)")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of the backend, e.g. tile_maps=never; may be given several times",
    )


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the backend: numbers, True, False and None as in Python, all else text. Raises OptionError."""
    chosen: dict[str, Any] = {}
    for text in arguments.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise TargetError(f"--option {text!r} has no value; write NAME=VALUE, e.g. tile_maps=never")
        try:
            chosen[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            chosen[name] = value
    Options.parse(chosen)
    return chosen


def load(arguments: argparse.Namespace) -> Target:
    """The target of a command line. Raises TargetError."""
    chosen = options(arguments)
    module, name = _resolve(arguments.target)
    function = _model(_attribute(module, name, arguments.target, "callables", Callable), arguments.target)
    try:
        torch.empty(0, dtype=torch.uint8, device=arguments.device)
    except Exception as problem:
        raise TargetError(
            f"there is no --device {arguments.device}: {str(problem).splitlines()[0]}; fusion explain --machine h200 "
            "shows what a GPU would run without one"
        ) from None
    if isinstance(function, torch.nn.Module):
        function = function.eval().to(arguments.device)
    inputs: Any = [_tensor(text, arguments.device) for text in arguments.tensor]
    inputs = inputs or _inputs(arguments.inputs, module, arguments.target)
    inputs = tree_map(lambda leaf: leaf.to(arguments.device) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    return Target(name=arguments.target, function=function, args=args, kwargs=kwargs, options=chosen)


def _resolve(text: str) -> tuple[ModuleType, str]:
    """The module of FILE.py:NAME or package.module:NAME, imported, and the name."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise TargetError(f"{text!r} names no callable; write FILE.py:NAME or package.module:NAME")
    path = Path(where).resolve()
    is_file = where.endswith(".py")
    if is_file and not path.is_file():
        raise TargetError(f"there is no file {where!r}; give the path of a Python file, then a colon and a name in it")
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:  # a script finds its neighbours
        sys.path.insert(0, folder)
    try:
        return (_load_file(path) if is_file else importlib.import_module(where)), name
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
        if is_file:
            raise TargetError(f"{path} cannot be run: {why}") from problem
        raise TargetError(f"module {where!r} cannot be imported: {why}; give a file as FILE.py:NAME") from problem


def _load_file(path: Path) -> ModuleType:
    name = re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str, asked: str, called: str, kinds: Any) -> Any:
    """The value of a name in a module. called, kinds: of the values that are listed where there is no such name."""
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        names = sorted(n for n, value in vars(module).items() if isinstance(value, kinds) and not n.startswith("_"))
        raise TargetError(f"{asked}: there is no {name!r}; {called} there: {', '.join(names) or 'none'}") from None


def _model(value: Any, asked: str) -> Callable[..., Any]:
    """The callable to look at: classes and functions without parameters make it."""
    if isinstance(value, type) or (inspect.isfunction(value) and not inspect.signature(value).parameters):
        try:
            value = value()
        except Exception as problem:
            raise TargetError(
                f"{asked} was called to make the model, and raised {type(problem).__name__}: {problem}; name a "
                "function without parameters that makes it"
            ) from problem
    if not callable(value):
        raise TargetError(f"{asked} is a {type(value).__name__}, which cannot be called; name a model or a function")
    return value


def _inputs(name: str | None, module: ModuleType, asked: str) -> Any:
    name = name or next((candidate for candidate in INPUT_NAMES if hasattr(module, candidate)), None)
    if name is None:
        names = " or ".join(INPUT_NAMES)
        raise TargetError(f"{asked} has no inputs: define {names} in its file, or give --inputs NAME or --tensor SHAPE")
    if ":" in name:
        module, name = _resolve(name)
    inputs = _attribute(module, name, f"--inputs {name}", "values", (FunctionType, tuple, list, dict, torch.Tensor))
    inputs = inputs() if callable(inputs) and not isinstance(inputs, torch.Tensor) else inputs
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if not isinstance(inputs, (tuple, list, dict)):
        raise TargetError(
            f"inputs {name!r} are a {type(inputs).__name__}; make them a tuple of arguments or a dict of keyword ones"
        )
    return inputs


def _tensor(text: str, device: str) -> torch.Tensor:
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text)
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise TargetError(f"--tensor {text!r} is no tensor; write its shape and dtype, e.g. 2x8x1024x64:bfloat16")
    shape = [int(extent) for extent in match[1].split("x")]
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)  # small indices are in range everywhere


class explain:
    HELP = """What was fused in a model, what was not, and why.

The model is compiled and run once on the inputs."""
    EXAMPLES = """examples:
  fusion explain model.py:Model                        a class, with inputs() in the same file
  fusion explain model.py:attend --tensor 2x8x256x64 --tensor 2x8x256x64 --tensor 2x8x256x64
  fusion explain package.models:build --inputs package.data:batch --html report.html
  fusion explain model.py:Model --option tile_maps=never
  fusion explain model.py:Model --machine h200         also the plan and the Triton kernels of a GPU, without one
  fusion explain model.py:Model --kernel kernel.mlir   also writes the text of the kernels; with --machine the GPU's
  fusion explain model.py:Model --strict               for a test: exit code 1 unless everything is fused

exit codes: 0 done; 1 with --strict, an attention was not fused or none was found; 2 the request was wrong"""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser)
        parser.add_argument("--html", metavar="FILE", help="also write the report as a page")
        parser.add_argument("--compare", action="store_true", help="also measure eager, Inductor and fusion")
        parser.add_argument("--machine", "--target", help=f"also plans and Triton kernels for a GPU: {MACHINES}")
        parser.add_argument("--kernel", metavar="FILE", help="also write the kernels' text, with --machine the GPU's")
        parser.add_argument("--strict", action="store_true", help="exit code 1 unless every attention was fused")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        import torch

        from fusion.api.explain import explain

        for option in ("html", "kernel"):
            path = getattr(arguments, option)
            if path and not (folder := Path(path).resolve().parent).is_dir():
                raise TargetError(f"--{option} {path}: there is no folder {folder}; make it, or name another file")
        model = load(arguments)
        with torch.no_grad():
            report = model.run(explain)
        report.command = arguments.command_line
        if arguments.compare:
            report.compare(*model.args, **model.kwargs)
        if arguments.html:
            from fusion.report.page import to_html

            _write("--html", arguments.html, to_html(report))
        planned = [site.on(arguments.machine) for site in report.sites if site.fused] if arguments.machine else []
        if arguments.kernel:
            sources = [text for _, text in planned] or [text for site in report.sites for text in site.sources]
            _write("--kernel", arguments.kernel, "\n".join(dict.fromkeys(filter(None, sources))))
        if arguments.json:
            gpu = [{**plan.to_dict(), "source": source} for plan, source in planned]
            print(json.dumps(report.data | ({"gpu": gpu} if gpu else {}), indent=2))
        else:
            print(report)
            for plan, source in dict.fromkeys(planned):
                print(f"\n{plan.explain()}\nruns       {plan.runs}" + f"\n\n{source}" * (not arguments.kernel))
        return int(arguments.strict and not (report.sites and report.fused == len(report.sites)))


def _write(option: str, path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise TargetError(f"{option} {path} cannot be written: {problem}; name another file") from problem


class verify:
    HELP = """Compares every attention of a model with eager and float64, on the model's own inputs.

Each is compiled and run alone on the tensors that it reads in the model; the outputs of the whole model are compared
too. The rule: error <= 2 * (eager's error + rounding), both against float64."""
    EXAMPLES = """examples:
  fusion verify model.py:Model                         with inputs() in the same file
  fusion verify model.py:Model --gradients             gradients as well
  fusion verify package.models:build --inputs package.data:batch --json

exit codes: 0 right; 1 something is wrong (fusion repro writes a script that shows it); 2 the request was wrong"""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser)
        parser.add_argument("--gradients", action="store_true", help="compare gradients as well")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        verification = _verification(arguments)
        print(json.dumps(verification.data, indent=2) if arguments.json else verification)
        return int(not verification.right)


def _verification(arguments: argparse.Namespace, **keywords: Any) -> Any:
    from fusion.api.verify import verify

    return load(arguments).run(verify, gradients=arguments.gradients, **keywords)


class repro:
    HELP = """Writes one attention of a model as a Python script that compares it with float64.

The script is one file with the operations, the tensors that the attention reads in the model, and the comparison. Its
exit code is 1 where fusion is wrong. Without --site it is the attention whose error is largest relative
to what is allowed."""
    EXAMPLES = """examples:
  fusion repro model.py:Model                          writes repro.py
  fusion repro model.py:Model --site 2 --random        your tensors stay with you, but for masks and integers
  fusion repro model.py:Model --gradients --output case.py

exit codes: 0 written, and right here; 1 written, and wrong; 2 the request was wrong"""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        verify.add_arguments(parser)
        parser.add_argument("--site", type=int, metavar="N", help="the attention, by its number in fusion verify")
        parser.add_argument("--random", action="store_true", help="random numbers in the place of float tensors")
        parser.add_argument("--output", default="repro.py", metavar="FILE", help="where to write (default %(default)s)")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        verification = _verification(arguments, site=arguments.site)
        chosen = next((site for site in verification.sites if site.script is not None), None)
        if chosen is None:
            text = "\n".join(map(str, verification.sites)) or "none was found"
            asked = "attention" if arguments.site is None else f"attention {arguments.site}"
            raise TargetError(f"{arguments.target} has no {asked} that fusion would run; its attentions:\n{text}")
        path, wrong = Path(arguments.output), chosen.outcome.wrong
        _write("--output", path, chosen.script(random=arguments.random))
        if arguments.json:
            data = {"file": str(path), "site": chosen.number, "place": chosen.place, "wrong": wrong}
            print(json.dumps(data, indent=2))
        else:
            print(f"{chosen}\nwrote {path}, {path.stat().st_size / 1024:.0f} KiB; run it: python {path}")
        return int(wrong)
