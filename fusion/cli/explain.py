"""`fusion explain`: the report of a model, as text, JSON or a page."""

from __future__ import annotations

import argparse
import json

from fusion.cli import target

HELP = """What was fused in a model, what was not, and why.

The model is compiled and run once on the inputs."""

EXAMPLES = """examples:
  fusion explain model.py:Model                        a class, with inputs() in the same file
  fusion explain model.py:attend --tensor 2x8x256x64 --tensor 2x8x256x64 --tensor 2x8x256x64
  fusion explain package.models:build --inputs package.data:batch --html report.html
  fusion explain model.py:Model --strict               for a test: exit code 1 unless everything is fused

exit codes: 0 done; 1 with --strict, an attention was not fused or none was found; 2 the request was wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page")
    parser.add_argument("--compare", action="store_true", help="also measure eager, Inductor and fusion")
    parser.add_argument("--strict", action="store_true", help="exit code 1 unless every attention was fused")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from fusion.api.explain import explain
    from fusion.report.json import to_dict

    found = target.load(arguments)
    with torch.no_grad():
        report = found.given_to(explain)
    if arguments.compare:
        report.compare(*found.args, **found.kwargs)
    if arguments.html:
        report.to_html(arguments.html)
    print(json.dumps(to_dict(report), indent=2) if arguments.json else report)
    return int(arguments.strict and not (report.sites and report.fused == len(report.sites)))
