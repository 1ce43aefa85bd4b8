"""`fusion.verify`: every attention of a model beside eager and float64, on the user's own inputs; and the whole model.

The model runs in eager mode. Where it reaches an attention, the tensors that this reads are kept, and the attention
alone is compiled and compared (`fusion.api.check`), from the same text that `Site.script` writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fusion import dynamo
from fusion.api import check
from fusion.api.compare import Measured, compare_results
from fusion.exactness import is_float
from fusion.passes.cut_out import CutOut, cut_out
from fusion.passes.prepare import cascades
from fusion.passes.recognize.find import Site, may_hold_attention
from fusion.passes.trace.normalize import normalize
from fusion.passes.trace.regions import without_regions
from fusion.report import site_script
from fusion.torch_private.dynamo import original_of
from fusion.torch_private.trees import tree_map

RANDOM = "it draws random numbers, and is not the same twice"


@dataclass(slots=True, kw_only=True)
class Verified:
    """One attention.

    place: in the user's code.
    outcome: of the comparison; None where nothing of ours would run, for the `reason`.
    """

    number: int
    place: str
    outcome: check.Outcome | None = None
    reason: str | None = None
    script: Callable[..., str] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        told = f"not fused: {self.reason}" if self.outcome is None else str(self.outcome)
        return "\n    ".join([f"[{self.number}] {self.place}", *told.splitlines()])


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
        whole = self.whole
        beyond = whole.error is not None and whole.allowed is not None and not whole.error <= whole.allowed
        return not (self.wrong or beyond or whole.failure)

    def __str__(self) -> str:
        compared = [site for site in self.sites if site.outcome is not None]
        lines = [*map(str, self.sites)]
        lines.append(f"{len(compared) - len(self.wrong)} of {len(compared)} attentions right, of {len(self.sites)} met")
        if self.whole.failure:
            lines.append(f"the whole model: fusion failed: {self.whole.failure}")
        elif self.whole.error is None or self.whole.allowed is None:
            lines.append(f"the whole model was not compared. {self.note}")
        else:
            verdict = "right" if self.whole.error <= self.whole.allowed else "WRONG"
            lines.append(f"{verdict}  the whole model: error {self.whole.error:.3g}, allowed {self.whole.allowed:.3g}")
        return "\n".join(lines)


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
    site: the number of the attention whose tensors to keep for its script; by default, those of the one that comes
        nearest to its bound.
    options: of the backend.

    The outputs of the whole call are compared as well. Raises ComparisonError where eager itself fails.
    """
    original, record = original_of(function), _Record(options=options or {}, gradients=gradients, wanted=site)
    given = tree_map(_differentiable, (args, kwargs)) if gradients else (args, kwargs)
    dynamo.register()
    with torch.set_grad_enabled(gradients):
        torch.compile(original, backend=record.backend, dynamic=False)(*given[0], **given[1])
    whole, note = compare_results(original, args, kwargs, options or {})
    return Verification(sites=record.sites, whole=whole, note=note)


def _differentiable(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if is_float(leaf) else leaf


def _kind(value: Any) -> Any:
    """What compiled code depends on."""
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value


@dataclass(slots=True, kw_only=True)
class _Record:
    """What has been met so far, and how to compare it.

    wanted: whose tensors are kept.
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
        return _Watched(self, normalize(whole, example_inputs)).run

    def met(self, site: Site) -> Verified:
        """A new entry, in the order in which `fusion explain` lists them."""
        place = site_script.place(site)
        self.sites.append(Verified(number=len(self.sites), place=place))
        return self.sites[-1]

    def compare(self, found: Verified, cut: CutOut, values: Sequence[Any]) -> None:
        """Compare one attention; of several calls the worst is kept."""
        text = site_script.function_text(cut)
        key = text, *map(_kind, values)
        if key not in self.functions:
            space: dict[str, Any] = {"torch": torch}
            exec(compile(text, "<attention>", "exec"), space)
            self.functions[key] = space["attention"]
        wanted = [self.gradients and isinstance(v, Tensor) and v.requires_grad for v in values]
        named = [node.name for node in cut.module.graph.find_nodes(op="placeholder")]
        outcome = check.check(
            self.functions[key],
            values,
            floats=site_script.widened(text),
            gradients=[name for name, wants in zip(named, wanted, strict=True) if wants],
            options=self.options,
        )
        if found.outcome is not None and found.outcome.share >= outcome.share:
            return
        found.outcome = outcome
        if not self._keeps(found):
            return
        kept = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
        about = f"Attention {found.number}: {found.place}"
        found.script = functools.partial(
            site_script.script, cut, about, values=kept, gradients=wanted, options=self.options
        )

    def _keeps(self, found: Verified) -> bool:
        """Whether this one's tensors are kept; those of what was the worst until now are not needed any more."""
        if self.wanted is not None:
            return found.number == self.wanted
        assert found.outcome is not None
        for other in self.sites:
            if other.script is not None and other.outcome is not None:
                if other.outcome.share >= found.outcome.share and other is not found:
                    return False
                other.script = None
        return True


class _Watched(Interpreter):
    """Runs a normalized graph as it is. At the end of every attention, what it reads is handed on to be compared."""

    def __init__(self, record: _Record, module: GraphModule):
        sites, _ = cascades.find(module.graph)
        super().__init__(module)
        self.record = record
        self.held: dict[Node, Any] = {}
        self.ends: dict[Node, tuple[Verified, CutOut]] = {}
        for site in sites:
            found = record.met(site)
            cut = None if site.refusal is not None else cut_out(site)
            if cut is None:
                found.reason = RANDOM if site.refusal is None else str(site.refusal)
            else:
                self.ends[site.root] = found, cut
        self.last = {node: root for root, (_, cut) in self.ends.items() for node in cut.inputs}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.last:
            self.held[n] = result
        if n in self.ends:
            found, cut = self.ends[n]
            self.record.compare(found, cut, [self.held[node] for node in cut.inputs])
            self.held = {node: value for node, value in self.held.items() if self.last[node] is not n}
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *given = args
            return self.record.backend(body, given)(*given)
        return super().call_function(target, args, kwargs)
