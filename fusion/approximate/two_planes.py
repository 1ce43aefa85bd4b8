"""Attention whose float32 products are rounded to two bfloat16 planes instead of three: half of the tile products.

Exact attention on AMX tiles splits a float32 number into three bf16 numbers, and multiplies six pairs of them. Two
represent a number to 2^-17 of itself, and of their four products three are computed; the fourth is at most 2^-16 of the
product. So

    |error of a score| <= (2 * 2^-17 + 2^-16) * sum over c of |q_c k_c| <= TWO_PLANES * |q| |k|

A score that is off by t has a weight that is off by exp(t) - 1 of itself. The products of weights and values are
rounded in the same way, relative to their sum. All of this follows from the largest norms, before the kernel runs: a
sample of the rows decides whether all norms are computed, and heads that are not certified run exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusion.approximate import cost
from fusion.approximate.certificates import Certificate, Plain, output_error, record
from fusion.approximate.head_batches import KEPT, ExactHeads, Executor, HeadPacker, Heads, problem_of
from fusion.approximate.score_bounds import Inspection
from fusion.caching import BoundedCache
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine, with_cores

METHOD = "two_planes"
UNCERTIFIED = "the rounding of this head is not certified, or inputs are not finite or too large"
SAMPLED, OPTIMISM = (16, 128), 0.85
"""Queries and keys of each head that are looked at before all are; by how much norms of so few are lowered."""
MARGIN = 0.99
"""Share of epsilon that bounds may use; the rest is for their rounding in float32."""
TWO_PLANES = 2.0**-15 * (1 + 2.0**-6)
"""Error of a product of two float32 numbers in two planes each, relative to their sizes, second order included."""
LARGE = 2.0**60
"""Norms up to which the parts of numbers below 2**-126, which tiles take for 0, add up to nothing in a score."""


def refusal(spec: AttentionSpec, device: str, emitter: str) -> str | None:
    """Reason why there is no such kernel for an admitted spec, or None."""
    from fusion.codegen import mlir
    from fusion.planning.register_tiles import target_of, tilings_for

    if emitter == "reference":
        return "the reference interpreter rounds nothing"
    if device != "cpu":
        return "products are rounded to two planes on CPUs alone"
    if (unsupported := mlir.supports(spec, machine := Machine.detect())) is not None:
        return unsupported.message
    if tilings_for(spec, target_of(machine))[0].planes != 3:
        return "its products do not take three bfloat16 planes, as those of float32 on AMX tiles do"
    return None


def error_of(largest: float) -> float:
    """A bound on sum over j |error of w_ij| / sum over j w_ij where |q_i| |k_j| scale is at most `largest`, including
    the rounding of the products with V."""
    return math.expm1(TWO_PLANES * largest) + TWO_PLANES if largest < 1e4 else math.inf


class TwoPlaneAttention:
    """Executor of an eligible spec that `refusal` accepts.

    exact: the kernel for the complete call.
    build: builds the exact kernel of another spec.
    always: look at all rows of every call (tests and examples).
    """

    def __init__(
        self, spec: AttentionSpec, plain: Plain, exact: Executor, build: Callable[[AttentionSpec], Executor],
        machine: Machine, epsilon: float, *, always: bool = False,
    ):  # fmt: skip
        self.spec, self.plain, self.exact, self.machine, self.epsilon = spec, plain, exact, machine, epsilon
        self.always = always
        self.some, self.gather = ExactHeads(spec, build), HeadPacker(spec)
        self.look = Inspection(self.gather, plain.scale, plain.causal, native=True)
        self._known: dict[tuple[int, ...], tuple[Certificate | None, Certificate]] = BoundedCache(KEPT)
        self._whole = functools.cache(lambda: self._kernel(spec))
        self._some = functools.cache(lambda: self._kernel(self.some.spec))

    def _kernel(self, spec: AttentionSpec) -> Executor:
        from fusion.codegen.mlir.launch import Kernel
        from fusion.planning.cpu_planner import CpuPlanner
        from fusion.planning.register_tiles import target_of, tilings_for

        target = target_of(self.machine)
        return Kernel(spec, tilings_for(spec, target, most_planes=2), target, CpuPlanner(spec, self.machine))

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        exact, uncertified = self._known.get(tuple(sizes)) or self._decide(operands, sizes)
        if exact is not None or not (self.always or self._may_be_certified(operands, sizes)):
            record(exact or uncertified)
            return self.exact(operands, sizes)
        errors, means = self._errors(operands, sizes)
        heads = self.gather(operands, sizes)
        finite = heads.v.abs().amax((1, 2)).isfinite()[heads.owner].tolist()
        certified = [head for head, error in enumerate(errors) if error <= self.epsilon * MARGIN and finite[head]]
        if not certified:
            record(uncertified)
            return self.exact(operands, sizes)
        self._certify(heads, certified, errors)
        if means is None and len(certified) == len(errors):
            return self._whole()(operands, sizes)
        return heads.store(self._apart(heads, sizes, certified, means))

    def _decide(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Certificate | None, Certificate]:
        """Certificates of a call of these sizes: where the exact kernel runs whatever the data are; and where the data
        decide for it."""
        heads = self.gather(operands, sizes)
        every = torch.arange(len(heads.q))
        if (reason := heads.unfit(self.plain.causal)) is None and not self.always:
            machine = with_cores(self.machine, torch.get_num_threads())
            if not cost.worth_a_look(machine, problem_of(heads.extents, self.spec.dtype, self.plain.causal)):
                reason = "looking at the data would cost too much of the exact kernel's time at this length"
        exact = None if reason is None else heads.exact(METHOD, self.epsilon, every, reason)
        known = self._known[tuple(sizes)] = exact, heads.exact(METHOD, self.epsilon, every, UNCERTIFIED)
        return known

    def _may_be_certified(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Whether any head may be, judged by a few rows and keys: to inspect all of them costs more."""
        sampled = self.look.sample(operands, sizes, *SAMPLED, second=False)
        keys = [OPTIMISM * min(head.raw, head.keys) for head in sampled]
        return min(self.errors([head.queries for head in sampled], keys)) <= self.epsilon * MARGIN

    def _errors(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[float], Tensor | None]:
        """Errors of the weights of each head, and the means to be subtracted from its keys for that, [H, d]: none where
        the original keys are certified."""
        limit = math.log1p(self.epsilon) / TWO_PLANES  # of scores, up to which `error_of` may be at most epsilon
        bounds = self.look.whole(operands, sizes, second=False, limit=limit)
        errors = self.errors(bounds.queries, bounds.raw)
        if max(errors) <= self.epsilon * MARGIN:
            return errors, None
        return self.errors(bounds.queries, bounds.keys), bounds.means

    def errors(self, queries: Sequence[float], keys: Sequence[float]) -> list[float]:
        """`error_of` of heads with queries and keys up to these norms."""
        scale, pairs = abs(self.plain.scale), zip(queries, keys, strict=True)
        return [error_of(q * k * scale) if max(q, k, scale) < LARGE else math.inf for q, k in pairs]

    def _apart(self, heads: Heads, sizes: Sequence[int], certified: Sequence[int], means: Tensor | None) -> Tensor:
        """Output [H, N_q, d_v] of heads of which some run exact, or whose keys are centred."""
        rest = sorted({*range(len(heads.q))}.difference(certified))
        outs = []
        for some in filter(None, (certified, rest)):
            chosen, owner = torch.tensor(some), heads.owner[some]
            q, k, v = heads.q[chosen], heads.k[owner], heads.v[owner]
            if some is rest:
                record(heads.exact(METHOD, self.epsilon, chosen, UNCERTIFIED))
                outs.append(self.some(q, k, v, sizes))
            else:
                k = k if means is None else k.float() - means[chosen, None]
                outs.append(self._some()([q, k, v], [*sizes, len(some)]))
        return torch.cat(outs)[torch.tensor([*certified, *rest]).argsort()]

    def _certify(self, heads: Heads, some: Sequence[int], errors: Sequence[float]) -> None:
        """Record a certificate for each of these heads."""
        largest = heads.v.float().norm(dim=-1).amax(-1)[heads.owner].tolist()
        for head in some:
            record(
                Certificate(
                    method=METHOD, ran=METHOD, heads=heads.coordinates(torch.tensor([head])), epsilon=self.epsilon,
                    n_q=heads.n_q, n_k=heads.n_k, weight_error=errors[head],
                    output_error=output_error(errors[head], largest[head]), planes=2,
                )
            )  # fmt: skip
