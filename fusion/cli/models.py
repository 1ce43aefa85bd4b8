"""`fusion explain`, `fusion verify` and `fusion repro`: commands about a model of the user's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fusion.cli import target
from fusion.errors import TargetError


class explain:
    HELP = """What was fused in a model, what was not, and why.

The model is compiled and run once on the inputs."""
    EXAMPLES = """examples:
  fusion explain model.py:Model                        a class, with inputs() in the same file
  fusion explain model.py:attend --tensor 2x8x256x64 --tensor 2x8x256x64 --tensor 2x8x256x64
  fusion explain package.models:build --inputs package.data:batch --html report.html
  fusion explain model.py:Model --option cascades=always
  fusion explain model.py:Model --strict               for a test: exit code 1 unless everything is fused

exit codes: 0 done; 1 with --strict, an attention was not fused or none was found; 2 the request was wrong"""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        target.add_arguments(parser)
        parser.add_argument("--html", metavar="FILE", help="also write the report as a page")
        parser.add_argument("--compare", action="store_true", help="also measure eager, Inductor and fusion")
        parser.add_argument("--strict", action="store_true", help="exit code 1 unless every attention was fused")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        import torch

        from fusion.api.explain import explain

        model = target.load(arguments)
        with torch.no_grad():
            report = model.run(explain)
        report.command = arguments.command_line
        if arguments.compare:
            report.compare(*model.args, **model.kwargs)
        if arguments.html:
            report.to_html(arguments.html)
        print(json.dumps(report.data, indent=2) if arguments.json else report)
        return int(arguments.strict and not (report.sites and report.fused == len(report.sites)))


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
        target.add_arguments(parser)
        parser.add_argument("--gradients", action="store_true", help="compare gradients as well")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        verification = _verification(arguments)
        print(json.dumps(verification.data, indent=2) if arguments.json else verification)
        return int(not verification.right)


def _verification(arguments: argparse.Namespace, **keywords: Any) -> Any:
    from fusion.api.verify import verify

    return target.load(arguments).run(verify, gradients=arguments.gradients, **keywords)


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
        try:
            path.write_text(chosen.script(random=arguments.random), encoding="utf-8")
        except OSError as problem:
            raise TargetError(f"--output {path} cannot be written: {problem}; name another file") from problem
        if arguments.json:
            data = {"file": str(path), "site": chosen.number, "place": chosen.place, "wrong": wrong}
            print(json.dumps(data, indent=2))
        else:
            print(f"{chosen}\nwrote {path}, {path.stat().st_size / 1024:.0f} KiB; run it: python {path}")
        return int(wrong)
