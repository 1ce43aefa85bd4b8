"""Predicted seconds of exact and approximate attention on one machine, and the length where they cross.

The time of the exact kernel is the planner's. The rates of the AMX feature kernels are derived from their instruction
counts and checked against measurements (docs/approximate.md): a core makes 280 multiply-adds a cycle in their tile
products, and a feature costs a third of a cycle to compute.

Polynomials are close to the exponential on [-B, B] in *relative* error, which is the error of attention weights: a
common factor of all weights cancels in the softmax, so the error that counts is that of exp(-x) p(x) against 1. The
best polynomial under that weight (minimax) is computed by Remez's exchange. Coefficients are of powers of x, lowest
first.

A row needs less than that: its errors *summed* over the keys, against the sum of its weights. Where the mean square of
the row's scores is known to be at most m (cheap to bound from the data), a bound of the form

    |exp(x) - p(x)| <= error * exp(x) + spread * x^2        for |x| <= B

makes that sum at most error + spread * m of the weights, provided that these add up to at least the number of keys.
`minimax` with a moment m minimises it: scores near the limit B may be off by more, since there are few of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from fusion.machine import Machine
from fusion.planning.problem import Problem

FEATURE_MACS, FEATURE_CYCLES = 280.0, 0.36
PRODUCTS = {1: 1, 2: 3}
ROUND_TRIP = 5e-4
"""Seconds of a call's tensor operations around the kernels, besides those that grow with the sizes."""
LOOK, LOOK_HEAD = 8e-5, 1.5e-5
"""Seconds that a sample of the data takes, and of each head, most of them for starting from cold caches."""
LOOK_SHARE = 0.03
"""Share of the exact kernel's time that looking at the data may take where it turns out to be for nothing."""
GPU_ROUND_TRIP, GPU_RATE = 4e-4, 0.25
PASSES, CAUSAL_PASSES, STATE_PASSES = 4, 5, 12
"""Times that these operations move each of Q, K and V, the same where causal, and the states of causal chunks."""
CHUNKED, STATISTICS = 1.4, 1.3
"""Times that the feature kernels take longer chunk by chunk, each with a state of its own, and that exact attention
inside of chunks takes longer than the planner says, for short rows whose statistics are written."""
WORTH = 0.9
"""Share of the exact kernel's time below which the polynomial's prediction has to be."""
UNIT = 2.0**-8
"""Relative error of rounding to bf16."""
MAX_FEATURES = 60000
CAUSAL_CHUNK = 1024
"""Rows of a causal chunk: as many as make its own scores cost about what making and reading the state does."""


def exact_seconds(machine: Machine, problem: Problem) -> float:
    """Seconds of the exact kernel, as the planner predicts."""
    from fusion.planning.plan import plan

    return plan(problem, machine).time


def worth_a_look(machine: Machine, problem: Problem) -> bool:
    """Whether exact attention takes so long that an inspection of the data costs next to nothing."""
    return LOOK + LOOK_HEAD * problem.problems <= LOOK_SHARE * exact_seconds(machine, problem)


