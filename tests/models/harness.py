"""Run one architecture in eager mode, in float64 and compiled; compare, and count its attention sites."""

import dataclasses
import re
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.utils import counters

import fusion
from tests.models import oracle
from tests.models.build import Entropy, cast
from tests.models.candidates import Candidate
from tests.models.gradients import DRAWS, assert_gradients_as_exact
from tests.models.zoo import Entry
from tests.numerics import Errors, assert_as_exact_over_draws, leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Why a site was not fused, or not validated."""

    reason: str
    location: str


class Mismatch(AssertionError):
    """Wrong numbers; `outcome` has what was compiled."""

    def __init__(self, message: str, outcome: "Outcome"):
        super().__init__(message)
        self.outcome = outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What compiling one architecture gave. `witnessed` are the oracle's sites, the others the compiler's own."""

    name: str
    family: str
    witnessed: tuple[oracle.Site, ...]
    sites: int
    fused: int
    unfused: tuple[Told, ...]
    unvalidated: tuple[Told, ...]  # of those fused
    notes: tuple[str, ...]
    graphs: int
    share: float  # largest error / bound over all outputs
    entropies: tuple[float, ...]  # of the softmaxes in eager mode: mean entropy / log(N) of each
    seconds: float  # compilation and first call

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of attention in this architecture."""
        return frozenset().union(*(s.kinds for s in self.witnessed)) if self.witnessed else frozenset()

    @property
    def total(self) -> int:
        """Sites by the oracle's count, so that what the compiler overlooks counts against it."""
        return max(self.fused, len(self.witnessed))


class Witness:
    """A backend that lets the oracle look at each graph and hands it on to the backend under test."""

    def __init__(self, backend: str, **keywords: Any):
        self.compile = torch._dynamo.lookup_backend(backend)
        self.keywords = keywords
        self.sites: list[oracle.Site] = []
        self.graphs = 0

    def __call__(self, graph_module, example_inputs, **keywords):
        self.graphs += 1
        self.sites += oracle.sites(graph_module.graph)
        return self.compile(graph_module, example_inputs, **self.keywords, **keywords)


def compiled(model: torch.nn.Module, backend: str = "fusion", options: dict[str, Any] | None = None, **keywords: Any):
    """(compiled model, the witness that sits in its backend)"""
    witness = Witness(backend, **({} if options is None else {"options": options}))
    return torch.compile(model, backend=witness, **keywords), witness


def check_gradients(entry: Candidate, dtype: torch.dtype = torch.float32, batch: int = 2, **options: Any) -> Outcome:
    """Compile `entry`, in eval mode, and assert the numerics rule for the gradient of every parameter, for many inputs
    together where it does not hold for a few. options: of the fusion backend."""
    torch._dynamo.reset()
    counters.clear()
    model = entry.build().to(dtype).requires_grad_(True)
    run, witness = compiled(model, options=options)
    start = time.perf_counter()

    def comparisons(count: int) -> list[Errors]:
        draws = [cast(entry.inputs(model, batch=batch, seed=seed), dtype) for seed in range(count)]
        return assert_gradients_as_exact(model, run, draws, entry.name)

    with fusion.collect_reports() as reports:
        try:
            found = comparisons(DRAWS)
        except AssertionError:
            try:
                found = comparisons(4 * DRAWS)
            except AssertionError as error:
                raise Mismatch(str(error), _outcome(entry, witness, reports, [], [], 0.0)) from None
    return _outcome(entry, witness, reports, found, [], time.perf_counter() - start)


