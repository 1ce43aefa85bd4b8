"""A call of attention with polynomial features: heads with bounded scores are approximated, the others are exact.

Causal attention on a CPU goes by chunks (`Chunks`): the state of the chunks before, exact attention inside of one. All
chunks of all heads go together: one call of the exact kernel with every chunk as a head of its own, one of each feature
kernel, and a running sum over the chunks' states in between.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion.approximate import cost
from fusion.approximate.certificates import Certificate, Plain, is_captured, output_error, record
from fusion.approximate.cost import CAUSAL_CHUNK as CHUNK
from fusion.approximate.cost import Choice, feature_count
from fusion.approximate.head_batches import (
    KEPT,
    ExactHeads,
    Executor,
    Extents,
    HeadPacker,
    Heads,
    ieee_products,
    problem_of,
)
from fusion.approximate.score_bounds import HeadBounds, Inspection
from fusion.caching import BoundedCache
from fusion.codegen.reference import polynomial as reference
from fusion.errors import ApproximationError
from fusion.ir import integers
from fusion.ir.expr import SCORE, const
from fusion.ir.ops import where
from fusion.ir.spec import AttentionSpec, Normalizer, Operand
from fusion.machine import Machine, in_use
from fusion.planning.problem import Problem

METHOD = "polynomial"
SAMPLED, OPTIMISM = (64, 128), 0.85
"""Queries and keys of each head that are looked at before all are; by how much the moments of so few are lowered."""
SNAP = 32
"""B is rounded up to the next 1/SNAP of an octave, so that few polynomials are ever computed."""
STEPS = 8
"""Moments are rounded up to the next 1/STEPS of an octave."""
LARGEST = 64.0
"""Bounds for which a polynomial is looked for at all."""
CHOICES = 4096
"""Polynomials, or that there is none, that are kept for one set of sizes."""


class Centred(NamedTuple):
    """Operands of the polynomial, in float32.

    keys: [U, N_k, d] minus their mean, of norm at most 1.
    values: [U, N_k, d_v].
    queries: [H, N_q, d] times the divisor of the keys.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizeFacts:
    """Facts of a call that follow from its sizes, before its data are looked at.

    exact: the certificate of such a call, where the exact kernel runs whatever the data are.
    beyond: the certificate of a call where a sample of the data is beyond every polynomial.
    limit: the largest number of features of a degree that is predicted to pay.
    largest: the bound above which no polynomial is chosen, whatever the moments are.
    choices: by bound, moment and least mean weight, each in steps.
    """

    extents: Extents
    exact: Certificate | None
    beyond: Certificate
    limit: int
    largest: float
    choices: dict[tuple[int, int, int], Choice | None] = field(default_factory=lambda: BoundedCache(CHOICES))


