"""Certificates of every approximate call, and the places where the exact kernel ran instead. Attentions that may be
approximated: plain scaled scores under a softmax, unmasked or causal."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.ir.expr import I, J, Kind, const, node
from fusion.ir.mask_facts import is_dead
from fusion.ir.request import Approximation
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import plain_scale

LIMIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The certificate of one group of heads in one attention call.

    method: "polynomial", as asked for.
    ran: the same, or "exact".
    heads: the batch coordinates of the heads, e.g. ((0, 3), (0, 5)).
    epsilon: the error asked for.
    reason: why exact ran.
    weight_error: a bound on the sum over keys of |error of a weight| / sum of the weights, in every row; 0 if exact.
    output_error: the bound 2 e / (1 - e) * max |v_j| on the Euclidean error of any output row that follows from it.
    bound: B, such that every |score| <= B after the keys are centred; None where it was not computed to the end.
    moment: a bound on the mean square score of a row (of approximated keys, relative to their mean weight).
    """

    method: str
    ran: str
    heads: tuple[tuple[int, ...], ...]
    epsilon: float
    n_q: int
    n_k: int
    reason: str | None = None
    weight_error: float = 0.0
    output_error: float = 0.0
    bound: float | None = None
    moment: float | None = None
    degree: int | None = None
    features: int | None = None

    def __str__(self) -> str:
        count = len(self.heads)
        where = f"{self.method}: {count} head{'s' * (count != 1)} of {self.n_q} queries and {self.n_k} keys"
        known = "" if self.bound is None else f"; no score is above {self.bound:.3g} in magnitude"
        known += "" if self.moment is None else f", and their mean square in a row is at most {self.moment:.2g}"
        if self.ran == "exact":
            return f"{where} ran exact, because {self.reason}{known}"
        return (
            f"{where}, by a polynomial of degree {self.degree} with {self.features} features: the weights of a row are "
            f"off by at most {self.weight_error:.2g} of their sum ({self.epsilon:g} was allowed), an output row by at "
            f"most {self.output_error:.2g}{known}"
        )


Pending = Certificate | Callable[[], Certificate]


class _Records(threading.local):
    """Certificates of the calls of one thread. last: of its last call. collectors: one list for each
    `collect_certificates` around that call."""

    def __init__(self) -> None:
        self.last: deque[Pending] = deque(maxlen=LIMIT)
        self.collectors: list[list[Pending]] = []


_records = _Records()


def begin() -> None:
    """Start the record of a compiled graph's call on this thread: `last_certificates` returns those of this call."""
    _records.last = deque(maxlen=LIMIT)


def record(certificate: Pending) -> None:
    """Store a certificate, or a function that makes it on demand: its construction would delay a short call."""
    pending = certificate if isinstance(certificate, Certificate) else functools.cache(certificate)
    _records.last.append(pending)
    for collector in _records.collectors:
        collector.append(pending)


def _made(pending: Iterable[Pending]) -> list[Certificate]:
    return [item if isinstance(item, Certificate) else item() for item in pending]


@contextlib.contextmanager
def collect_certificates() -> Iterator[list[Certificate]]:
    """The certificates of every call that this thread makes inside the `with`, in order; filled when it ends."""
    collected: list[Certificate] = []
    pending: list[Pending] = []
    _records.collectors.append(pending)
    try:
        yield collected
    finally:
        _records.collectors = [other for other in _records.collectors if other is not pending]
        collected += _made(pending)


def note_exact(allowed: Approximation, operands: Sequence[Tensor], reason: str) -> None:
    """Record that a call ran exact. Heads are not distinguished; rows are those of the operands."""
    n_q, n_k = (x.shape[-2] if x.dim() > 1 else 1 for x in operands[:2])
    record(
        Certificate(
            method=allowed.method, ran="exact", heads=((),), epsilon=allowed.epsilon, n_q=n_q, n_k=n_k, reason=reason
        )
    )


def is_captured(method: str, epsilon: float, operands: Sequence[Tensor]) -> bool:
    """Whether a CUDA graph is being captured, into which no decision by data fits: the exact kernel runs."""
    if not (operands[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    allowed = Approximation(method=method, epsilon=epsilon)
    note_exact(allowed, operands, "a CUDA graph is being captured, which no look at data fits into")
    return True


def last_certificates() -> tuple[Certificate, ...]:
    """Certificates of this thread's last call of a model compiled with the option `approximate` (of its last graph,
    where it has several), in the order in which the attentions ran. `collect_certificates` separates several calls, and
    all graphs of a model."""
    return tuple(_made(_records.last))


def output_error(weight_error: float, largest_value: float) -> float:
    """2 e / (1 - e) * max |v_j|: numerator and normaliser are each off by at most e of the normaliser."""
    return 2 * weight_error / (1 - weight_error) * largest_value if weight_error < 1 else float("inf")


DEAD = -1e30
"""A fill below this has no weight beside any score that float32 can hold the exponential of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Scores scale * q.k under a softmax; causal: key j is live for query i where j <= i."""

    scale: float
    causal: bool


def plain_form(spec: AttentionSpec) -> Plain | str:
    """Plain form of a spec, or the reason why it has none."""
    if spec.mixing is not None:
        return "heads are mixed"
    if spec.aux_outputs:
        return "its weights are used elsewhere, and must be those of exact attention"
    if spec.normalizer is Normalizer.NONE:
        return "the weights have no softmax"
    if spec.weight is not const(1.0) or spec.sinks:
        return "the weights are changed after the softmax, or it has sinks"
    if spec.scales_rows:
        return "rows are scaled by something else than their sum"
    if any(o.dtype not in ("float32", "bfloat16", "float16") for o in spec.operands[:3]):
        return "Q, K and V must be float32, bfloat16 or float16"
    if spec.tables or any(value is not None for value in spec.values):
        return "K and V are read through a table, or converted from a stored form"
    score, causal = spec.score, False
    if spec.mask is not None:
        if spec.mask.live is not node("ile", (J, I), Kind.BOOL):
            return "it has a mask that is not causal from the first key on"
        if spec.mask.fill > DEAD:
            return "masked scores are not far enough below the others"
        if score.op == "where":  # of which one branch holds the score
            score = score.args[1] if is_dead(score.args[2]) else score.args[2]
        causal = True
    scale = plain_scale(score)
    if scale is None:
        return "the score program is not a constant times the score"
    return Plain(scale=scale, causal=causal)