@torch.no_grad()
def check(
    entry: Entry | Candidate,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    inner: str = "eager",
    backend: str = "fusion",
    emitter: str = "auto",
    dynamic: bool | None = None,
) -> Outcome:
    """Compile `entry` and assert the numerics rule for all of its outputs, for several inputs together where it does
    not hold for the first. dynamic: as of `torch.compile`.

    With a backend other than "fusion", which takes no options of ours, only the comparison and the oracle's count mean
    anything.
    """
    torch._dynamo.reset()
    counters.clear()
    model = entry.build()
    options = {"inner": inner, "emitter": emitter} if backend == "fusion" else None
    run, witness = compiled(model, backend, options, dynamic=dynamic)
    seconds, entropies = list[float](), list[float]()

    def draw() -> list[dict[str, torch.Tensor]]:
        inputs = cast(entry.inputs(model, batch=batch, seed=len(seconds)), dtype)
        model.to(dtype)
        with Entropy() as entropy:
            eager = model(**inputs)
        start = time.perf_counter()
        actual = run(**inputs)
        seconds.append(time.perf_counter() - start)
        entropies.extend(entropy.shares)
        telling = _telling(eager)
        results = (actual, eager, entry.reference(model, inputs))
        return [{path: t for path, t in leaves(result) if path in telling} for result in results]

    with fusion.collect_reports() as reports:
        try:
            comparisons = assert_as_exact_over_draws(draw, dtype, name=entry.name)
        except AssertionError as error:
            raise Mismatch(str(error), _outcome(entry, witness, reports, [], entropies, seconds[0])) from None
    return _outcome(entry, witness, reports, comparisons, entropies, seconds[0])


def _telling(eager: Any) -> set[str]:
    """Outputs to compare: those of more than a few elements, if there are any.

    Eager's error in a single logit is one draw, often near zero by luck, and bounds nothing; the embeddings that such
    a logit is a product of are compared.
    """
    sizes = {path: tensor.numel() for path, tensor in leaves(eager)}
    return {path for path, size in sizes.items() if size >= min(16, max(sizes.values()))}


def _outcome(
    entry: Entry | Candidate,
    witness: Witness,
    reports: list,
    comparisons: list[Errors],
    entropies: list[float],
    seconds: float,
) -> Outcome:
    counted = counters["fusion"]
    found = [site for report in reports for site in report.sites]
    doubted = [site for site in found if site.fused and not str(site.validated).startswith("values")]
    return Outcome(
        name=entry.name,
        family=entry.family,
        witnessed=tuple(witness.sites),
        sites=counted["sites"],
        fused=counted["fused"],
        unfused=_told((site.reason, site.location) for site in found if not site.fused),
        unvalidated=_told((site.validated, site.location) for site in doubted),
        notes=tuple(note for report in reports for note in report.notes if "no attention" not in note),
        graphs=witness.graphs,
        share=max((c.share for c in comparisons), default=float("inf")),
        entropies=tuple(entropies),
        seconds=seconds,
    )


def _told(reasons: Iterable[tuple[str | None, str | None]]) -> tuple[Told, ...]:
    return tuple(Told(reason=str(reason), location=_short(str(location))) for reason, location in reasons)


def _short(location: str) -> str:
    """Where a site stands, from its package's folder of models on."""
    return re.split("/models/|/site-packages/|/lib/", location)[-1]


def table(outcomes: list[Outcome]) -> str:
    """The table that a test run prints: one line per architecture, then reasons, then totals."""
    lines = [f"{'architecture':28} {'family':16} {'sites':>5} {'fused':>5} {'error/bound':>11} {'seconds':>7}"]
    for outcome in sorted(outcomes, key=lambda o: (o.family, o.name)):
        lines.append(
            f"{outcome.name:28} {outcome.family:16} {outcome.total:5} {outcome.fused:5} "
            f"{outcome.share:11.2f} {outcome.seconds:7.2f}"
        )
        overlooked = len(outcome.witnessed) - outcome.sites
        lines += [f"    overlooked: {overlooked}"] if overlooked > 0 else []
        lines += [f"    {note}" for note in outcome.notes]
        lines += [f"    {left.location}: {left.reason}" for left in (*outcome.unfused, *outcome.unvalidated)]
    total, fused = sum(o.total for o in outcomes), sum(o.fused for o in outcomes)
    lines.append(f"{len(outcomes)} architectures, {fused} of {total} sites fused ({fused / max(1, total):.1%})")
    return "\n".join(lines)