class PolynomialAttention:
    """Executor of an eligible spec.

    exact: the kernel for the complete call.
    build: builds the exact kernel of another spec.
    always: skip the comparison of predicted times (tests and examples).
    kernels: "amx" or "triton" where such feature kernels run; torch's products otherwise.
    """

    def __init__(
        self, spec: AttentionSpec, plain: Plain, exact: Executor, build: Callable[[AttentionSpec], Executor],
        machine: Machine, epsilon: float, *, kernels: str | None, always: bool = False,
    ):  # fmt: skip
        self.spec, self.plain, self.exact, self.machine, self.epsilon = spec, plain, exact, machine, epsilon
        self.kernels, self.always = kernels, always
        self.some, self.gather = ExactHeads(spec, build), HeadPacker(spec)
        self.look = Inspection(self.gather, plain.scale, plain.causal, kernels == "amx")
        self._predicted: dict[tuple[int, ...], bool] = BoundedCache(KEPT)
        self._facts: dict[tuple[int, ...], _SizeFacts] = BoundedCache(KEPT)
        self._chunks: Chunks | None = None
        self.exact_values = spec.operands[2].dtype == "bfloat16"

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if is_captured(METHOD, self.epsilon, operands):
            return self.exact(operands, sizes)
        facts = self._facts.get(tuple(sizes)) or self._facts_of_sizes(operands, sizes)
        if facts.exact is not None or not (self.always or self._any_bounded(operands, sizes, facts)):
            record(facts.exact or facts.beyond)
            return self.exact(operands, sizes)
        figures = self.look.whole(operands, sizes, limit=facts.largest)
        groups = self._groups(figures, facts)
        if groups.keys() != {None}:
            with ieee_products():
                return self._run(self.gather(operands, sizes), sizes, figures, groups)
        reason = "no polynomial is both certified and predicted to be faster"
        record(lambda: dataclasses.replace(facts.beyond, reason=reason, bound=_finite_or_none(max(figures.bounds))))
        return self.exact(operands, sizes)

    def _facts_of_sizes(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> _SizeFacts:
        """Facts that follow from the sizes alone."""
        heads, limit = self.gather(operands, sizes), cost.MAX_FEATURES
        if (reason := heads.unfit(self.plain.causal)) is not None or self.always:
            pass
        elif (limit := self._limit(heads.extents)) == 0:
            reason = "even degree 1 is predicted to be slower at this length"
        elif not cost.worth_a_look(*self._problem(heads.extents)):
            reason = "looking at the data would cost too much of the exact kernel's time at this length"
        elif self._choose(heads.extents, 0.0, 0.0, 1.0, limit) is None:
            reason = "no polynomial is both certified and predicted to be faster at this length"
        every = torch.arange(len(heads.q))
        beyond = "a sample of queries and keys is beyond every polynomial that is certified and predicted to be faster"
        exact = heads.exact(METHOD, self.epsilon, every, reason) if reason else None
        beyond = heads.exact(METHOD, self.epsilon, every, beyond)
        facts = _SizeFacts(extents=heads.extents, exact=exact, beyond=beyond, limit=limit, largest=LARGEST)
        if not reason:
            facts = dataclasses.replace(facts, largest=self._largest_bound(facts))
        self._facts[tuple(sizes)] = facts
        return facts

    def _largest_bound(self, facts: _SizeFacts) -> float:
        """Largest bound for which there is a choice, with the smallest possible moments, rounded up."""
        if self._choice(facts, LARGEST, 0.0, 1.0) is not None:
            return LARGEST
        low, high = 0, _steps(LARGEST, SNAP)  # a choice, none
        while high - low > 1:
            middle = (low + high) // 2
            choice = self._choice(facts, 2.0 ** (middle / SNAP), 0.0, 1.0)
            low, high = (low, middle) if choice is None else (middle, high)
        return 2.0 ** (high / SNAP)

    def _any_bounded(self, operands: Sequence[Tensor], sizes: Sequence[int], facts: _SizeFacts) -> bool:
        """Whether any head may be bounded, judged by a sample of the rows: to inspect all of them costs more."""
        for head in self.look.sample(operands, sizes, *SAMPLED):
            bound = head.keys * head.queries * abs(self.plain.scale)
            if self._choice(facts, bound, OPTIMISM * head.moment, 1.0) is not None:
                return True
        return False

    def _pays(self, extents: Extents, features: int, planes: int) -> bool:
        """Whether the polynomial is predicted to be faster, for all heads."""
        key = (*extents, features, planes)
        if (pays := self._predicted.get(key)) is None:
            here, problem = self._problem(extents)
            ours = cost.polynomial_seconds(here, problem, features, planes, self.kernels is not None)
            pays = self._predicted[key] = ours < cost.WORTH * cost.exact_seconds(here, problem)
        return pays

    def _problem(self, extents: Extents) -> tuple[Machine, Problem]:
        """Planner's arguments: the machine, with as many cores as torch uses, and the sizes."""
        return in_use(self.machine), problem_of(extents, self.spec.dtype, self.plain.causal)

    def _centred(self, heads: Heads, figures: HeadBounds) -> Centred:
        owners = [0] * len(heads.k)  # a head of each
        for head, owner in enumerate(heads.owner.tolist()):
            owners[owner] = head
        finite = [x if x < math.inf else 1.0 for x in figures.keys]
        unit = torch.tensor(finite, dtype=torch.float32, device=heads.q.device)
        keys = (heads.k.float() - figures.means[owners, None]).div_(unit[owners, None, None])
        return Centred(keys, heads.v.float(), heads.q.float() * (self.plain.scale * unit)[:, None, None])

    def _groups(self, figures: HeadBounds, facts: _SizeFacts) -> dict[tuple[int, int] | None, dict[int, Choice]]:
        """Heads and their polynomials by the (degree, planes) of those that run together (None: exact)."""
        groups: dict[tuple[int, int] | None, dict] = defaultdict(dict)
        of_heads = zip(figures.bounds, figures.moments, figures.least, strict=True)
        for head, (bound, moment, least) in enumerate(of_heads):
            choice = self._choice(facts, bound, moment, least)
            groups[choice and (choice.polynomial.degree, choice.planes)][head] = choice
        return groups

    def _choice(self, facts: _SizeFacts, bound: float, moment: float, least: float) -> Choice | None:
        """Polynomial for a head of these figures that is certified and predicted to be faster, or None."""
        if not (bound <= LARGEST and moment < math.inf and least > 0):
            return None
        key = (_steps(bound, SNAP), _steps(moment, STEPS), _steps(1 / least, STEPS))
        if key not in facts.choices:
            bound, moment, inverse = (2.0 ** (n / m) for n, m in zip(key, (SNAP, STEPS, STEPS), strict=True))
            facts.choices[key] = self._choose(facts.extents, bound, moment, 1 / inverse, facts.limit)
        return facts.choices[key]

    def _choose(self, extents: Extents, bound: float, moment: float, least: float, limit: int) -> Choice | None:
        choice = cost.choose(
            extents.d, bound, self.epsilon, self.exact_values, self.kernels is not None, moment, least, limit
        )
        if choice is None or not (self.always or self._pays(extents, choice.features, choice.planes)):
            return None
        return choice

    def _limit(self, extents: Extents) -> int:
        """The largest number of features of a degree that is predicted to pay."""
        result = 0
        for degree in range(1, 17):
            features = feature_count(extents.d, degree)
            if features > cost.MAX_FEATURES or not self._pays(extents, features, 1):
                break
            result = features
        return result

    def _run(self, heads: Heads, sizes: Sequence[int], figures: HeadBounds, groups) -> Tensor:
        data, out = self._centred(heads, figures), None
        largest = data.values.norm(dim=-1).amax(-1)[heads.owner].tolist()
        for key, choices in groups.items():
            chosen = torch.tensor(list(choices))
            owner = heads.owner[chosen]
            if key is None:
                result = self.some(heads.q[chosen], heads.k[owner], heads.v[owner], sizes).float()
                bound = _finite_or_none(max(figures.bounds[head] for head in choices))
                reason = "no polynomial is certified and faster at this B"
                record(heads.exact(METHOD, self.epsilon, chosen, reason, bound))
            elif len(groups) == 1:
                result = self._attend(data.queries, data.keys, data.values, heads.owner, list(choices.values()), sizes)
            else:
                used, owner = torch.unique(owner, return_inverse=True)
                result = self._attend(
                    data.queries[chosen], data.keys[used], data.values[used], owner, list(choices.values()), sizes
                )
            if key is not None:
                self._certify(heads, figures, choices, largest)
            if len(groups) == 1:
                return heads.store(result)
            out = result.new_empty(len(heads.q), *result.shape[1:]) if out is None else out
            out[chosen] = result
        assert out is not None
        return heads.store(out)

    def _certify(self, heads: Heads, figures: HeadBounds, choices: dict[int, Choice], largest: Sequence[float]) -> None:
        """Record one certificate for all heads with the same polynomial."""
        alike: dict[Choice, list[int]] = defaultdict(list)
        for head, choice in choices.items():
            alike[choice].append(head)
        for choice, members in alike.items():
            record(
                Certificate(
                    method=METHOD, ran=METHOD, heads=heads.coordinates(torch.tensor(members)), epsilon=self.epsilon,
                    n_q=heads.n_q, n_k=heads.n_k, weight_error=choice.error,
                    bound=max(figures.bounds[head] for head in members),
                    moment=max(figures.moments[head] for head in members),
                    output_error=output_error(choice.error, max(largest[head] for head in members)),
                    degree=choice.polynomial.degree, features=choice.features,
                )
            )  # fmt: skip

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, choices: list[Choice], sizes: Sequence[int]
    ) -> Tensor:
        """[h, N_q, d_v], normalised. choices: of every head, all of one degree."""
        powers = torch.tensor([choice.polynomial.coefficients for choice in choices], dtype=torch.float64)
        if self.kernels is None:
            return reference.attend(q, k[owner], v[owner], powers, CHUNK if self.plain.causal else 0)
        if self.kernels == "triton":
            from fusion.codegen.triton import polynomial as triton

            wanted = self._features_of_a_block(q.shape[2], v.shape[2], choices[0].features)
            run = triton.kernels(*q.shape[2:], *v.shape[2:], powers.shape[1] - 1, choices[0].planes, q.is_cpu, wanted)
            return run.attend(q, k, v, owner, powers, CHUNK if self.plain.causal else 0)
        from fusion.codegen.cpu import polynomial as cpu

        run = cpu.kernels(q.shape[-1], v.shape[-1], powers.shape[1] - 1, choices[0].planes)
        weights = run.weights(powers)
        if self.plain.causal:
            self._chunks = self._chunks or Chunks(self.some.spec, self.machine)
            return self._chunks.attend(run, q, k, v, owner, weights, sizes)
        state = run.state(k, v)
        state = (state[owner] if len(k) < len(q) else state) * weights[..., None]
        return run.readout(q, state, divided=True)

    def _features_of_a_block(self, d: int, d_v: int, features: int) -> int:
        """Number of features of a block, for as few blocks as possible, since keys and queries are read once for each.
        The state [features, d_v + 1] of one fits the fast memory beside a row of Q, or of K and V, and its features."""
        most = max(1, (self.machine.fast_elements(self.spec.dtype) - d - d_v - 1) // (d_v + 2))
        return -(-features // -(-features // most))


def _finite_or_none(bound: float) -> float | None:
    """None for a bound that was not computed to the end."""
    return bound if bound < math.inf else None


def _steps(x: float, steps: int) -> int:
    """n, such that 2**(n / steps) is x rounded up, and at least 2**-20."""
    return math.ceil(math.log2(max(x, 2.0**-20)) * steps)


class Chunks:
    """Chunked causal attention of a spec over heads as plain tensors (of `ExactHeads`)."""

    def __init__(self, spec: AttentionSpec, machine: Machine):
        from fusion.codegen import cpu

        assert spec.mask is not None
        length = integers.integer(CHUNK)
        mask = dataclasses.replace(spec.mask, fill=-math.inf, full=SCORE)
        inside = dataclasses.replace(
            spec, n_q=length, n_k=length, dtype="float32", out_dtype="float32", normalizer=Normalizer.SOFTMAX,
            row_scale=None, score=where(mask.live, SCORE, const(-math.inf)), mask=mask,
            operands=tuple(Operand(dtype="float32", rank=3, name=o.name) for o in spec.operands),
        )  # fmt: skip
        kernel = cpu.compile_training(inside, machine)  # for the statistics of the rows
        if kernel is None:
            raise ApproximationError(f"there is no kernel with statistics for {inside}; ask for exact attention")
        self._kernel = kernel

    def inside(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Exact attention within chunks, [h, CHUNK, d_v], and its normaliser, [h, CHUNK], of [h, CHUNK, d] operands."""
        out, (_, shift, factor) = self._kernel.outputs([q, k, v], [*sizes, len(q)])
        return out, 1 / (torch.exp2(shift) * factor.abs())  # a weight is 2**(unit * score + shift) * |factor|

    def attend(
        self, run, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        """[h, N, d_v], for queries [h, N, d] and the keys [u, N, d] and values [u, N, d_v] of their owners.

        run: the feature kernels.
        weights: [h, features].
        sizes: those of the call.
        """
        heads, n, _ = q.shape
        if missing := -n % CHUNK:  # rows of zeros at the end
            q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        q, k, v = (x.contiguous().unflatten(1, (-1, CHUNK)) for x in (q, k, v))
        near_k, near_v = (x if len(x) == heads else x[owner] for x in (k, v))
        out, normaliser = self.inside(q.flatten(0, 1), near_k.flatten(0, 1), near_v.flatten(0, 1), sizes)
        out, normaliser = (x.view(heads, -1, CHUNK, x.shape[-1]) for x in (out, normaliser[..., None]))
        if out.shape[1] > 1:
            # Keys of zeros that fill the last chunk are in no state that is used.
            state = run.state(k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, k.shape[:2])
            before = state[:, :-1].cumsum(1)
            before = (before if len(k) == heads else before[owner]) * weights[:, None, :, None]
            far = run.readout(q[:, 1:].flatten(0, 1), before.flatten(0, 1)).unflatten(0, (heads, -1))
            later, near = out[:, 1:], normaliser[:, 1:]
            later.mul_(near).add_(far[..., :-1]).div_(near.add_(far[..., -1:]))
        return out.flatten(1, 2)[:, :n]
