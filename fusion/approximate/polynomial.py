"""A call of attention with polynomial features: what is bounded is approximated, head by head, the rest is exact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusion.approximate import cost
from fusion.approximate.certificates import Certificate, note_exact, output_error, record
from fusion.approximate.chunks import Chunks
from fusion.approximate.cost import CAUSAL_CHUNK as CHUNK
from fusion.approximate.cost import Choice
from fusion.approximate.eligible import Plain
from fusion.approximate.heads import KEPT, ExactHeads, Executor, Extents, Gatherer, Heads, ieee_products, problem_of
from fusion.approximate.polynomials import feature_count
from fusion.codegen.reference import polynomial as reference
from fusion.cost.problem import Problem
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine, with_cores

METHOD = "polynomial"
SAMPLED, OPTIMISM = (12, 32), 0.85
"""Queries and keys of each head that are looked at before all are, and by how much the sample's figures are lowered."""
RESAMPLED = 64, 128
"""The same of a second look, whose figures are taken as they are."""
SNAP = 32
"""B is rounded up to the next 1/SNAP of an octave, so that few polynomials are ever computed."""
MARGIN, MOMENT_MARGIN = 1 + 1e-5, 1e-4
"""Cover the float32 rounding of norms (as a factor), and of moments (times B squared, on top)."""
STEPS = 8
"""Moments are rounded up to the next 1/STEPS of an octave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Centred:
    """What is computed of a call before anything is decided, in float32.

    keys: [U, N_k, d] minus their mean, of norm at most 1. values: [U, N_k, d_v]. queries: [H, N_q, d] times everything
    that the keys were divided by. Per head, [H]: bounds, B; moments, a bound on the mean square score of a row over the
    keys that are approximated, relative to their mean weight; least, a lower bound of this mean weight.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    bounds: Tensor
    moments: Tensor
    least: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the sizes of a call say before its data are looked at. exact: the certificate of such a call, where the
    exact kernel runs whatever the data are; beyond: the certificate where a sample of the data ends the matter. moment:
    see `PolynomialAttention._largest_moment`."""

    extents: Extents
    exact: Certificate | None
    beyond: Certificate
    moment: float


class PolynomialAttention:
    """The executor of an eligible spec.

    exact: the kernel for the whole call; build: makes the exact kernel of another spec. always: skip the comparison of
    predicted times (tests and examples). kernels: "amx" or "triton" where such feature kernels run; torch's products
    otherwise.
    """

    def __init__(
        self, spec: AttentionSpec, plain: Plain, exact: Executor, build: Callable[[AttentionSpec], Executor],
        machine: Machine, epsilon: float, *, kernels: str | None, always: bool = False,
    ):  # fmt: skip
        self.spec, self.plain, self.exact, self.machine, self.epsilon = spec, plain, exact, machine, epsilon
        self.kernels, self.always = kernels, always
        self.some, self.gather = ExactHeads(spec, build), Gatherer(spec)
        self._predicted: dict[tuple[int, ...], bool] = {}
        self._known: dict[tuple[int, ...], _Known] = {}
        self._blocks: dict[tuple[int, ...], int] = {}
        self._chunks: Chunks | None = None
        self.exact_values = spec.operands[2].dtype == "bfloat16"

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if operands[0].is_cuda and torch.cuda.is_current_stream_capturing():
            note_exact(
                METHOD, self.epsilon, operands, "a CUDA graph is being captured, which no look at data fits into"
            )
            return self.exact(operands, sizes)
        known = self._known.get(tuple(sizes)) or self._settle(operands, sizes)
        if known.exact is not None or not (self.always or self._any_bounded(operands, sizes, known)):
            record(known.exact or known.beyond)
            return self.exact(operands, sizes)
        with ieee_products():
            heads = self.gather(operands, sizes)
            data = self._centred(heads)
            groups = self._groups(heads, data)
            if groups.keys() != {None}:
                return self._run(heads, sizes, data, groups)
            reason, bound = "no polynomial is both certified and predicted to be faster", float(data.bounds.max())
            record(self._exact_certificate(heads, torch.arange(len(heads.q)), reason, bound))
        return self.exact(operands, sizes)

    def _settle(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> _Known:
        """What the sizes alone say."""
        heads, reason, moment = self.gather(operands, sizes), None, 0.0
        if not (heads.n_q and heads.n_k and heads.q.shape[-1] and heads.v.shape[-1] and len(heads.q)):
            reason = "the call is empty"
        elif self.plain.causal and heads.n_q != heads.n_k:
            reason = "causal with unequal numbers of queries and keys"
        elif not self.always and not self._pays(heads.extents, 1 + heads.q.shape[-1], 1):
            reason = "even degree 1 is predicted to be slower at this length"
        elif not self.always and not cost.worth_a_look(*self._problem(heads.extents)):
            reason = "looking at the data would cost too much of the exact kernel's time at this length"
        elif not self.always and (moment := self._largest_moment(heads.extents)) == 0:
            reason = "no polynomial is both certified and predicted to be faster at this length"
        every = torch.arange(len(heads.q))
        beyond = "a sample of queries and keys is beyond every polynomial that is certified and predicted to be faster"
        exact = self._exact_certificate(heads, every, reason, None) if reason else None
        beyond = self._exact_certificate(heads, every, beyond, None)
        if len(self._known) >= KEPT:
            self._known.clear()
        found = self._known[tuple(sizes)] = _Known(extents=heads.extents, exact=exact, beyond=beyond, moment=moment)
        return found

    def _any_bounded(self, operands: Sequence[Tensor], sizes: Sequence[int], known: _Known) -> bool:
        """Whether a sample of the rows leaves hope for any head: looking at all of them costs more."""
        # Few numbers: numpy takes a fraction of the time of as many tensor operations.
        sample = self.gather.sample(operands, sizes, *SAMPLED)
        with np.errstate(all="ignore"):  # what is not finite has no polynomial
            scores = np.matmul(sample.q, sample.k.transpose(0, 2, 1))
            count, square = scores.shape[-1], (self.plain.scale * OPTIMISM) ** 2
            mean = np.add.reduce(scores, -1) / count  # taken away from the scores as centring the keys would
            moments = square * np.maximum.reduce(np.add.reduce(scores * scores, -1) / count - mean * mean, -1)
            possible = np.flatnonzero(moments <= known.moment).tolist()
            if not possible:
                return False
            # More rows, by second moments, where that leaves hope: most of what is near the limit ends here.
            sample = self.gather.sample(operands, sizes, *RESAMPLED)
            keys = sample.k - sample.k.mean(1, keepdims=True)
            spread = np.matmul(keys.transpose(0, 2, 1), keys) / keys.shape[1]
            moments = (np.matmul(sample.q, spread) * sample.q).sum(-1).max(-1) * self.plain.scale**2
            bounds = (sample.q**2).sum(-1).max(-1) * (keys**2).sum(-1).max(-1) * self.plain.scale**2
        return any(self._choice(known.extents, bounds[n] ** 0.5, float(moments[n]), 1.0) is not None for n in possible)

    def _largest_moment(self, extents: Extents) -> float:
        """About the largest mean square of a row's scores for which a polynomial is certified and predicted to be
        faster, if no score is above its root; 0 for none."""
        low, high = -20.0, 12.0  # log2 of it
        while high - low > 1 / STEPS:
            middle = (low + high) / 2
            found = self._choice(extents, 2 ** (middle / 2), 2**middle, 1.0)
            low, high = (low, middle) if found is None else (middle, high)
        return 2**high if low > -20 else 0.0

    def _pays(self, extents: Extents, features: int, planes: int) -> bool:
        """Whether the polynomial is predicted to be faster, for all heads."""
        key = (*extents, features, planes)
        if (known := self._predicted.get(key)) is None:
            if len(self._predicted) >= KEPT:
                self._predicted.clear()
            known = self._predicted[key] = self._predict(extents, features, planes)
        return known

    def _predict(self, extents: Extents, features: int, planes: int) -> bool:
        here, problem = self._problem(extents)
        ours = cost.polynomial_seconds(here, problem, features, planes, self.kernels is not None)
        return ours < cost.WORTH * cost.exact_seconds(here, problem)

    def _problem(self, extents: Extents) -> tuple[Machine, Problem]:
        """What the planner takes: the machine, with as many cores as torch uses, and the sizes."""
        here = self.machine
        if here.kind == "cpu":
            here = with_cores(here, torch.get_num_threads())
        return here, problem_of(extents, self.spec.dtype, self.plain.causal)

    def _centred(self, heads: Heads) -> Centred:
        keys = heads.k.float()
        ones = keys.new_full((1, 1, heads.n_k), 1 / heads.n_k).expand(len(keys), 1, heads.n_k)
        keys = keys - torch.bmm(ones, keys)  # a tensor of our own: divided in place below
        largest = keys.norm(dim=-1).amax(-1) * MARGIN
        unit = torch.where(largest > 0, largest, 1.0)
        keys = keys.div_(unit[:, None, None])
        queries = heads.q.float() * (self.plain.scale * unit[heads.owner])[:, None, None]
        bounds = queries.norm(dim=-1).amax(-1) * MARGIN
        bounds = torch.where(largest[heads.owner] > 0, bounds, bounds * 0.0)
        moments, least = self._moments(queries, keys, heads.owner)
        moments = (moments + MOMENT_MARGIN * bounds * bounds / least).nan_to_num(math.inf, math.inf)
        return Centred(
            keys=keys, values=heads.v.float(), queries=queries, bounds=bounds.nan_to_num(math.inf, math.inf),
            moments=moments, least=least.nan_to_num(0.0),
        )  # fmt: skip

    def _moments(self, q: Tensor, k: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """(moments, least) of `Centred`. The sum of the squares of a row's scores is q K^T K q; the mean weight is at
        least the exponential of the mean score (convexity), which is 0 for all keys and q.mean(k) for some of them."""
        if not self.plain.causal:
            gram = torch.bmm(k.mT, k).div_(k.shape[1])[owner]
            return torch.bmm(q, gram).mul_(q).sum(-1).amax(-1), q.new_ones(len(q))
        whole = (k.shape[1] - 1) // CHUNK * CHUNK  # approximated are the keys of the chunks before a row's own
        if not whole:
            return q.new_zeros(len(q)), q.new_ones(len(q))
        chunks = k[:, :whole].reshape(len(k), -1, CHUNK, k.shape[-1])
        before = torch.arange(1, chunks.shape[1] + 1, device=q.device)[:, None, None] * CHUNK
        gram = (chunks.mT @ chunks).cumsum_(1).div_(before)[owner]
        mean = chunks.sum(2, keepdim=True).cumsum_(1).div_(before)[owner]
        padding = q.new_zeros(len(q), -q.shape[1] % CHUNK, q.shape[-1])
        rows = torch.cat([q[:, CHUNK:], padding], 1).view(len(q), -1, CHUNK, q.shape[-1])
        weight = (rows * mean).sum(-1).exp_() / MARGIN
        moments = (rows @ gram).mul_(rows).sum(-1).div_(weight)
        return moments.amax((-1, -2)), weight.amin((-1, -2)).clamp_max(1.0)

    def _groups(self, heads: Heads, data: Centred) -> dict[tuple[int, int] | None, dict[int, Choice]]:
        """Heads and their polynomials, by what heads have in common that run together: (degree, planes); None: heads
        that run exact."""
        groups: dict[tuple[int, int] | None, dict] = defaultdict(dict)
        figures = zip(data.bounds.tolist(), data.moments.tolist(), data.least.tolist(), strict=True)
        for head, (bound, moment, least) in enumerate(figures):
            choice = self._choice(heads.extents, bound, moment, least)
            groups[choice and (choice.polynomial.degree, choice.planes)][head] = choice
        return groups

    def _choice(self, extents: Extents, bound: float, moment: float, least: float) -> Choice | None:
        if not (math.isfinite(bound) and math.isfinite(moment) and bound <= 64 and least > 0):
            return None
        bound, moment = _snapped(bound, SNAP), _snapped(moment, STEPS)
        least = 1 / _snapped(1 / least, STEPS)
        limit = cost.MAX_FEATURES if self.always else self._limit(extents)
        choice = cost.choose(
            extents.d, bound, self.epsilon, self.exact_values, self.kernels is not None, moment, least, limit
        )
        if choice is None or not (self.always or self._pays(extents, choice.features, choice.planes)):
            return None
        return choice

    def _limit(self, extents: Extents) -> int:
        """The largest number of features of a degree that is predicted to pay."""
        found = 0
        for degree in range(1, 17):
            features = feature_count(extents.d, degree)
            if features > cost.MAX_FEATURES or not self._pays(extents, features, 1):
                break
            found = features
        return found

    def _run(self, heads: Heads, sizes: Sequence[int], data: Centred, groups) -> Tensor:
        out = data.queries.new_empty(len(heads.q), heads.n_q, heads.v.shape[-1])
        largest = data.values.norm(dim=-1).amax(-1)[heads.owner]
        for key, choices in groups.items():
            chosen = torch.tensor(list(choices))
            owner = heads.owner[chosen]
            if key is None:
                out[chosen] = self.some(heads.q[chosen], heads.k[owner], heads.v[owner], sizes).float()
                bound = float(data.bounds[chosen].max())
                record(self._exact_certificate(heads, chosen, "no polynomial is certified and faster at this B", bound))
                continue
            if len(groups) == 1:
                out = self._attend(data.queries, data.keys, data.values, heads.owner, list(choices.values()), sizes)
            else:
                used, owner = torch.unique(owner, return_inverse=True)
                out[chosen] = self._attend(
                    data.queries[chosen], data.keys[used], data.values[used], owner, list(choices.values()), sizes
                )
            self._certify(heads, data, choices, largest)
        return heads.store(out)

    def _certify(self, heads: Heads, data: Centred, choices: dict[int, Choice], largest: Tensor) -> None:
        """Record one certificate for all heads with the same polynomial."""
        alike: dict[Choice, list[int]] = defaultdict(list)
        for head, choice in choices.items():
            alike[choice].append(head)
        for choice, members in alike.items():
            chosen = torch.tensor(members)
            record(
                Certificate(
                    method=METHOD, ran=METHOD, heads=heads.coordinates(chosen), epsilon=self.epsilon, n_q=heads.n_q,
                    n_k=heads.n_k, weight_error=choice.error, bound=float(data.bounds[chosen].max()),
                    moment=float(data.moments[chosen].max()),
                    output_error=output_error(choice.error, float(largest[chosen].max())),
                    degree=choice.polynomial.degree, features=choice.features,
                )
            )  # fmt: skip

    def _exact_certificate(self, heads: Heads, chosen: Tensor, reason: str, bound: float | None) -> Certificate:
        return Certificate(
            method=METHOD, ran="exact", heads=heads.coordinates(chosen), epsilon=self.epsilon, n_q=heads.n_q,
            n_k=heads.n_k, reason=reason, bound=bound,
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

            wanted = self._block(Extents(len(q), len(k), q.shape[1], k.shape[1], q.shape[2], v.shape[2]), choices[0])
            run = triton.kernels(*q.shape[2:], *v.shape[2:], powers.shape[1] - 1, choices[0].planes, q.is_cpu, wanted)
            return run.attend(q, k, v, owner, powers, CHUNK if self.plain.causal else 0)
        from fusion.codegen.mlir import polynomial as mlir

        run = mlir.kernels(q.shape[-1], v.shape[-1], powers.shape[1] - 1, choices[0].planes)
        weights = run.weights(powers)
        if self.plain.causal:
            self._chunks = self._chunks or Chunks(self.some.spec, self.machine)
            return self._chunks.attend(run, q, k, v, owner, weights, sizes)
        state = run.state(k, v)
        state = (state[owner] if len(k) < len(q) else state) * weights[..., None]
        return run.readout(q, state, divided=True)

    def _block(self, extents: Extents, choice: Choice) -> int:
        """Features of a block, by the cost model."""
        from fusion.plan import plan

        key = (*extents, choice.features)
        if (found := self._blocks.get(key)) is None:
            if len(self._blocks) >= KEPT:
                self._blocks.clear()
            here, problem = self._problem(extents)
            tile = dict(plan(problem, here, "polynomial", features=choice.features).tile)
            found = self._blocks[key] = tile["B_f"]
        return found


def _snapped(x: float, steps: int) -> float:
    """x, rounded up to the next 1/steps of an octave, and at least 2**-20."""
    return 2.0 ** (math.ceil(math.log2(max(x, 2.0**-20)) * steps) / steps)
