"""The `fusion` command. A subcommand has `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
import pkgutil
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from fusion.cli import progress
from fusion.errors import FusionError, StrictError

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
    completion = "print a shell function that completes commands and options, and exit"
    whole.add_argument("--completion", action=_Completion, nargs=0, const=commands.choices, help=completion)
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


_COMPLETION = """_fusion() {{
  case "${{COMP_WORDS[1]}}" in
    {cases}
    *) local words="{commands}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _fusion fusion"""


class _Completion(argparse.Action):
    """Prints what bash, and zsh with bashcompinit, take for completion."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parsers: Mapping[str, argparse.ArgumentParser] = self.const
        usages = {name: command.format_usage() for name, command in parsers.items()}
        options = {name: " ".join(re.findall(r"(?<=\[)--[\w-]+", usage)) for name, usage in usages.items()}
        cases = "\n    ".join(f'{name}) local words="{text}" ;;' for name, text in options.items())
        print(_COMPLETION.format(cases=cases, commands=" ".join([*options, "--help", "--version"])))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 done, 1 the command says no, 2 the request was wrong)."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()
        return 0


def _run(argv: Sequence[str] | None) -> int:
    whole = parser()
    arguments = whole.parse_args(argv)
    arguments.command_line = shlex.join(["fusion", *(sys.argv[1:] if argv is None else argv)])
    if arguments.command is None:
        whole.print_help()
        return 0
    try:
        with progress.shown():
            return arguments.run(arguments)
    except FusionError as error:
        print(f"fusion {arguments.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, StrictError) else 2
