"""`FUSION_DUMP=folder`: what every stage made of every graph, in numbered files; and the same for TORCH_TRACE.

folder/graph_000/00_dynamo.py        the graph after each stage as Python that runs by itself
                 01_normalized.py
                 02_rewritten.py
                 03_attention_0.py   every distinct attention alone, compared with float64 (`fusion repro`)
                 04_plan_0.txt       one per distinct attention
                 05_kernel_0.mlir    (or .py)
                 06_report.txt
"""

from __future__ import annotations

import logging
import operator
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fusion.passes import marks
from fusion.passes.cut_out import cut_out
from fusion.passes.recognize.find import Site
from fusion.report import site_script
from fusion.report.report import Report
from fusion.report.script_parts import example, import_line
from fusion.torch_private import tracelog

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
            attributes = _attributes(module)
            text = to_python(module, f"{len(self._graphs):02}_{name}.pt", attributes)
        except Exception:  # looking must not change what happens
            log.warning("FUSION_DUMP: the graph after %r cannot be written as Python", name, exc_info=True)
            return
        self._graphs.append((name, text, attributes))

    def sites(self, sites: Sequence[Site]) -> None:
        """Note every attention that was recognised as a script that compares it, alone and on random inputs."""
        scripts: dict[str, str] = {}
        try:
            for site in sites if self.folder else ():
                if site.refusal is None and (cut := cut_out(site)) is not None:
                    gradients = [marks.requires_grad(node) for node in cut.inputs]
                    text = site_script.script(cut, site_script.place(site), gradients=gradients)
                    scripts.setdefault(text.partition('"""\n')[2], text)
        except Exception:  # looking must not change what happens
            log.warning("FUSION_DUMP: an attention cannot be written as a script", exc_info=True)
        self._attentions = [(f"attention_{number}.py", text) for number, text in enumerate(scripts.values())]

    def finish(self, report: Report) -> None:
        """Write everything. A folder that cannot be written is reported, and nothing else happens."""
        trace(report)
        if self.folder:
            self._write(artifacts(report))

    def failure(self, problem: Exception) -> None:
        """Write what was noted until a failure, and its traceback; it goes to the log at level DEBUG as well."""
        text = "".join(traceback.format_exception(problem))
        log.debug("%s", text)
        if self.folder:
            self._write([("failure.txt", text)])

    @property
    def where(self) -> str:
        """Where the details of a failure are."""
        if self.folder:
            return f"details in {self.folder}"
        return "this is a defect of fusion; FUSION_DUMP=folder writes the graph and the traceback to report with it"

    def _write(self, further: Sequence[tuple[str, str]]) -> None:
        graphs = [(f"{name}.py", text) for name, text, _ in self._graphs]
        files = [*graphs, *self._attentions, *further]
        try:
            folder = _new_folder(Path(self.folder))
            for number, (name, _, attributes) in enumerate(self._graphs):
                if attributes:
                    torch.save(attributes, folder / f"{number:02}_{name}.pt")
            for number, (name, text) in enumerate(files):
                (folder / f"{number:02}_{name}").write_text(text, encoding="utf-8")
        except OSError as problem:
            log.warning(
                "FUSION_DUMP=%s: nothing was written (%s); name a folder that can be written", self.folder, problem
            )
        else:
            log.info("wrote %d files to %s", len(files), folder)


def artifacts(report: Report) -> list[tuple[str, str]]:
    """(file name, text) of the plans and kernels of a report, equal ones once, and of the report itself."""
    plans: dict[str, None] = {}
    kernels: dict[str, None] = {}
    for site in report.sites:
        for found in site.attentions:
            plans.setdefault(f"{found.spec}\n\n{found.planned().explain()}\n")
            if found.source:
                kernels.setdefault(found.source)
    files = [(f"plan_{number}.txt", text) for number, text in enumerate(plans)]
    files += [
        (f"kernel_{number}.{'mlir' if 'func.func' in text else 'py'}", text) for number, text in enumerate(kernels)
    ]
    return [*files, ("report.txt", f"{report}\n")]


def trace(report: Report) -> None:
    """Hand report, plans and kernels to torch's structured log (TORCH_TRACE), which `tlparse` shows."""
    if tracelog.is_on():
        for name, text in artifacts(report):
            tracelog.write(f"fusion_{name.rpartition('.')[0]}", text)


def _new_folder(parent: Path) -> Path:
    """The next graph_NNN, also where several processes write into one folder."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = parent / f"graph_{number:03}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def to_python(module: GraphModule, weights: str, attributes: Mapping[str, Any]) -> str:
    """A graph as a Python program: a module, inputs of the right shapes, and a call. weights: the file next to it that
    holds the tensors and modules which the graph has as attributes, if any."""
    code = module.graph.python_code("self")
    lines = [
        f'"""{len(module.graph.nodes)} nodes; run me."""',
        "",
        "import torch",
        "",
        "import fusion.runtime.op  # the ops",
    ]
    lines += [import_line(name, held) for name, held in code.globals.items() if name != "torch"]
    lines += ["", "", "class Graph(torch.nn.Module):"]
    if attributes:
        lines += [
            "    def __init__(self):",
            "        super().__init__()",
            f'        held = torch.load(__file__.rpartition("/")[0] + "/{weights}", weights_only=False)',
            "        for path, value in held.items():",
            '            *parents, name = path.split(".")',
            "            here = self",
            "            for parent in parents:",
            "                if not hasattr(here, parent):",
            "                    setattr(here, parent, torch.nn.Module())",
            "                here = getattr(here, parent)",
            "            setattr(here, name, value)",
            "",
        ]
    lines += [f"    {line}".rstrip() for line in code.src.strip().splitlines()]
    lines += ["", "", "def inputs():", "    torch.manual_seed(0)", "    return ["]
    lines += [f"        {example(node)},  # {node.name}" for node in module.graph.find_nodes(op="placeholder")]
    lines += ["    ]", "", "", 'if __name__ == "__main__":', "    result = Graph()(*inputs())"]
    lines += ["    for leaf in torch.utils._pytree.tree_leaves(result):", "        print(leaf)"]
    return "\n".join(lines) + "\n"


def _attributes(module: GraphModule) -> dict[str, Any]:
    """What the graph refers to by name: tensors and modules."""
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            held = operator.attrgetter(str(node.target))(module)
            found[str(node.target)] = held.detach() if isinstance(held, torch.Tensor) else held
    return found
