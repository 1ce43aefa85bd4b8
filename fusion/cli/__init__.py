"""The `fusion` command. A subcommand is a module with `HELP`, `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from fusion.errors import FusionError

# name of the subcommand: module that implements it, imported only when it is used (or listed by --help)
COMMANDS = {
    "explain": "fusion.cli.explain",
    "verify": "fusion.cli.verify",
    "repro": "fusion.cli.repro",
    "bench": "fusion.cli.bench",
    "cost": "fusion.cli.cost",
    "doctor": "fusion.cli.doctor",
}


def parser() -> argparse.ArgumentParser:
    """What parses the arguments of every command."""
    whole = argparse.ArgumentParser(prog="fusion", description="An attention compiler: what it would do, and why.")
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = importlib.import_module(module)
        help_text = command.HELP
        sub = commands.add_parser(
            name,
            help=help_text.splitlines()[0],
            description=help_text,
            epilog=getattr(command, "EXAMPLES", None),
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
