"""Coefficients of elementary functions in float32, for kernels that write them as polynomials and quotients."""

from __future__ import annotations

import functools
import math

import numpy as np

from .numbers import LOG2E

LN2 = math.log(2.0)
#: Numerators and denominators of tanh(x) / x in x**2 on [0, 81], by iterated weighted least squares; all are positive,
#: so that nothing cancels
TANH = (
    (9.999999794e-01, 1.338101901e-01, 3.495580362e-03, 2.060895930e-05, 1.335450062e-08),
    (1.0, 4.671433459e-01, 2.587695236e-02, 3.285622321e-04, 7.776490394e-07),
)
TANH_SHORT = (
    (9.999940924e-01, 1.205823952e-01, 2.066666138e-03, 3.023143407e-06),
    (1.0, 4.538780065e-01, 2.006734051e-02, 1.203734232e-04),
)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts: the first is exact in few bits
#: log(1 + f) = f - f**2 / 2 + f**3 * these, on [sqrt(1/2) - 1, sqrt(2) - 1]: single-precision coefficients of Cephes
LOG_TAIL = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1, -1.2420140846e-1,
    1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
LOG2E_HIGH = 1.44269502162933349609375  # log2(e) rounded to float32
LOG2E_LOW = LOG2E - LOG2E_HIGH
MANTISSA, BIAS = 128, 127
"""Steps of a bfloat16 mantissa between two powers of 2, and the bias of its exponent."""


@functools.lru_cache(maxsize=64)
def exp2_polynomial(degree: int) -> tuple[float, ...]:
    """Coefficients c0..c_degree of 2**x on [0, 1], near the best in relative error, and exact at both ends: a weight
    whose score is the row's maximum is 1, also where the difference is rounded to just below 0."""
    # p(x) = 1 + x r(x). The error vanishes at 0 and where r meets (2**x - 1) / x; with these the roots of a Chebyshev
    # polynomial of degree + 1, stretched so that the outermost are 0 and 1, the error is nearly even.
    roots = np.cos((2 * np.arange(degree + 1) + 1) * np.pi / (2 * (degree + 1)))
    nodes = (roots[:-1] - roots[-1]) / (roots[0] - roots[-1])
    r = np.linalg.solve(np.vander(nodes, degree, increasing=True), np.expm1(nodes * LN2) / nodes)
    return (1.0, *r.tolist())


@functools.cache
def excess_of_linear() -> tuple[int, ...]:
    """128 (1 + f - 2**f), to the nearest so that 128 2**f is, for f = 0, 1/128 .. 127/128."""
    return tuple(MANTISSA + n - round(MANTISSA * 2 ** (n / MANTISSA)) for n in range(MANTISSA))
