"""A call of attention with polynomial features: what is bounded is approximated, head by head, the rest is exact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion.approximate import cost
from fusion.approximate.certificates import Certificate, output_error, record
from fusion.approximate.cost import Choice
from fusion.approximate.eligible import Plain
from fusion.approximate.heads import ExactHeads, Executor, Heads, gather
from fusion.codegen.reference import polynomial as reference
from fusion.cost.problem import Problem
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine

METHOD = "polynomial"
SAMPLED = 32
SNAP = 32
"""B is rounded up to the next 1/SNAP of an octave, so that few polynomials are ever computed."""
MARGIN = 1 + 1e-5
"""Covers the float32 rounding of the norms."""


class PolynomialAttention:
    """The executor of an eligible spec.

    exact: the kernel for the whole call; build: makes the exact kernel of another spec. always: skip the comparison of
    predicted times (tests and examples). amx: whether the feature kernels can run here; torch's products otherwise.
    """

    def __init__(
        self, spec: AttentionSpec, plain: Plain, exact: Executor, build: Callable[[AttentionSpec], Executor],
        machine: Machine, epsilon: float, *, amx: bool, always: bool = False,
    ):  # fmt: skip
        self.spec, self.plain, self.exact, self.machine, self.epsilon = spec, plain, exact, machine, epsilon
        self.amx, self.always = amx, always
        self.some = ExactHeads(spec, build)
        self.exact_values = spec.operands[2].dtype == "bfloat16"

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        heads = gather(self.spec, operands, sizes)
        reason = self._refusal(heads)
        if reason is None:
            centred, values, scaled_q, bounds = self._centred(heads)
            groups = self._groups(heads, bounds)
            if groups.keys() != {None}:
                return self._run(heads, sizes, centred, values, scaled_q, bounds, groups)
            reason = "no polynomial is both certified and predicted to be faster"
            bound = float(bounds.max())
        else:
            bound = None
        record(self._exact_certificate(heads, torch.arange(len(heads.q)), reason, bound))
        return self.exact(operands, sizes)

    def _refusal(self, heads: Heads) -> str | None:
        if not (heads.n_q and heads.n_k and heads.q.shape[-1] and heads.v.shape[-1] and len(heads.q)):
            return "the call is empty"
        if self.plain.causal and heads.n_q != heads.n_k:
            return "causal with unequal numbers of queries and keys"
        if not self.always and not self._seconds(heads, 1 + heads.q.shape[-1], 1)[0]:
            return "even degree 1 is predicted to be slower at this length"
        if not self.always and not self._any_bounded(heads):
            return (
                "a sample of queries and keys is beyond every polynomial that is certified and predicted to be faster"
            )
        return None

    def _any_bounded(self, heads: Heads) -> bool:
        """Whether a sample of the rows leaves hope for any head: looking at all of them costs more."""
        q, k = heads.q[:, ::SAMPLED].float(), heads.k[:, ::SAMPLED].float()
        keys = (k - k.mean(1, keepdim=True)).norm(dim=-1).amax(-1)[heads.owner]
        bounds = q.norm(dim=-1).amax(-1) * keys * abs(self.plain.scale) * 0.95
        return any(self._choice(heads, bound) is not None for bound in bounds.tolist())

    def _seconds(self, heads: Heads, features: int, planes: int) -> tuple[bool, float, float]:
        """(whether polynomial is predicted to be faster, its seconds, those of exact), for all heads."""
        h, u = len(heads.q), len(heads.k)
        problem = Problem(
            n_q=heads.n_q, n_k=heads.n_k, d=heads.q.shape[-1], d_v=heads.v.shape[-1], heads=h,
            heads_kv=u if h % u == 0 else h, dtype=self.spec.dtype, causal=self.plain.causal,
        )  # fmt: skip
        ours = cost.polynomial_seconds(self.machine, problem, features, planes, self.amx)
        exact = cost.exact_seconds(self.machine, problem, self.amx)
        return ours < exact, ours, exact

    def _centred(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys minus their mean, of norm at most 1; values; queries times everything that keys were divided by; B of
        every head: the largest norm of such a query (Cauchy-Schwarz). All float32."""
        keys = heads.k.float()
        keys = keys - keys.mean(1, keepdim=True)  # a tensor of our own: divided in place below
        largest = keys.norm(dim=-1).amax(-1) * MARGIN
        unit = torch.where(largest > 0, largest, 1.0)
        queries = heads.q.float() * (self.plain.scale * unit[heads.owner])[:, None, None]
        bounds = queries.norm(dim=-1).amax(-1) * MARGIN
        bounds = torch.where(largest[heads.owner] > 0, bounds, bounds * 0.0)
        return keys.div_(unit[:, None, None]), heads.v.float(), queries, bounds.nan_to_num(math.inf, math.inf)

    def _groups(self, heads: Heads, bounds: Tensor) -> dict[Choice | None, list[int]]:
        """Heads by the polynomial that they get; None: exact. Heads with the same features share the polynomial of the
        largest bound among them."""
        alike: dict[tuple[int, int] | None, list[int]] = defaultdict(list)
        choices = [self._choice(heads, bound) for bound in bounds.tolist()]
        for head, choice in enumerate(choices):
            alike[choice and (choice.polynomial.degree, choice.planes)].append(head)
        groups: dict[Choice | None, list[int]] = {}
        for key, members in alike.items():
            found = [choice for head in members if (choice := choices[head]) is not None]
            groups[max(found, key=lambda choice: choice.polynomial.bound) if key else None] = members
        return groups

    def _choice(self, heads: Heads, bound: float) -> Choice | None:
        if not math.isfinite(bound) or bound > 64:
            return None
        snapped = 2.0 ** (math.ceil(math.log2(max(bound, 2.0**-10)) * SNAP) / SNAP)
        d = heads.q.shape[-1]
        choice = cost.choose(d, snapped, self.epsilon, self.plain.causal, self.exact_values, self.amx)
        if choice is None or not (self.always or self._seconds(heads, choice.features, choice.planes)[0]):
            return None
        return choice

    def _run(self, heads: Heads, sizes, keys, values, queries, bounds, groups) -> Tensor:
        out = queries.new_empty(len(queries), heads.n_q, values.shape[-1])
        largest = values.norm(dim=-1).amax(-1)[heads.owner]
        for choice, members in groups.items():
            chosen = torch.tensor(members)
            owner = heads.owner[chosen]
            if choice is None:
                out[chosen] = self.some(heads.q[chosen], heads.k[owner], heads.v[owner], sizes).float()
                bound = float(bounds[chosen].max())
                record(self._exact_certificate(heads, chosen, "no polynomial is certified and faster at this B", bound))
                continue
            if len(groups) == 1:
                out = self._attend(queries, keys, values, heads.owner, choice)
            else:
                used, owner = torch.unique(owner, return_inverse=True)
                out[chosen] = self._attend(queries[chosen], keys[used], values[used], owner, choice)
            record(
                Certificate(
                    method=METHOD, ran=METHOD, heads=heads.coordinates(chosen), epsilon=self.epsilon, n_q=heads.n_q,
                    n_k=heads.n_k, weight_error=choice.error, bound=float(bounds[chosen].max()),
                    output_error=output_error(choice.error, float(largest[chosen].max())),
                    degree=choice.polynomial.degree, features=choice.features,
                )
            )  # fmt: skip
        return heads.store(out)

    def _exact_certificate(self, heads: Heads, chosen: Tensor, reason: str, bound: float | None) -> Certificate:
        return Certificate(
            method=METHOD, ran="exact", heads=heads.coordinates(chosen), epsilon=self.epsilon, n_q=heads.n_q,
            n_k=heads.n_k, reason=reason, bound=bound,
        )  # fmt: skip

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, choice: Choice) -> Tensor:
        """[h, N_q, d_v], normalised."""
        if not self.amx:
            return reference.attend(q, k[owner], v[owner], choice.polynomial.coefficients, self.plain.causal)
        from fusion.codegen.mlir import polynomial as mlir

        d_v = v.shape[-1]
        run = mlir.kernels(q.shape[-1], -(-(d_v + 1) // 16) * 16, choice.polynomial.degree, choice.planes)
        weights = run.weights(torch.tensor(choice.polynomial.coefficients, dtype=torch.float64))
        if self.plain.causal:
            total = _causal(run, q, k, v, owner, weights, cost.chunk_rows(d_v, choice.features))
        else:
            state = run.state(k, v)
            total = run.readout(q, state[owner] if len(k) < len(q) else state, weights, d_v)
        return total[..., :-1] / total[..., -1:]


def _causal(run, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, weights: Tensor, chunk: int) -> Tensor:
    """[h, N, d_v + 1], unnormalised: in chunks, with the state of the chunks before, and exactly inside of a chunk."""
    heads, n, _ = q.shape
    total = q.new_empty(heads, n, v.shape[-1] + 1)
    state = None
    for first in range(0, n, chunk):
        here = slice(first, first + chunk)
        scores = (q[:, here] @ k[owner][:, here].transpose(1, 2)).exp_().tril_()
        inside = total[:, here]
        inside[..., :-1] = scores @ v[owner][:, here]
        inside[..., -1] = scores.sum(-1)
        if state is not None:
            inside += run.readout(q[:, here], state[owner], weights, v.shape[-1])
        if first + chunk < n:
            state = run.state(k[:, here], v[:, here], state)
    return total
