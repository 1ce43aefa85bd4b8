"""Results of a run of benchmarks/gpu, saved after every step, so that a crash loses one step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Cell, Place
from benchmarks.gpu.models import Losses, Memory, WholeModel
from benchmarks.gpu.tuning import Tuned

STARTING = 150  # s that a process may take until its first step: imports, the device, what there is to do

Kernels = list[tuple[str, float]]
"""(name, device seconds of one call) of what a call launches, the longest first."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """checks: faults by name of the check. kernels: by place and competitor. tuned: what autotune measured. tried:
    titles of steps that ended or were begun by a process that died; current: the one under way; patience: the seconds
    that it may take. failed: why a step has no result. planned: titles of all steps that were to be taken.
    """

    environment: dict[str, Any]
    device: str
    rehearsal: bool
    checks: dict[str, list[str]] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    models: list[WholeModel] = field(default_factory=list)
    losses: list[Losses] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    kernels: dict[str, dict[str, Kernels]] = field(default_factory=dict)
    tuned: list[Tuned] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    current: str | None = None
    patience: float = STARTING
    failed: dict[str, str] = field(default_factory=dict)
    planned: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[str]:
        """Titles of steps for which there was no time."""
        return [title for title in self.planned if title not in {*self.tried, *self.failed}]

    def write(self, path: Path) -> None:
        """Replace the file in one go: a reader sees the old or the new one."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Findings:
        """What `write` left."""
        given = json.loads(path.read_text())
        given["cells"] = [Cell(**(cell | {"place": Place(**cell["place"])})) for cell in given["cells"]]
        given["models"] = [WholeModel(**each) for each in given["models"]]
        given["losses"] = [Losses(**each) for each in given["losses"]]
        for each in given["memory"]:
            each["bytes"] = {who: {int(n): size for n, size in of.items()} for who, of in each["bytes"].items()}
        given["tuned"] = [Tuned(**each) for each in given["tuned"]]
        given["memory"] = [Memory(**each) for each in given["memory"]]
        return cls(**given)
