"""A call of attention that leaves out provably negligible tiles, in two steps (docs/approximate.md).

*Without scores.* The box and the ball of a block of keys bound its scores with a row from above; exact scores of the
few likeliest blocks bound the row's normaliser from below. A block has at most `keys * exp(upper - lower)` of it, and a
tile of rows leaves out the least blocks while these add up to half of epsilon. The ball about a tile's rows gives
bounds for all of them in a 30th of the time; rows are bounded one by one where that leaves too much. Attempted where a
sample predicts that it pays.

*With scores.* The kernel omits exponentials and the product with V of tiles in which no key can have more than epsilon
/ (2 N_k) of its row's sum (`sparse_kernel.py` of `codegen/mlir` and `codegen/triton`). Nearly free.

The certificate is the sum of the omitted weights for each row; the largest sum counts. Heads that leave out nothing run
in fewer bfloat16 planes where that is certified (`rounding`, on CPUs with AMX), else exact. On GPUs the host waits for
two reads of a call: of a sample of the data, and of the decision about each head (`selection`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fusion.approximate import cost
from fusion.approximate.blocks import causal_tiles
from fusion.approximate.certificates import Certificate, is_captured, output_error, record
from fusion.approximate.eligible import Plain, canonical
from fusion.approximate.head_batches import KEPT, ExactHeads, Executor, HeadPacker, Heads, ieee_products, problem_of
from fusion.approximate.score_bounds import Inspection
from fusion.approximate.selection import FEW, MARGIN, PROMISING, WORTHWHILE, Selection, chosen
from fusion.caching import BoundedCache
from fusion.ir.spec import AttentionSpec
from fusion.machine import Machine, with_cores

METHOD = "certified_sparse"
UNCERTIFIED = "too many keys have weight, rounding is not certified, or inputs are not finite or too large"
GLANCED, OPTIMISM = (16, 128, 4), 0.85
"""Rows, keys and blocks of each head that are looked at before more are; by how much norms of so few are lowered."""
BOUNDED = 0.5
"""Share of the exact kernel's time that bounds may be predicted to take."""


def refusal(spec: AttentionSpec, plain: Plain, device: str, emitter: str) -> str | None:
    """Reason why there is no selective kernel for an admitted spec, or None."""
    if emitter == "reference":
        return "the reference interpreter skips nothing"
    if plain.scale <= 0:
        return "the scale is not positive"
    if device == "cuda":
        from fusion.codegen import triton
        from fusion.codegen.triton import sparse_call

        return triton.unavailable() or sparse_call.supports(spec)
    from fusion.codegen import mlir

    result = mlir.supports(spec, Machine.detect())
    return None if result is None else result.message


class SparseKernel(Protocol):
    """Exact attention without negligible tiles (`SparseKernel` of `codegen/mlir` and `codegen/triton`). rows,
    keys: of a tile; row tiles come in multiples of `sets`."""

    rows: int
    keys: int
    sets: int

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], marks: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor] | None: ...


