"""The `fusion` command. A subcommand has `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
import pkgutil
import shlex
import sys
from collections.abc import Sequence

from fusion.errors import FusionError

COMMANDS = {
    "explain": "fusion.cli.models:explain",
    "verify": "fusion.cli.models:verify",
    "repro": "fusion.cli.models:repro",
    "bench": "fusion.cli.bench",
    "cost": "fusion.cli.cost",
    "doctor": "fusion.cli.doctor",
}
"""Name of the subcommand: module or class that implements it."""


def parser() -> argparse.ArgumentParser:
    """The parser of every command's arguments."""
    whole = argparse.ArgumentParser(prog="fusion", description="An attention compiler: what it would do, and why.")
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, place in COMMANDS.items():
        command = pkgutil.resolve_name(place)
        sub = commands.add_parser(
            name,
            help=command.HELP.splitlines()[0],
            description=command.HELP,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=command.run)
    return whole


class _Version(argparse.Action):
    """Prints the versions of fusion and torch, which are looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        import fusion

        print(f"fusion {fusion.__version__}, torch {version('torch')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 done, 1 the command says no, 2 the request was wrong)."""
    whole = parser()
    arguments = whole.parse_args(argv)
    arguments.command_line = shlex.join(["fusion", *(sys.argv[1:] if argv is None else argv)])
    if arguments.command is None:
        whole.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except FusionError as error:
        print(f"fusion {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()
        return 0