def polynomial_seconds(machine: Machine, problem: Problem, features: int, planes: int, split: bool) -> float:
    """Seconds to compute and multiply the features of both sides. split: into bf16 planes (AMX tiles, tensor cores)."""
    rows = problem.problems * problem.n_q + max(1, problem.batch * problem.heads_kv) * problem.n_k
    passes = CAUSAL_PASSES if problem.causal else PASSES
    moved = rows * passes * (problem.d + problem.d_v) * 4 / machine.main.bandwidth
    if machine.kind == "gpu":
        return _gpu_seconds(machine, problem, rows, features, planes) + moved + GPU_ROUND_TRIP
    columns = -(-(problem.d_v + 1) // 16) * 16
    if split:
        cycles = FEATURE_CYCLES + columns * PRODUCTS[planes] / FEATURE_MACS
        seconds = rows * features * cycles / ((machine.clock or 2.5e9) * machine.cores)
    else:
        seconds = rows * features * (2 * columns + 8) / machine.flops("float32")
    inside = 0.0
    if problem.causal:
        chunk = max(1, min(problem.n_q, CAUSAL_CHUNK))
        chunks = -(-problem.n_q // chunk)
        near = replace(problem, batch=problem.batch * chunks, n_q=chunk, n_k=chunk, dtype="float32")
        states = problem.problems * (chunks - 1) * features * columns * 4 / machine.main.bandwidth
        seconds *= CHUNKED
        inside = STATISTICS * exact_seconds(machine, near) + STATE_PASSES * states
    return seconds + inside + moved + ROUND_TRIP


def _gpu_seconds(machine: Machine, problem: Problem, rows: int, features: int, planes: int) -> float:
    """Seconds of the feature kernels on a GPU: products, or computing features (a multiplication, a split and a sum
    each), whichever takes longer. `GPU_RATE` of the peak is a careful guess: these kernels have not been timed."""
    from fusion.planning.gpu_layout import padded

    degree = next(g for g in range(1, 17) if feature_count(problem.d, g) >= features)
    computed = rows * feature_count(problem.d, degree - 1) * padded(problem.d)
    products = 2.0 * computed * padded(problem.d_v) * PRODUCTS[max(planes, 1)]
    near = rows * min(CAUSAL_CHUNK, problem.n_k) / 2 * problem.causal
    products += 2.0 * near * (padded(problem.d) + padded(problem.d_v)) * PRODUCTS[2]
    busy = max(products / machine.flops("bfloat16"), 8.0 * (computed + near) / machine.flops("float32"))
    return busy / GPU_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A polynomial and the form of its computation.

    moment: the mean square score of a row that it was chosen for.
    planes: of the top degree (0: in float32 throughout).
    rounding: the error of the weights that the planes add.
    error: of the weights of a row, everything included.
    """

    polynomial: Polynomial
    moment: float
    planes: int
    features: int
    rounding: float

    @property
    def error(self) -> float:
        return self.polynomial.row_error(self.moment) + self.rounding


@functools.lru_cache(maxsize=4096)
def choose(
    d: int, bound: float, epsilon: float, exact_values: bool, split: bool, moment: float | None = None,
    least: float = 1.0, limit: int = MAX_FEATURES,
) -> Choice | None:  # fmt: skip
    """Cheapest polynomial whose certified error is at most epsilon, or None.

    bound: B of the data.
    moment: a bound on the mean square score of a row, relative to its mean weight (by default the bound that B
    implies).
    least: lower bound of the mean weight of a row: 1 with centred keys, since the exponential is convex.
    exact_values: V is bf16 already, and loses nothing as one plane.

    Fewer planes come before another degree: the latter multiplies the features by d / degree.
    """
    moment = bound * bound / least if moment is None else min(moment, bound * bound / least)
    for degree in range(1, 17):
        features = feature_count(d, degree)
        if features > limit:
            return None
        # Either may be the better one: the first gains where the moment is far below B squared.
        for given in (moment, None):
            if least_row_error(degree, bound, given) > epsilon:
                continue
            polynomial = minimax(degree, bound, given)
            if polynomial.row_error(moment) > epsilon:
                continue
            for planes in (1, 2) if split else (0,):
                rounding = _rounding(polynomial, planes, least, exact_values)
                if polynomial.row_error(moment) + rounding <= epsilon:
                    return Choice(
                        polynomial=polynomial, moment=moment, planes=planes, features=features, rounding=rounding
                    )
    return None


def _rounding(p: Polynomial, planes: int, least: float, exact_values: bool) -> float:
    """Error that rounding can add to the sum of a row's weights, relative to that sum.

    A monomial's term passes through up to four roundings: the features of key and query, the value, the state. In two
    planes each is off by 2**-16, and so is the omitted product. All terms of degree g add up to at most |c_g| B^g for a
    key; the sum of the weights is at least `least` for each key.
    """
    two = 6 * UNIT**2
    if planes == 0:
        return 0.0
    one = (3 if exact_values else 4) * UNIT * (1 + 2 * UNIT)
    top = p.magnitude(p.degree, None) * (one if planes == 1 else two)
    low = p.magnitude(0, p.degree) * two
    return (top + low) / least


def crossing(
    machine: Machine, problem: Problem, bound: float, epsilon: float, split: bool
) -> tuple[Choice | None, int]:
    """(the polynomial, the least N = N_q = N_k, a power of two times 1..2, from which it is predicted to be faster). 0
    where no polynomial is certified, or none is faster up to N = 2**26."""
    least = math.exp(-bound) if problem.causal else 1.0  # of a row's mean weight, without data; 1 with centred keys
    if (choice := choose(problem.d, bound, epsilon, problem.dtype == "bfloat16", split, least=least)) is None:
        return None, 0
    for step in range(7 * 8, 26 * 8 + 1):
        n = int(2 ** (step / 8))
        here = replace(problem, n_q=n, n_k=n)
        if polynomial_seconds(machine, here, choice.features, choice.planes, split) < WORTH * exact_seconds(
            machine, here
        ):
            return choice, n
    return choice, 0


def crossing_text(machine: Machine, problem: Problem, bound: float, epsilon: float, split: bool) -> str:
    """Text for |scores| <= bound: the polynomial, and the N from which it is predicted to be faster."""
    choice, n = crossing(machine, problem, bound, epsilon, split)
    if choice is None:
        return f"B = {bound:g}: no polynomial of at most {MAX_FEATURES} features is certified to {epsilon:g}: exact"
    what = f"B = {bound:g}: degree {choice.polynomial.degree}, {choice.features} features, error {choice.error:.2g}"
    return f"{what}; faster than exact from N = {n} on" if n else f"{what}; never faster than exact"


GRID = 4001
TOLERANCE = 1e-4
"""Relative distance from the best polynomial at which exchanges end."""
FLOOR = 0.15
"""error / spread of a polynomial for a moment, in units of the moment: within 10 % of the best where the moment is far
below B squared. (Where it is not, little is gained over the polynomial of least relative error.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Polynomial with its certified error.

    coefficients: c_0, c_1, ... of powers of x.
    bound: B.
    error, spread: |exp(x) - p(x)| <= error * exp(x) + spread * x^2 over |x| <= B (spread 0: a bound on the relative
        error of every single weight).
    """

    coefficients: tuple[float, ...]
    bound: float
    error: float
    spread: float = 0.0

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def row_error(self, moment: float) -> float:
        """Error of the weights of a row, relative to their sum, if its mean square score is at most `moment`."""
        return self.error + self.spread * moment

    def magnitude(self, low: int = 0, high: int | None = None) -> float:
        """Sum of |c_g| B^g over the degrees low <= g < high, a bound of the sum of all monomials of these degrees."""
        return sum(abs(c) * self.bound**g for g, c in list(enumerate(self.coefficients))[low:high])


def relative_error(coefficients: np.ndarray, bound: float, floor: float | None = None) -> float:
    """An upper bound on |exp(-x) p(x) - 1| over |x| <= bound, divided by floor + x^2 exp(-x) where `floor` is given."""
    x = bound * np.cos(np.linspace(0, math.pi, GRID))
    powers = np.polynomial.polynomial
    p = powers.polyval(x, coefficients)
    decay = np.exp(-x)
    result = np.abs(decay * p - 1)
    # Between two points of distance h the function leaves its chord by at most h^2/8 times its second derivative.
    first, second = (powers.polyval(x, powers.polyder(coefficients, k)) for k in (1, 2))
    curvature = float(np.abs(decay * (second - 2 * first + p)).max(initial=0.0))
    step = bound * math.pi / (GRID - 1)
    result = np.maximum(result[1:], result[:-1]) + 2 * curvature * step**2 / 8 + 1e-15
    if floor is not None:
        nearest = np.where(x[1:] * x[:-1] > 0, np.minimum(np.abs(x[1:]), np.abs(x[:-1])), 0.0)
        result /= floor + nearest**2 * np.minimum(decay[1:], decay[:-1])
    return float(result.max(initial=0.0))


@functools.lru_cache(maxsize=4096)
def minimax(degree: int, bound: float, moment: float | None = None) -> Polynomial:
    """The polynomial of least relative error on [-bound, bound] (Remez); with a moment, of least `row_error`."""
    if bound == 0:
        return Polynomial(coefficients=(1.0,) + (0.0,) * degree, bound=0.0, error=0.0)
    floor = None if moment is None else FLOOR * moment
    t = np.cos(np.linspace(0, math.pi, GRID))
    nodes = _first_nodes(degree)
    weight, basis = np.exp(-bound * t), np.polynomial.chebyshev.chebvander(t, degree)
    allowed = _allowed(t, bound, floor)
    best: Polynomial | None = None
    for _ in range(30):
        solved = _levelled(nodes, bound, floor)
        powers = np.polynomial.chebyshev.cheb2poly(solved[:-1])  # of x / bound
        candidate = _polynomial(powers / bound ** np.arange(len(powers)), bound, floor)
        if best is None or candidate.error < best.error:
            best = candidate
        residual = (weight * (basis @ solved[:-1]) - 1) / allowed
        if np.abs(residual).max() <= abs(solved[-1]) * (1 + TOLERANCE) + 1e-14:
            break
        exchanged = _extrema(t, residual, degree + 2)
        if exchanged is None:
            break
        nodes = exchanged
    assert best is not None
    return best


def least_row_error(degree: int, bound: float, moment: float | None = None) -> float:
    """A lower bound of `minimax(..).row_error(moment)` (de la Vallee Poussin), for one small linear system."""
    if bound == 0:
        return 0.0
    floor = None if moment is None else FLOOR * moment
    level = abs(_levelled(_first_nodes(degree), bound, floor)[-1]) * (1 - 1e-6) - 1e-14
    return level if moment is None else level * (1 + FLOOR) * moment


def _first_nodes(degree: int) -> np.ndarray:
    return np.cos(np.arange(degree + 2) * math.pi / (degree + 1))


def _levelled(nodes: np.ndarray, bound: float, floor: float | None) -> np.ndarray:
    """Chebyshev coefficients of the polynomial whose errors in these nodes alternate and are equal, and their size."""
    degree = len(nodes) - 2
    system = np.polynomial.chebyshev.chebvander(nodes, degree) * np.exp(-bound * nodes)[:, None]
    signs = (-1.0) ** np.arange(degree + 2) * _allowed(nodes, bound, floor)
    return np.linalg.solve(np.column_stack([system, signs]), np.ones(degree + 2))


def _allowed(t: np.ndarray, bound: float, floor: float | None) -> np.ndarray:
    """Allowed distance of exp(-x) p(x) from 1 at x = bound * t, up to a factor."""
    x = bound * t
    return np.ones_like(t) if floor is None else floor + x * x * np.exp(-x)


def _extrema(t: np.ndarray, residual: np.ndarray, count: int) -> np.ndarray | None:
    """`count` points of alternating sign with the largest residuals, or None where there are fewer."""
    edges = np.flatnonzero(np.diff(np.sign(residual))) + 1
    pieces = np.split(np.arange(len(t)), edges)
    peaks = [piece[np.abs(residual[piece]).argmax()] for piece in pieces]
    while len(peaks) > count:
        peaks = peaks[1:] if abs(residual[peaks[0]]) < abs(residual[peaks[-1]]) else peaks[:-1]
    return t[peaks] if len(peaks) == count else None


def _polynomial(coefficients: np.ndarray, bound: float, floor: float | None) -> Polynomial:
    level, powers = relative_error(coefficients, bound, floor), tuple(float(c) for c in coefficients)
    if floor is None:
        return Polynomial(coefficients=powers, bound=bound, error=level)
    return Polynomial(coefficients=powers, bound=bound, error=level * floor, spread=level)


def feature_count(d: int, degree: int) -> int:
    """r, the number of monomials of up to `degree` in d coordinates: binomial(d + degree, degree)."""
    return math.comb(d + degree, degree)
