"""`FUSION_DUMP=folder`: every stage of every graph, in numbered files; and the same for TORCH_TRACE.

folder/graph_000/00_dynamo.py        the graph after each stage as Python that runs by itself
                 01_normalized.py
                 02_rewritten.py
                 03_attention_0.py   every distinct attention alone, compared with float64 (`fusion repro`)
                 04_plan_0.txt       one per distinct attention
                 05_kernel_0.mlir    (or .py)
                 06_report.txt
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fusion.passes import marks
from fusion.passes.recognize.find import Site
from fusion.passes.region import cut_out
from fusion.report import scripts
from fusion.report.report import Report
from fusion.torch_private import dynamo

log = logging.getLogger(__name__)


class Dump:
    """The dump of one graph. `stage` takes the graph as text at once, since later stages change it."""

    def __init__(self) -> None:
        self.folder = os.environ.get("FUSION_DUMP", "")
        self._graphs: list[tuple[str, str, dict[str, Any]]] = []
        self._attentions: list[tuple[str, str]] = []

    def stage(self, name: str, module: GraphModule) -> None:
        """Note the graph after the stage `name`."""
        if not self.folder:
            return
        try:
            values = attributes(module)
            text = scripts.graph_program(module, f"{len(self._graphs):02}_{name}.pt", values)
        except Exception:  # looking must not change what happens
            log.warning("FUSION_DUMP: the graph after %r cannot be written as Python", name, exc_info=True)
            return
        self._graphs.append((name, text, values))

    def sites(self, sites: Sequence[Site]) -> None:
        """Note every attention that was recognised as a script that compares it, alone and on random inputs."""
        texts: dict[str, str] = {}
        try:
            for site in sites if self.folder else ():
                if site.refusal is None and (cut := cut_out(site)) is not None:
                    gradients = [marks.requires_grad(node) for node in cut.inputs]
                    text = scripts.script(cut, scripts.place(site), gradients=gradients)
                    texts.setdefault(text.partition('"""\n')[2], text)
        except Exception:  # looking must not change what happens
            log.warning("FUSION_DUMP: an attention cannot be written as a script", exc_info=True)
        self._attentions = [(f"attention_{number}.py", text) for number, text in enumerate(texts.values())]

    def finish(self, report: Report) -> None:
        """Write everything, and hand report, plans and kernels to torch's structured log (TORCH_TRACE), which `tlparse`
        shows. A folder that cannot be written is reported, and nothing else happens."""
        for name, text in _artifacts(report) if dynamo.is_tracing_log_on() else ():
            dynamo.write_to_tracing_log(f"fusion_{name.rpartition('.')[0]}", text)
        if self.folder:
            self._write(_artifacts(report))

    def failure(self, problem: Exception) -> None:
        """Write what was noted until a failure, and its traceback; it goes to the log at level DEBUG as well."""
        text = "".join(traceback.format_exception(problem))
        log.debug("%s", text)
        if self.folder:
            self._write([("failure.txt", text)])

    @property
    def where(self) -> str:
        """The place of the details of a failure, in words."""
        if self.folder:
            return f"details in {self.folder}"
        return "this is a defect of fusion; FUSION_DUMP=folder writes the graph and the traceback to report with it"

    def _write(self, further: Sequence[tuple[str, str]]) -> None:
        files = [*((f"{name}.py", text) for name, text, _ in self._graphs), *self._attentions, *further]
        try:
            folder = _new_folder(Path(self.folder))
            for number, (name, _, values) in enumerate(self._graphs):
                if values:
                    torch.save(values, folder / f"{number:02}_{name}.pt")
            for number, (name, text) in enumerate(files):
                (folder / f"{number:02}_{name}").write_text(text, encoding="utf-8")
        except OSError as problem:
            log.warning(
                "FUSION_DUMP=%s: nothing was written (%s); name a folder that can be written", self.folder, problem
            )
        else:
            log.info("wrote %d files to %s", len(files), folder)


def _artifacts(report: Report) -> list[tuple[str, str]]:
    """(file name, text) of the plans and kernels of a report, equal ones once, and of the report itself."""
    entries = [attention for site in report.sites for attention in site.attentions]
    plans = dict.fromkeys(f"{entry.spec}\n\n{entry.planned().explain()}\n" for entry in entries)
    kernels = dict.fromkeys(entry.source for entry in entries if entry.source)
    files = [(f"plan_{number}.txt", text) for number, text in enumerate(plans)]
    files += [(f"kernel_{k}.{'mlir' if 'func.func' in text else 'py'}", text) for k, text in enumerate(kernels)]
    return [*files, ("report.txt", f"{report}\n")]


def _new_folder(parent: Path) -> Path:
    """The next graph_NNN, also where several processes write into one folder."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        try:
            (folder := parent / f"graph_{number:03}").mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def attributes(module: GraphModule) -> dict[str, Any]:
    """The tensors and modules that a graph refers to, by name."""
    names = [str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")]
    values = {name: operator.attrgetter(name)(module) for name in names}
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
