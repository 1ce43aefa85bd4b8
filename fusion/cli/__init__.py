"""The `fusion` command. A subcommand has `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import pkgutil
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

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
        with progress_shown():
            return arguments.run(arguments)
    except FusionError as error:
        print(f"fusion {arguments.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, StrictError) else 2


INTERVAL = 2.0
"""Seconds after which the last line that the package logged to `fusion.progress` is printed, if it is new."""


class _Latest(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Progress of what runs inside, on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    log, latest, done, started = logging.getLogger("fusion.progress"), _Latest(), threading.Event(), time.monotonic()

    def report() -> None:
        printed = ""
        while not done.wait(INTERVAL):
            if latest.text != printed:
                printed = latest.text
                print(f"{time.monotonic() - started:4.0f} s  {printed}", file=sys.stderr, flush=True)

    log.addHandler(latest)
    log.setLevel(logging.INFO)
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        log.removeHandler(latest)
        log.setLevel(logging.NOTSET)
