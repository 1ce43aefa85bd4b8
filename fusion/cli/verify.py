"""`fusion verify`: every attention of a model beside eager and float64, on the user's inputs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fusion.api.verify import Verification
from fusion.cli import target

HELP = """Compares every attention of a model with eager and float64, on the model's own inputs.

Each is compiled and run alone on the tensors that it reads in the model; the outputs of the whole model are compared
too. The rule: error <= 2 * (eager's error + rounding), both against float64."""

EXAMPLES = """examples:
  fusion verify model.py:Model                         with inputs() in the same file
  fusion verify model.py:Model --grad                  gradients as well
  fusion verify package.models:build --inputs package.data:batch --json

exit codes: 0 right; 1 something is wrong (fusion repro writes a script that shows it); 2 the request was wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--grad", action="store_true", help="compare gradients as well")


def run(arguments: argparse.Namespace) -> int:
    found = verified(arguments)
    print(json.dumps(to_dict(found), indent=2) if arguments.json else found)
    return int(not found.right)


def verified(arguments: argparse.Namespace, site: int | None = None) -> Verification:
    """What came of the target. Raises TargetError where it cannot be run."""
    from fusion.api.verify import verify

    return target.load(arguments).given_to(verify, gradients=arguments.grad, site=site)


def to_dict(found: Verification) -> dict[str, Any]:
    whole = found.whole
    return {
        "right": found.right,
        "sites": [
            {
                "number": site.number,
                "place": site.place,
                "reason": site.reason if site.outcome is None else site.outcome.refusal,
                "wrong": None if site.outcome is None else site.outcome.wrong,
                "errors": {}
                if site.outcome is None
                else {
                    name: {"error": e.max_error, "allowed": e.max_bound, "misplaced": e.misplaced}
                    for name, e in site.outcome.errors.items()
                },
            }
            for site in found.sites
        ],
        "whole": {"error": whole.error, "allowed": whole.allowed, "failure": whole.failure or None, "note": found.note},
    }