class _Rounding(NamedTuple):
    """Rounding of products. errors: of the weights of each head in two planes, or none. means: [H, d], the means that
    are subtracted from the keys for it, where that is needed."""

    errors: list[float]
    means: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Division of a call's heads. rows: Q, K and V of every head. marks: (tiles to compute, share left out) of the
    heads that leave out tiles. rounded: heads whose products are rounded. rounding: their rounding."""

    rows: Sequence[Tensor]
    marks: dict[int, tuple[Tensor, Tensor]]
    rounded: list[int]
    rounding: _Rounding


class _Likely(NamedTuple):
    """Estimate from a sample. selective: heads that may leave out tiles, and the share of blocks. rounded: whether two
    planes may suffice."""

    selective: dict[int, float]
    rounded: bool

    def __bool__(self) -> bool:
        return bool(self.selective) or self.rounded


class SparseAttention:
    """Executor of an eligible spec; arguments as of `PolynomialAttention`. kernels: "mlir" or "triton"."""

    def __init__(
        self, spec: AttentionSpec, plain: Plain, exact: Executor, build: Callable[[AttentionSpec], Executor],
        machine: Machine, epsilon: float, *, kernels: str = "mlir", always: bool = False,
    ):  # fmt: skip
        self.plain, self.exact, self.epsilon, self.always, self.spec = plain, exact, epsilon, always, spec
        self.machine, self._known = machine, BoundedCache(KEPT)
        self.some, self.gather = ExactHeads(spec, build), HeadPacker(spec)
        compiled = kernels == "mlir"
        self.look = Inspection(self.gather, plain.scale, plain.causal, native=compiled)
        self.rounding = None
        if compiled and TwoPlanes.admits(spec, machine):
            self.rounding = TwoPlanes(spec, self.some.spec, plain.scale, machine)
        self.kernel = self._kernel(kernels)
        self.selection = Selection(
            rows=self.kernel.rows, keys=self.kernel.keys, sets=self.kernel.sets, scale=plain.scale,
            causal=plain.causal, epsilon=epsilon, always=always, together=not compiled,
        )  # fmt: skip

    def _kernel(self, kernels: str) -> SparseKernel:
        if kernels == "mlir":
            from fusion.codegen.mlir.approximate import sparse as sparse_call

            return sparse_call.SparseKernel(canonical(self.some.spec, self.plain), self.machine)
        from fusion.codegen.triton import sparse_call

        spec, plain = self.spec, self.plain
        widths = spec.d.integer, spec.d_v.integer
        return sparse_call.SparseKernel(*widths, plain.scale, plain.causal, spec.dtype, spec.out_dtype)

    def __call__(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if is_captured(METHOD, self.epsilon, operands):
            return self.exact(operands, sizes)
        exact, beyond, selecting, fine = self._known.get(tuple(sizes)) or self._decide_exact(operands, sizes)
        likely = None if exact is not None or self.always else self._inspect(operands, sizes, selecting, fine)
        if exact is not None or (likely is not None and not likely):
            record(exact or beyond)
            return self.exact(operands, sizes)
        likely = likely or _Likely(dict.fromkeys(range(len(beyond.heads)), 1.0), self.rounding is not None)
        rounding = self._rounding(operands, sizes) if likely.rounded else _Rounding([], None)
        if not likely.selective and min(rounding.errors, default=math.inf) > self.epsilon * MARGIN:
            record(beyond)
            return self.exact(operands, sizes)
        with ieee_products():
            heads = self.gather(operands, sizes)
            parts = self._parts(heads, likely.selective, rounding, fine)
            if len(parts.rounded) == len(heads.q) and rounding.means is None:
                assert self.rounding is not None
                out = self.rounding.whole(operands, sizes)
                self._certify(heads, parts.rounded, torch.tensor(rounding.errors, dtype=torch.float64))
                return out
            if parts.marks or parts.rounded:
                return self._run(heads, sizes, parts, UNCERTIFIED)
        record(beyond)
        return self.exact(operands, sizes)

    def _rounding(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> _Rounding:
        """Errors of rounding all heads: with the original keys where that is certified, else with centred ones."""
        assert self.rounding is not None
        bounds = self.look.whole(operands, sizes, second=False, limit=self.rounding.limit(self.epsilon))
        errors = self.rounding.errors(bounds.queries, bounds.raw)
        if max(errors) <= self.epsilon * MARGIN:
            return _Rounding(errors, None)
        return _Rounding(self.rounding.errors(bounds.queries, bounds.keys), bounds.means)

    def _decide_exact(
        self, operands: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[Certificate | None, Certificate, bool, bool]:
        """Facts that follow from the sizes alone: the certificate of such a call, where the exact kernel runs whatever
        the data are; the certificate of a call where a sample of the data decides for the exact kernel; whether leaving
        out tiles can pay, and by bounds of every row."""
        heads = self.gather(operands, sizes)
        selecting, fine, every = True, True, torch.arange(len(heads.q))
        if (reason := heads.unfit(self.plain.causal)) is None and not self.always:
            on_gpu = self.machine.kind == "gpu"
            machine = self.machine if on_gpu else with_cores(self.machine, torch.get_num_threads())
            problem = problem_of(heads.extents, self.spec.dtype, self.plain.causal)
            limit = BOUNDED * cost.exact_seconds(machine, problem)
            tile = self.kernel.rows, self.kernel.keys
            selecting, fine = (cost.selection_seconds(machine, problem, *tile, fine) <= limit for fine in (False, True))
            if not cost.worth_a_look(machine, problem):
                reason = "looking at the data would cost too much of the exact kernel's time at this length"
            elif not selecting and self.rounding is None:
                reason = "bounds of the scores would cost as much as the exact kernel"
        exact = None if reason is None else heads.exact(METHOD, self.epsilon, every, reason)
        beyond = heads.exact(METHOD, self.epsilon, every, UNCERTIFIED)
        known = self._known[tuple(sizes)] = exact, beyond, selecting, fine
        return known

    def _inspect(self, operands: Sequence[Tensor], sizes: Sequence[int], selecting: bool, fine: bool) -> _Likely:
        """Estimate from a few rows and keys; to inspect all of them costs more."""
        hopeful = self._sampled_mass(operands, sizes, fine) if selecting else {}
        if self.rounding is None:
            return _Likely(hopeful, False)
        sampled = self.look.sample(operands, sizes, *GLANCED[:2], second=False)
        keys = [OPTIMISM * min(head.raw, head.keys) for head in sampled]
        return _Likely(hopeful, min(self.rounding.errors([x.queries for x in sampled], keys)) <= self.epsilon * MARGIN)

    def _sampled_mass(self, operands: Sequence[Tensor], sizes: Sequence[int], fine: bool) -> dict[int, float]:
        """Heads in which boxes could rule out most blocks if few keys had most of the weight; the share of those."""
        # A row's sum is then as many weights like the highest as FEW of the sampled keys stand for.
        gap = -math.log(self.epsilon / 2 * FEW / GLANCED[1])
        shares = self.look.ruled_out(operands, sizes, (*GLANCED, self.kernel.keys), gap)
        return {head: x for head, x in enumerate(shares) if x >= (1 - WORTHWHILE if fine else PROMISING)}

    def _parts(self, heads: Heads, likely: dict[int, float], rounding: _Rounding, fine: bool) -> _Parts:
        """Division of the heads. likely, fine: see `Selection.marks`."""
        shared = len(heads.k) < len(heads.q)  # keys, which are repeated
        q, k, v = rows = [heads.q, *(x[heads.owner] if shared else x for x in (heads.k, heads.v))]
        marks = self.selection.marks(q, k, v, likely, fine) if likely else {}
        certified = [head for head, error in enumerate(rounding.errors) if error <= self.epsilon * MARGIN]
        rounded = [head for head in certified if head not in marks and bool(v[head].abs().amax() < math.inf)]
        return _Parts(rows=rows, marks=marks, rounded=rounded, rounding=rounding)

    def _run(self, heads: Heads, sizes: Sequence[int], parts: _Parts, reason: str) -> Tensor:
        every, out = torch.arange(len(heads.q)), None
        left = set(every.tolist())
        if parts.marks and (result := self._select_tiles(heads, sizes, parts)) is not None:
            left -= parts.marks.keys()
            if not left:
                return heads.store(result)
            out = result.new_empty(len(every), *result.shape[1:])
            out[[*parts.marks]] = result
        for some, runner in ((parts.rounded, self.rounding), (sorted(left.difference(parts.rounded)), None)):
            if not some:
                continue
            q, k, v = (chosen(x, some) for x in parts.rows)
            if runner is not None and parts.rounding.means is not None:
                k = k.float() - parts.rounding.means[some, None]
            result = (self.some if runner is None else runner.some)(q, k, v, sizes)
            out = result.new_empty(len(every), *result.shape[1:]) if out is None else out
            out[some] = result
            if runner is None:
                record(heads.exact(METHOD, self.epsilon, every[some], reason))
            else:
                self._certify(heads, some, torch.tensor(parts.rounding.errors, dtype=torch.float64)[some])
        assert out is not None
        return heads.store(out)

    def _select_tiles(self, heads: Heads, sizes: Sequence[int], parts: _Parts) -> Tensor | None:
        """Output of the selective heads, or None where they turn out to need the exact kernel."""
        some = [*parts.marks]
        marks, unseen = (torch.stack(result) for result in zip(*parts.marks.values(), strict=True))
        share = self.epsilon * MARGIN / 2 / heads.n_k
        q, k, v = (chosen(x, some) for x in parts.rows)
        if (result := self.kernel(q, k, v, [*sizes, len(some)], marks.view(torch.uint8), share)) is None:
            return None
        self._certify(heads, some, unseen + result[1] / MARGIN, result[2])
        return result[0]

    def _certify(self, heads: Heads, some: Sequence[int], errors: Tensor, computed: Tensor | None = None) -> None:
        """Record the certificate of some heads. computed: tiles of each; None: they ran in two planes."""
        shape = (-(-heads.n_q // self.kernel.rows), -(-heads.n_k // self.kernel.keys))
        tiles = shape[0] * shape[1]
        if self.plain.causal:
            tiles = int(causal_tiles(shape, self.kernel.rows, self.kernel.keys, 1).sum())
        largest, owner = heads.v.float().norm(dim=-1).amax(-1), heads.owner
        epsilon, n_q, n_k = self.epsilon, heads.n_q, heads.n_k  # the operands are not kept

        @functools.cache
        def figures() -> list[tuple[float, float, float | None]]:
            values = largest.cpu()[owner].tolist()
            shares = [None] * len(some) if computed is None else (computed / tiles).tolist()
            return [*zip(errors.tolist(), [values[head] for head in some], shares, strict=True)]

        def certificate(number: int, head: tuple[tuple[int, ...], ...]) -> Certificate:
            error, value, live = figures()[number]
            return Certificate(
                method=METHOD, ran=METHOD, heads=head, epsilon=epsilon, n_q=n_q, n_k=n_k, weight_error=error,
                output_error=output_error(error, value), live=live, planes=2 if live is None else None,
            )  # fmt: skip

        for number, head in enumerate(some):
            record(functools.partial(certificate, number, heads.coordinates(torch.tensor([head]))))


TWO_PLANES = 2.0**-15 * (1 + 2.0**-6)
"""Error of a product of two float32 numbers in two planes each, relative to their sizes, second order included."""
LARGE = 2.0**60
"""Norms up to which the parts of numbers below 2**-126, which tiles take for 0, add up to nothing in a score."""


def error_of(largest: float) -> float:
    """A bound on sum over j |error of w_ij| / sum over j w_ij where |q_i| |k_j| scale is at most `largest`, including
    the rounding of the products with V."""
    return math.expm1(TWO_PLANES * largest) + TWO_PLANES if largest < 1e4 else math.inf


class TwoPlanes:
    """Exact kernel of a spec whose float32 products are computed in two bfloat16 planes instead of three: half of the
    tile products. For specs that `admits` accepts.

    Exact attention on AMX tiles splits a float32 number into three bf16 numbers, and multiplies six pairs of them. Two
    represent a number to 2^-17 of itself, and of their four products three are computed; the fourth is at most 2^-16 of
    the product. So

        |error of a score| <= (2 * 2^-17 + 2^-16) * sum over c of |q_c k_c| <= TWO_PLANES * |q| |k|

    A score that is off by t has a weight that is off by exp(t) - 1 of itself. The products of weights and values are
    rounded in the same way, relative to their sum. All of this is known from the largest norms, before the kernel runs.
    """

    def __init__(self, spec: AttentionSpec, one_by_one: AttentionSpec, scale: float, machine: Machine):
        """one_by_one: an equal attention over heads as plain tensors (of `ExactHeads`)."""
        from fusion.codegen.mlir.launch import Kernel
        from fusion.planning.cpu_planner import CpuPlanner
        from fusion.planning.register_tiles import target_of, tilings_for

        self.scale, target = scale, target_of(machine)

        def kernel(spec: AttentionSpec) -> Kernel:
            return Kernel(spec, tilings_for(spec, target, most_planes=2), target, CpuPlanner(spec, machine))

        self._whole = functools.cache(lambda: kernel(spec))
        self._some = functools.cache(lambda: kernel(one_by_one))

    @staticmethod
    def admits(spec: AttentionSpec, machine: Machine) -> bool:
        """Whether products of this spec take three planes."""
        from fusion.planning.register_tiles import target_of, tilings_for

        return tilings_for(spec, target_of(machine))[0].planes == 3

    def errors(self, queries: Sequence[float], keys: Sequence[float]) -> list[float]:
        """`error_of` of heads with queries and keys up to these norms."""
        scale, pairs = abs(self.scale), zip(queries, keys, strict=True)
        return [error_of(q * k * scale) if max(q, k, scale) < LARGE else math.inf for q, k in pairs]

    @staticmethod
    def limit(epsilon: float) -> float:
        """Scores up to which `error_of` may be at most epsilon."""
        return math.log1p(epsilon) / TWO_PLANES

    def whole(self, operands: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """All heads of a call, in the layout of the spec."""
        return self._whole()(operands, sizes)

    def some(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """[h, N_q, d], [h, N_k, d], [h, N_k, d_v] to [h, N_q, d_v]. sizes: those of the call."""
        return self._some()([q, k, v], [*sizes, len(q)])
