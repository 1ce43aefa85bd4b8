"""Processes that may crash or hang: started again where they stopped, so that one bad kernel costs one step."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_RESTARTS = 15
NO_TIME = "no time left"


def attend(command: Sequence[str], watched: Path, deadline: float, silence: float, lost: Callable[[str], None]) -> None:
    """Run a command until it ends well or time.time() passes the deadline, in which case it is killed.

    watched: a file that it writes after every step. silence: seconds without a write after which it counts as hung.
    lost(reason): called after every crash or hang, before the next start; it has to see to it that the next one goes
    on elsewhere.
    """
    for _ in range(MOST_RESTARTS):
        with subprocess.Popen(command) as child:
            reason = _watch(child, watched, deadline, silence)
        if reason is None:
            return
        lost(reason)
        if time.time() > deadline:
            return
    lost(f"given up after {MOST_RESTARTS} starts")


def _watch(child: subprocess.Popen, watched: Path, deadline: float, silence: float) -> str | None:
    """Why a process did not end well; None if it did."""
    begun = time.time()
    while (status := child.poll()) is None:
        time.sleep(0.1)
        changed = max(begun, watched.stat().st_mtime if watched.exists() else 0)
        if time.time() > deadline or time.time() - changed > silence:
            child.kill()
            child.wait()
            return NO_TIME if time.time() > deadline else f"no answer within {silence:.0f} s"
    return None if status == 0 else f"the process ended with status {status}"


class Crew:
    """Processes whose end nobody waits for; `dismiss` kills those that still run."""

    def __init__(self, commands: Sequence[Sequence[str]]):
        quiet = subprocess.DEVNULL
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # each: they are several themselves
        self.members = [subprocess.Popen(c, env=environment, stdout=quiet, stderr=quiet) for c in commands]

    def busy(self) -> bool:
        return any(member.poll() is None for member in self.members)

    def dismiss(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()
