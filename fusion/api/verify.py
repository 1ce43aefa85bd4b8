"""`fusion.verify`: every attention of a model beside eager and float64, on the user's own inputs; and the whole model.

The model runs in eager mode. Where it reaches an attention, the tensors that this reads are kept, and the attention
alone is compiled and compared (`fusion.api.check`), from the same text that `Verified.script` writes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fusion.api import check
from fusion.api.compare import Measured, calling, compare_results
from fusion.exactness import copied, is_float
from fusion.integrations import nested_tensors
from fusion.passes.nodes import source_line
from fusion.passes.prepare.late_division import move_divisions
from fusion.passes.recognize.find import Site, find_sites
from fusion.passes.region import CutOut, cut_out
from fusion.passes.trace.normalize import may_hold_attention, normalize
from fusion.passes.trace.outline import without_regions
from fusion.report import scripts
from fusion.report.sites import name_in_code
from fusion.torch_private.dynamo import original_of
from fusion.torch_private.tensors import tree_map

progress = logging.getLogger("fusion.progress")
RANDOM = "it draws random numbers, and is not the same twice"


@dataclass(slots=True, kw_only=True)
class Verified:
    """One attention.

    place: in the user's code.
    outcome: of the comparison; None where nothing of ours would run, for the `reason`.
    script: writes the script that compares it alone, for the attention whose tensors are kept.
    """

    number: int
    place: str
    outcome: check.Outcome | None = None
    reason: str | None = None
    script: Callable[..., str] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        text = f"not fused: {self.reason}" if self.outcome is None else str(self.outcome)
        return "\n    ".join([f"[{self.number}] {self.place}", *text.splitlines()])

    @property
    def data(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        outcome = self.outcome
        return {
            "number": self.number,
            "place": self.place,
            "reason": self.reason if outcome is None else outcome.refusal,
            "wrong": None if outcome is None else outcome.wrong,
            "errors": {
                name: {"error": e.max_error, "allowed": e.max_bound, "misplaced": e.misplaced, "judged": not e.apart}
                for name, e in (outcome.errors if outcome else {}).items()
            },
        }


@dataclass(slots=True, kw_only=True)
class Verification:
    """Every attention that a call meets, and the whole: `whole.error` against `whole.allowed`, or a `note`."""

    sites: list[Verified] = field(default_factory=list)
    whole: Measured
    note: str = ""

    @property
    def wrong(self) -> list[Verified]:
        """The attentions whose result breaks the rule."""
        return [site for site in self.sites if site.outcome is not None and site.outcome.wrong]

    @property
    def right(self) -> bool:
        """Whether all attentions and the whole keep to the rule, as far as they could be compared."""
        return not (self.wrong or self.whole.wrong)

    def __str__(self) -> str:
        whole, outcomes = self.whole, [site.outcome for site in self.sites if site.outcome is not None]
        outcomes = [outcome for outcome in outcomes if outcome.refusal is None or outcome.wrong]
        lines = [*map(str, self.sites)]
        if outcomes:
            right = sum(outcome.judged and not outcome.wrong for outcome in outcomes)
            lines.append(f"{right} of {len(outcomes)} fused attentions right, of {len(self.sites)} in the model")
            if unsure := sum(not (outcome.judged or outcome.wrong) for outcome in outcomes):
                lines[-1] += f"; {unsure} cannot be judged"
        else:
            why = "none of the attentions is fused" if self.sites else "no attention was found"
            rest = "" if whole.error is None else " but the whole model"
            lines.append(f"{why}, so nothing was compared{rest}")
        if whole.failure:
            lines.append(f"the whole model: fusion failed: {whole.failure}")
        elif whole.error is None:
            lines.append(f"the whole model was not compared. {self.note}")
        else:
            verdict = "WRONG" if whole.wrong else "right"
            lines.append(f"{verdict}  the whole model: error {whole.error:.3g}, allowed {whole.allowed:.3g}")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        whole = {"error": self.whole.error, "allowed": self.whole.allowed, "failure": self.whole.failure or None}
        return {"right": self.right, "sites": [site.data for site in self.sites], "whole": {**whole, "note": self.note}}


def verify(
    function: Callable[..., Any],
    /,
    *args: Any,
    gradients: bool = False,
    site: int | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Verification:
    """Compare every attention that one call of `function` meets with eager and float64, on the tensors that it reads.

    function: a module or function, compiled or not; it is called with the arguments.

    gradients: compare also those of the attentions, with respect to all that they follow.
    site: the number of the attention whose tensors to keep for its script; by default, those of the one whose
        error is largest relative to what is allowed.
    options: of the backend.

    The outputs of the whole call are compared as well. Raises ComparisonError where eager itself fails.
    """
    original, recorder = original_of(function), _Recorder(options=options or {}, gradients=gradients, wanted=site)
    wanted = lambda leaf: leaf.detach().requires_grad_() if gradients and is_float(leaf) else leaf
    arguments = tree_map(wanted, (args, kwargs))
    nested_tensors.register()
    with calling("verify", original, args, kwargs), torch.set_grad_enabled(gradients):
        torch.compile(original, backend=recorder.backend, dynamic=False)(*arguments[0], **arguments[1])
    compared = compare_results(original, args, kwargs, options)
    return Verification(sites=recorder.sites, whole=compared["fusion"], note=compared.note)


@dataclass(slots=True, kw_only=True)
class _Recorder:
    """Compares the attentions of a model as it runs, and records the results.

    wanted: the number of the attention whose tensors are kept.
    functions: by their text and what they are called with, one each, so that Dynamo never compiles one of them again.
    """

    options: Mapping[str, Any]
    gradients: bool
    wanted: int | None
    sites: list[Verified] = field(default_factory=list)
    functions: dict[tuple[Any, ...], Callable[..., Tensor]] = field(default_factory=dict)

    def backend(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        whole = without_regions(module)
        if not may_hold_attention(whole):
            return module.forward
        return _RecordingInterpreter(self, normalize(whole, example_inputs)).run

    def add(self, site: Site) -> Verified:
        """A new entry, in the order in which `fusion explain` lists them."""
        self.sites.append(Verified(number=len(self.sites), place=scripts.place(site)))
        return self.sites[-1]

    def compare(self, entry: Verified, cut: CutOut, values: Sequence[Any]) -> None:
        """Compare one attention; of several calls the worst is kept."""
        progress.info("comparing attention %d of %d with float64: %s", entry.number + 1, len(self.sites), entry.place)
        text = scripts.function_text(cut)
        form = lambda x: (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x
        key = text, *map(form, values)
        if key not in self.functions:
            space: dict[str, Any] = {"torch": torch}
            exec(compile(text, "<attention>", "exec"), space)
            self.functions[key] = space["attention"]
        wanted = [self.gradients and isinstance(v, Tensor) and v.requires_grad for v in values]
        names = [node.name for node in cut.module.graph.find_nodes(op="placeholder")]
        paths = {f"gradient of {name}": node for name, node in zip(names, cut.inputs, strict=True)}
        outcome = check.check(
            self.functions[key],
            values,
            floats=scripts.dtype_arguments(text),
            gradients=[name for name, wants in zip(names, wanted, strict=True) if wants],
            options=self.options,
        )
        by_path = {_title(title, paths.get(title)): errors for title, errors in outcome.errors.items()}
        if len(by_path) == len(outcome.errors):
            outcome = replace(outcome, errors=by_path)
        if entry.outcome is not None and entry.outcome.share >= outcome.share:
            return
        entry.outcome = outcome
        if self._keeps_tensors_of(entry):
            about = f"Attention {entry.number}: {entry.place}"
            keywords = {"values": [*map(copied, values)], "gradients": wanted, "options": self.options}
            entry.script = functools.partial(scripts.script, cut, about, **keywords)

    def _keeps_tensors_of(self, entry: Verified) -> bool:
        """Whether this one's tensors are kept; those of the one that was the worst until now are not needed then."""
        if self.wanted is not None:
            return entry.number == self.wanted
        assert entry.outcome is not None
        for other in self.sites:
            if other.script is not None and other.outcome is not None:
                if other.outcome.share >= entry.outcome.share and other is not entry:
                    return False
                other.script = None
        return True


