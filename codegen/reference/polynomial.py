"""Attention with a polynomial in the place of the exponential, in plain torch: the reference for tests of the kernels.

    out_i = sum_j p(q_i.k_j) v_j / sum_j p(q_i.k_j),     p(x) = sum over g of c_g x^g

With monomial features, x^g = (q.k)^g = sum over |a| = g of g!/a! q^a k^a, the sums over j are a state of r rows that
all queries share, r = binomial(d + degree, degree). (Alman & Song, 2302.13214; the schedule is our own.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FEATURE_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Monomials:
    """The monomials in d coordinates up to a degree, in graded order, number 0 being 1. parents, variables: [r] int64;
    monomial a is monomial parents[a] times coordinate variables[a] (number 0 is the product of itself and a coordinate
    d that is always 1)."""

    d: int
    parents: torch.Tensor
    variables: torch.Tensor
    degrees: torch.Tensor  # [r] int64
    multinomials: torch.Tensor  # [r] float64, the coefficient of q^a k^a in (q.k)^degree
    below_top: int  # how many are below the top degree


@functools.lru_cache(maxsize=64)
def monomials(d: int, degree: int) -> Monomials:
    """All monomials of up to `degree` in d coordinates."""
    number: dict[tuple[int, ...], int] = {(): 0}
    parents, variables, degrees, weights = [0], [d], [0], [1.0]
    for total in range(1, degree + 1):
        for chosen in itertools.combinations_with_replacement(range(d), total):
            if total < degree:
                number[chosen] = len(parents)
            parents.append(number[chosen[:-1]])
            variables.append(chosen[-1])
            degrees.append(total)
            weights.append(_multinomial(chosen))
    return Monomials(
        d=d,
        parents=torch.tensor(parents),
        variables=torch.tensor(variables),
        degrees=torch.tensor(degrees),
        multinomials=torch.tensor(weights, dtype=torch.float64),
        below_top=math.comb(d + degree - 1, d) if degree else 0,
    )


def _multinomial(chosen: Sequence[int]) -> float:
    result = math.factorial(len(chosen))
    for _, same in itertools.groupby(chosen):
        result //= math.factorial(len(list(same)))
    return float(result)


def features(x: torch.Tensor, table: Monomials, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Monomials first..last-1 of [.., N, d], [.., N, last - first]."""
    low = [torch.ones_like(x[..., :1])]
    extended = torch.cat([x, low[0]], -1)
    start = 1
    for degree in range(1, int(table.degrees[-1])):
        end = math.comb(table.d + degree, degree)
        parents = torch.cat(low, -1)
        low.append(parents[..., table.parents[start:end]] * extended[..., table.variables[start:end]])
        start = end
    chosen = slice(first, last)
    return torch.cat(low, -1)[..., table.parents[chosen]] * extended[..., table.variables[chosen]]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, coefficients: Sequence[float] | torch.Tensor, chunk: int = 0
) -> torch.Tensor:
    """Output [.., N_q, d_v] for [.., N_q, d], [.., N_k, d], [.., N_k, d_v], without scaling of the scores.
    coefficients: c_0, c_1, ..., the same for all, or [.., degree + 1] with polynomials of their own. chunk: if not 0,
    causal (key j for query i >= j) in chunks of so many rows: a state of the chunks before, and the exponential itself
    inside of a chunk. Computed by blocks of features, so that nothing larger than N x FEATURE_BLOCK exists."""
    powers = torch.as_tensor(coefficients, dtype=torch.float64)
    if chunk:
        return _causal(q, k, v, powers, chunk)
    total = _sums(q, k, v, powers)
    return total[..., :-1] / total[..., -1:]


def _with_ones(v: torch.Tensor) -> torch.Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def _weights(table: Monomials, coefficients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[.., r]"""
    return (coefficients[..., table.degrees] * table.multinomials).to(dtype)


def _sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """[.., N_q, d_v + 1]: the sums over all keys of p(q.k) [v, 1]."""
    table = monomials(q.shape[-1], coefficients.shape[-1] - 1)
    weights, values = _weights(table, coefficients, q.dtype), _with_ones(v)
    total = torch.zeros_like(q[..., :1])
    for first in range(0, weights.shape[-1], FEATURE_BLOCK):
        last = first + FEATURE_BLOCK
        state = features(k, table, first, last).transpose(-1, -2) @ values
        total = total + features(q, table, first, last) @ (state * weights[..., first:last, None])
    return total


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, coefficients: torch.Tensor, chunk: int):
    table = monomials(q.shape[-1], coefficients.shape[-1] - 1)
    weights, values = _weights(table, coefficients, q.dtype)[..., None], _with_ones(v)
    state, outputs = torch.zeros_like(weights * values[..., :1, :]), []
    for first in range(0, q.shape[-2], chunk):
        here = (..., slice(first, first + chunk), slice(None))
        scores = q[here] @ k[here].transpose(-1, -2)
        inside = scores.exp()
        total = features(q[here], table) @ (state * weights) + inside.tril() @ values[here]
        state = state + features(k[here], table).transpose(-1, -2) @ values[here]
        outputs.append(total[..., :-1] / total[..., -1:])
    return torch.cat(outputs, -2)
