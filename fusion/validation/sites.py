"""Comparison of one site with the graph, and its verdict."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from fusion.caching import BoundedCache
from fusion.ir.expr import coordinates, loads, walk
from fusion.ir.results import size_value
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.passes import nodes
from fusion.passes.pullback.contractions import is_contraction
from fusion.passes.recognize.find import Site
from fusion.passes.specify.specify import AttentionCall
from fusion.process import outside_compilation
from fusion.validation import mask_check
from fusion.validation.program import OutOfBounds, Program, fingerprint
from fusion.validation.replay import Region, Replay
from fusion.validation.samples import EAGER_OVERFLOW, SAMPLES, SPECIAL, Role, Samples, coordinates_of_samples, keys
from fusion.validation.tolerance import Values, difference

log = logging.getLogger(__name__)
aten = torch.ops.aten
NUDGES = 4
"""In how many ways last digits are changed where values seem to disagree."""
_ROW = 1 << 40
"""Elements of a tensor are numbered below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a comparison.

    wrong: the difference between the spec and the graph, or None.
    skipped: the reason why they could not be compared, or None.
    checked: the quantities that were compared.
    seconds: duration.
    """

    wrong: str | None = None
    skipped: str | None = None
    checked: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.wrong is not None:
            return f"wrong: {self.wrong}"
        return self.checked if self.skipped is None else f"not validated: {self.skipped}"


_verdicts = BoundedCache()


def validate(site: Site, calls: Sequence[AttentionCall], examples: Mapping[str, int]) -> Verdict:
    """Compare a site with the specs that are to replace it. examples: example values of symbolic sizes. Sites of equal
    structure are compared once per process."""
    started = time.perf_counter()
    try:
        key = fingerprint(site, calls, examples)
        if (known := _verdicts.get(key)) is not None:
            return known
        with outside_compilation():
            result = _validate(site, calls, examples)
    except Exception as problem:  # the site stays as it was
        log.exception("an attention could not be validated")
        return Verdict(skipped=f"{type(problem).__name__}: {problem}")
    return _verdicts.store(key, replace(result, seconds=time.perf_counter() - started))


def _validate(site: Site, calls: Sequence[AttentionCall], examples: Mapping[str, int]) -> Verdict:
    try:
        sizes = [call.example_sizes(examples) for call in calls]
        shape = tuple(size_value(extent, examples) for extent in nodes.shape(site.root))
        if problem := _extents(site, calls, sizes, shape):
            return Verdict(wrong=problem)
        n_k = size_value(calls[0].spec.n_k, sizes[0])
        if 0 in (*shape, n_k):
            return Verdict(checked="shapes, as the example has no elements")
        compared = _Comparison(site, calls, sizes, shape, n_k, examples)
        result = compared.verdict()
        doubt = next(iter(compared.region.unknown.values()), None)
        return result if result.wrong is None or doubt is None else Verdict(skipped=doubt)
    except OutOfBounds as problem:
        return Verdict(wrong=str(problem))


def _extents(site: Site, calls: Sequence[AttentionCall], sizes: Sequence[Mapping[str, int]], shape) -> str | None:
    """Whether the spec's sizes are those of the result."""
    for call, values in zip(calls, sizes, strict=True):
        spec = call.spec
        own = {f"b{k}": extent for k, extent in enumerate(spec.batch)} | {"i": spec.n_q, "e": spec.d_v}
        stated = tuple(size_value(own[name], values) for name in spec.output.dims)
        if spec.output.dims != calls[0].spec.output.dims:
            return "the parts of a sum name the dimensions of the result differently"
        if stated != shape:
            return f"the result has the shape {list(stated)} where eager has {list(shape)}"
        given = str(nodes.dtype(site.root))
        allowed = {
            given.removeprefix("torch."),
            *([spec.dtype] if call.differentiable else []),
        }  # rounded after the call
        if math.prod(shape) and len(calls) == 1 and spec.out_dtype not in allowed:
            return f"the result is {spec.out_dtype} where eager has {given}"
    return None