def _title(title: str, node: Node | None) -> str:
    """Title of a comparison, with the tensor's path in the user's code, or the line that makes it."""
    if node is None:
        return title
    if node.op != "call_function":
        return f"gradient of {name_in_code(node)}"
    line = source_line(node)
    return title + (f", made at {line}" if line else "")


class _RecordingInterpreter(Interpreter):
    """Runs a normalized graph as it is. At the end of every attention, the tensors that it reads are compared."""

    def __init__(self, recorder: _Recorder, module: GraphModule):
        module, sites, _ = move_divisions(module, find_sites(module.graph))
        super().__init__(module)
        self.recorder = recorder
        self.values: dict[Node, Any] = {}
        self.ends: dict[Node, tuple[Verified, CutOut]] = {}
        for site in sites:
            entry = recorder.add(site)
            cut = None if site.refusal is not None else cut_out(site)
            if cut is None:
                entry.reason = RANDOM if site.refusal is None else str(site.refusal)
            else:
                self.ends[site.root] = entry, cut
        self.last = {node: root for root, (_, cut) in self.ends.items() for node in cut.inputs}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.last:
            self.values[n] = result
        if n in self.ends:
            entry, cut = self.ends[n]
            self.recorder.compare(entry, cut, [self.values[node] for node in cut.inputs])
            self.values = {node: value for node, value in self.values.items() if self.last[node] is not n}
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *inputs = args
            return self.recorder.backend(body, inputs)(*inputs)
        return super().call_function(target, args, kwargs)
