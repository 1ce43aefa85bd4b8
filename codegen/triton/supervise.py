"""Supervision of processes that may crash or hang: they are restarted, so that a failure costs one step."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MOST_RESTARTS = 15
NO_TIME = "no time left"
INTERVAL = 0.1  # s between two looks at a process


def run_restarting(
    command: Sequence[str],
    watched: Path,
    deadline: float,
    patience: Callable[[], float],
    lost: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command until it ends well or time.time() passes the deadline, at which it is killed.

    watched: a file that it writes before and after every step.
    patience(): the seconds without a write after which it counts as hung.
    lost(reason): called after every crash or hang; it has to see to it that the next start continues elsewhere.
    environment: the command's, in place of this process's.

    Raises OSError where it cannot be started.
    """
    for _ in range(MOST_RESTARTS):
        child = subprocess.Popen(command, env=environment)
        try:
            reason = _watch(child, watched, deadline, patience)
        finally:
            child.kill()
            child.wait()
        if reason is None:
            return
        lost(reason)
        if time.time() > deadline:
            return
    lost(f"given up after {MOST_RESTARTS} starts")


def _watch(child: subprocess.Popen[bytes], watched: Path, deadline: float, patience: Callable[[], float]) -> str | None:
    """Reason why a process failed; None if it ended well."""
    begun = time.time()
    while (status := child.poll()) is None:
        time.sleep(INTERVAL)
        changed = max(begun, watched.stat().st_mtime if watched.exists() else 0)
        if time.time() > deadline:
            return NO_TIME
        if time.time() - changed > (allowed := patience()):
            return f"no answer within {allowed:.0f} s"
    return None if status == 0 else f"the process ended with status {status}"