class _Comparison:
    def __init__(self, site: Site, calls: Sequence[AttentionCall], sizes, shape: tuple[int, ...], n_k: int, examples):
        self.site, self.calls, self.sizes = site, calls, sizes
        spec: AttentionSpec = calls[0].spec
        self.dims = spec.output.dims
        self.places = coordinates_of_samples(self.dims, shape)
        n_q = shape[self.dims.index("i")]
        operands = {operand for call in calls for operand in call.operands}
        interior = site.interior
        left_out = any(part.op == "where" for part in walk(*(call.spec.score for call in calls)))
        left_out |= any(nodes.packet(node) in (aten.where, aten.masked_fill) for node in interior)
        self.exponentials = _without_maximum(interior)
        finite = len(calls) > 1 or left_out or bool(self.exponentials) or _shifts_by_sums(interior)
        self.region = Region(
            root=site.root,
            anchor=site.anchor,
            keys=keys(spec, sizes[0], self.places, n_q, n_k),
            n_k=n_k,
            leaves=frozenset(o for o in operands if not _is_made_of(operands, o, interior)),
            attended=frozenset(p.operands[2] for p in calls) - {o for p in calls for o in p.operands[:2]},
            interior=frozenset(interior | set(site.tail())),
            roles=_roles(site, calls),
            examples=examples,
            samples=Samples(longest=max(n_q, n_k), finite=finite),
        )

    def verdict(self) -> Verdict:
        for call, sizes in zip(self.calls, self.sizes, strict=True):
            if (problem := mask_check.mask_contradiction(call.spec, sizes)) is not None:
                return Verdict(wrong=problem)
        replays = Replay(self.region), Replay(self.region, torch.float64), Replay(self.region, torch.float32)
        programs = [
            Program(call, self.places, sizes, replays[2]) for call, sizes in zip(self.calls, self.sizes, strict=True)
        ]
        dtypes = {nodes.dtype(node) for node in (self.site.root, *self.region.leaves)}
        self.coarse = max((torch.finfo(d).eps for d in dtypes & {torch.float16, torch.bfloat16}), default=0.0)
        problem = self._problem(replays, programs)
        if problem is not None:
            nudged = [Replay(self.region, nudge=number + 1) for number in range(NUDGES)]
            problem = self._problem((*replays, *nudged), programs)
        checked = f"values in {SAMPLES} rows"
        checked += " and their gradients" if any(call.differentiable for call in self.calls) else ""
        checked += ", key ranges of the mask" if self.calls[0].spec.mask is not None else ""
        return Verdict(wrong=problem, checked=checked)

    def _problem(self, replays: Sequence[Replay], programs: Sequence[Program]) -> str | None:
        """Text of the first disagreement. replays: eager, in float64, in float32, and eager with nudged inputs."""
        index = tuple(self.places[name] for name in self.dims)
        values = [replay.value(self.site.root, index, 2) for replay in replays]
        ours = sum((p.out for p in programs[1:]), programs[0].out)
        self.spoiled, self.kinds = self._kinds(values[0], programs)
        problem = self._results(values, ours) or self._aux_outputs(replays, programs)
        if problem is None and any(call.differentiable for call in self.calls):
            return self._gradients(replays, values, programs)
        return problem

    def _kinds(self, eager: Tensor, programs: Sequence[Program]) -> tuple[Tensor, Tensor]:
        """Per sample: whether a score is +inf or NaN, and its kind. Where one is, softmaxes are NaN in the whole row,
        and exponentials without a maximum, or less a log-sum, at that key alone. Where such exponentials overflow or
        vanish, they do so in eager mode alone."""
        kinds = self.region.samples.kinds
        spoiled = torch.zeros(kinds.shape, dtype=torch.bool)
        for program in programs:
            if program.spec.mixing is None and program.spec.normalizer is not Normalizer.NONE:
                largest = program.x.detach().flatten(1).amax(1)
                spoiled |= ~(largest < math.inf)
                kinds = torch.where(~(largest < math.inf), SPECIAL, kinds)
                for limits in map(torch.finfo, self.exponentials):
                    in_range = (largest > math.log(limits.tiny)) & (largest < math.log(limits.max / program.n_k))
                    beyond = largest.isfinite() & ~in_range & ~eager.isfinite().all(1)
                    kinds = torch.where(beyond, EAGER_OVERFLOW, kinds)
        return spoiled, kinds

    def _aux_outputs(self, replays: Sequence[Replay], programs: Sequence[Program]) -> str | None:
        """Text of a disagreement in auxiliary outputs. One NaN makes the whole row NaN where it is a reduction over the
        keys, or where a score is +inf; an infinite log-sum is as good as NaN there."""
        spoiled = self.spoiled.view(-1, 1, 1)
        for program in programs:
            for use, aux in zip(program.call.uses, program.spec.aux_outputs, strict=True):
                index = tuple(program.index(entry) for entry in use.at)
                values = [replay.value(use.of, index, 3) for replay in replays]
                values.append(program.aux_value(aux.value))
                values = [torch.where(spoiled & t.isinf(), torch.nan, t) for t in values]
                whole = spoiled | (aux.over == "j")
                *values, ours = [torch.where(whole & t.isnan().any(-1, keepdim=True), torch.nan, t) for t in values]
                if problem := self._results(values, ours, use.node.name):
                    return problem
        return None

    def _results(self, replayed: Sequence[Tensor], ours: Tensor, name: str = "the result") -> str | None:
        """Text of a disagreement in one result. replayed: its values by each of the replays."""
        shape = torch.broadcast_shapes(replayed[0].shape, ours.shape)
        samples = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).flatten()
        stored = [(t, t.to(replayed[0].dtype)) for t in (*replayed, ours)]  # where it may be infinite
        flat = [torch.where(s.isinf(), s.to(t.dtype), t).expand(shape).flatten() for t, s in stored]
        eager, exact, single, *nudged, ours = flat
        return difference(
            Values(name=name, eager=eager, exact=exact, ours=ours, samples=samples, kinds=self.kinds, nudged=nudged,
                   single=single if self.coarse else None, strict=not self.coarse, coarse=self.coarse)
        )  # fmt: skip

    def _gradients(
        self, replays: Sequence[Replay], results: Sequence[Tensor], programs: Sequence[Program]
    ) -> str | None:
        generator = torch.Generator().manual_seed(3)
        shape = torch.broadcast_shapes(results[0].shape, *(program.out.shape for program in programs))
        grad = torch.randn(shape, generator=generator, dtype=torch.float32).to(results[0].dtype)
        scalars = [(t * grad.to(t.dtype)).sum() for t in results]
        scalars[2] = scalars[2] if self.coarse else scalars[2].detach()  # which is not asked for
        surrogate = torch.stack([p.surrogate(grad.float()) for p in programs]).sum()
        gradients = [_by_element(*pair) for pair in zip((*replays, replays[2]), (*scalars, surrogate), strict=True)]
        largest = self._largest_gradients(gradients[1])
        nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        for leaf in {node: None for one in gradients for node in one}:
            per_run = [one.get(leaf, nothing) for one in gradients]
            keys, where = torch.cat([keys for keys, _ in per_run]).unique(return_inverse=True)
            compared, sums = self.kinds[keys // _ROW] < SPECIAL, []
            for (_, values), at in zip(per_run, where.split([len(k) for k, _ in per_run]), strict=True):
                sums.append(torch.zeros(len(keys), dtype=torch.float64).index_add(0, at, values)[compared])
            eager, exact, single, *nudged, ours = sums
            values = Values(
                name=f"the gradient of {leaf.name}", eager=eager, exact=exact, ours=ours, nudged=nudged,
                single=single if self.coarse else None, samples=(keys // _ROW)[compared], kinds=self.kinds,
                strict=not self.coarse, condition=64, floor=largest, coarse=self.coarse,
            )  # fmt: skip
            if (problem := difference(values)) is not None:
                return problem
        return None

    def _largest_gradients(self, exact: Mapping[Node, tuple[Tensor, Tensor]]) -> Tensor:
        """[samples]: the largest of all leaves, the scale for a gradient that cancels to nothing."""
        largest = torch.zeros(len(self.kinds), dtype=torch.float64)
        for numbers, values in exact.values():
            largest.scatter_reduce_(0, numbers // _ROW, values.abs().nan_to_num(0.0, 0.0, 0.0), "amax")
        return largest


def _roles(site: Site, calls: Sequence[AttentionCall]) -> dict[Node, Role]:
    """Roles of the leaves. Q, K, V and other factors of matrix products are factors; other factors and divisors are
    scales. An added tensor that is a product, the same for all queries and keys, or ignored as the same for all keys,
    is no mask, but finite."""
    among = {*site.interior, site.anchor}
    roles = {operand: Role.FACTOR for call in calls for operand in call.operands[:3]}
    conversions = [(call, r) for call in calls for value in call.spec.values if value is not None for r in loads(value)]
    roles |= {call.operands[r.operand]: Role.FACTOR if r.operand < 3 else Role.FINITE for call, r in conversions}
    read = [(p.operands[r.operand], r) for p in calls for r in loads(p.spec.score, p.spec.weight)]
    masks = {o for o, r in read if {"i", "j"} & {*coordinates(r)}}
    score_operands = {operand for call in calls for operand in call.operands} - ({o for o, _ in read} - masks)
    roles |= {scale: Role.FINITE for attention in site.attentions for scale in attention.pullback.scales}
    for leaf in {node for inner in among for node in (inner, *inner.all_input_nodes)} - roles.keys():
        combined = list(_combinations(leaf, among))
        called = {nodes.packet(user) for _, user in combined}
        if combined and all(_multiplies(node, product) for node, product in combined):
            roles[leaf] = Role.FACTOR
        elif combined and called <= {aten.mul, aten.div}:
            roles[leaf] = Role.SCALE
        elif combined and called <= {aten.add, aten.sub} and (leaf not in score_operands or is_contraction(leaf)):
            roles[leaf] = Role.FINITE
    return roles


def _combinations(leaf: Node, among: set[Node]) -> Iterator[tuple[Node, Node]]:
    """(a tensor after operations on it alone, the node that first combines it with another), everywhere."""
    todo = [leaf]
    while todo:
        here = todo.pop()
        for user in here.users:
            if user in among and len(user.all_input_nodes) == 1:
                todo.append(user)
            elif user in among:
                yield here, user


def _multiplies(node: Node, product: Node) -> bool:
    """Whether `product` multiplies `node` as a matrix."""
    if nodes.packet(product) in (aten.baddbmm, aten.addmm):
        return node in product.args[1:]
    return nodes.packet(product) in (aten.mm, aten.bmm, aten.matmul, aten.einsum, aten.linear, aten.conv2d)


def _shifts_by_sums(interior: Iterable[Node]) -> bool:
    """Whether sums are subtracted from scores, so that infinite ones make rows NaN in the graph, not in a softmax."""
    return any(
        nodes.packet(node) in (aten.sum, aten.mean) and any(nodes.packet(u) in (aten.add, aten.sub) for u in node.users)
        for node in interior
    )


def _without_maximum(interior: Iterable[Node]) -> set[torch.dtype]:
    """The dtypes of exponentials from which no maximum is subtracted."""
    if {aten.amax, aten.max, aten.logsumexp} & {nodes.packet(node) for node in interior}:
        return set()
    return {nodes.dtype(node) for node in interior if nodes.packet(node) in (aten.exp, aten.exp2)}


def _by_element(replay: Replay, scalar: Tensor) -> dict[Node, tuple[Tensor, Tensor]]:
    """The gradient of a scalar per leaf, as (sample and number of the element, value)."""
    reads = [read for read in replay.reads if read.values.requires_grad]
    if not scalar.requires_grad or not reads:
        return {}
    gradients = torch.autograd.grad(scalar, [read.values for read in reads], allow_unused=True, retain_graph=True)
    parts: dict[Node, list[tuple[Tensor, Tensor]]] = {}
    for read, grad in zip(reads, gradients, strict=True):
        if grad is not None:
            rows = torch.arange(read.numbers.shape[0]).view(-1, *[1] * (read.numbers.dim() - 1))
            keys = (read.numbers + rows * _ROW).flatten()
            parts.setdefault(read.leaf, []).append((keys, grad.double().flatten()))
    return {leaf: (torch.cat([k for k, _ in own]), torch.cat([g for _, g in own])) for leaf, own in parts.items()}


def _is_made_of(operands: set[Node], operand: Node, interior: Set[Node]) -> bool:
    """Whether an operand was traced back to another one, whose values then decide its own. An operand that was traced
    back without success is read directly: its ancestors are not of its kind, and would get other values."""

    def parents(here: Node) -> list[Node]:  # of several results, those looked into are
        return here.all_input_nodes if here in interior or not nodes.is_tensor(here) else []

    return any(here in operands for here in nodes.walk_up(parents(operand), parents))
