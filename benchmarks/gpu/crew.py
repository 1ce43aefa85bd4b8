"""Processes whose end nobody waits for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


class Crew:
    """Commands that run side by side; `dismiss` kills those that still run."""

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
