"""`fusion repro`: one attention of a model as a script that runs by itself, to report a wrong result with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fusion.api.verify import Verification, Verified
from fusion.cli import target
from fusion.cli.verify import verified
from fusion.errors import TargetError

HELP = """Writes one attention of a model as a Python script that compares it with float64.

The script is one file with the operations, the tensors that the attention reads in the model, and the comparison. Its
exit code is 1 where fusion is wrong. Without --site it is the attention that comes nearest to its bound."""

EXAMPLES = """examples:
  fusion repro model.py:Model                          writes repro.py
  fusion repro model.py:Model --site 2 --random        your tensors stay with you, but for masks and integers
  fusion repro model.py:Model --grad --output case.py

exit codes: 0 written, and right here; 1 written, and wrong; 2 the request was wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--site", type=int, metavar="N", help="the attention, by its number in fusion verify")
    parser.add_argument("--random", action="store_true", help="random numbers in the place of floating-point tensors")
    parser.add_argument("--grad", action="store_true", help="compare gradients as well")
    parser.add_argument("--output", default="repro.py", metavar="FILE", help="where to write (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    found = _chosen(verified(arguments, arguments.site), arguments)
    assert found.outcome is not None and found.script is not None
    path = Path(arguments.output)
    try:
        path.write_text(found.script(random=arguments.random), encoding="utf-8")
    except OSError as problem:
        raise TargetError(f"--output {path} cannot be written: {problem}; name another file") from problem
    if arguments.json:
        told = {"file": str(path), "site": found.number, "place": found.place, "wrong": found.outcome.wrong}
        print(json.dumps(told, indent=2))
    else:
        print(f"{found}\nwrote {path}, {path.stat().st_size / 1024:.0f} KiB; run it: python {path}")
    return int(found.outcome.wrong)


def _chosen(verification: Verification, arguments: argparse.Namespace) -> Verified:
    """The attention that was asked for, whose tensors were kept. Raises TargetError where there is none."""
    kept = next((site for site in verification.sites if site.script is not None), None)
    if kept is not None:
        return kept
    told = "\n".join(map(str, verification.sites)) or "none was found"
    asked = "attention" if arguments.site is None else f"attention {arguments.site}"
    raise TargetError(f"{arguments.target} has no {asked} that fusion would run; its attentions:\n{told}")
