"""Functions of the score language that Triton's own language lacks, as text for the modules that use them.

They are written in `triton.language` alone, without a vendor's library, so that every target and the interpreter
compute the same; only `tanh_bfloat16` takes an instruction where there is one. Polynomials are minimax fits in relative
error over the range given; coefficients beyond float32 are rounded by the compiler.
"""

from __future__ import annotations

import re

from fusion.ir.primitives import HASH_MULTIPLIERS, HASH_SPREAD

_HASH_STEPS = "\n".join(f"    x = (x ^ (x >> {shift})) * {factor:#x}" for shift, factor in HASH_MULTIPLIERS)

_TEXT = f'''
@triton.jit
def tanh(x):
    """Hyperbolic tangent: an odd polynomial below 0.6 (relative error 3e-9), else by exponentials."""
    y = x * x
    p = 0.02075362698 - 0.00585216655 * y
    p = 1.0 + y * (-0.33333283257 + y * (0.13331688952 + y * (-0.05376870408 + y * p)))
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    big = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.6, x * p, tl.where(x < 0, -big, big))


@triton.jit
def tanh_bfloat16(x, UNIT_TANH: tl.constexpr):
    """Hyperbolic tangent that the model rounds to bfloat16, by up to 2**-9 of it. UNIT_TANH: by NVIDIA's special
    function units, whose relative error is 2**-11 at most."""
    if UNIT_TANH:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tanh(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def expm1(x):
    """exp(x) - 1: a Taylor polynomial below 0.5 (relative error 1e-9), else by subtraction."""
    p = 1 / 5040.0 + x * (1 / 40320.0 + x * (1 / 362880.0))
    p = 1.0 + x * (0.5 + x * (1 / 6.0 + x * (1 / 24.0 + x * (1 / 120.0 + x * (1 / 720.0 + x * p)))))
    return tl.where(tl.abs(x) < 0.5, x * p, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x); what rounding took from 1 + x is given back as a factor."""
    y = 1.0 + x
    exact = tl.log(y) * (x / (y - 1.0))
    return tl.where(y == 1.0, x, tl.where(y == float("inf"), y, exact))


@triton.jit
def atan(x):
    """Arc tangent: arguments are brought below tan(pi / 8), where an odd polynomial holds (relative error 2e-8)."""
    a = tl.abs(x)
    far = a > 2.414213562373095
    near = a < 0.41421356237309503
    t = tl.where(near, a, tl.where(far, -1.0 / a, (a - 1.0) / (a + 1.0)))
    y = t * t
    p = 1.0 + y * (-0.33332799191 + y * (0.19974470263 + y * (-0.13852087365 + y * 0.07986734029)))
    r = t * p + tl.where(near, 0.0, tl.where(far, 1.5707963267948966, 0.7853981633974483))
    return tl.where(x < 0, -r, r)


@triton.jit
def trunc(x):
    """Towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_half_even(x):
    """To the nearest integer, ties to the even one."""
    low = tl.floor(x)
    rest = x - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
    return tl.where(up, low + 1.0, low)


@triton.jit
def power(x, y):
    """x to the power y, with the sign of integral powers of negative numbers; NaN for their other powers."""
    whole = tl.floor(y)
    half = whole * 0.5
    odd = (half != tl.floor(half)) & (tl.abs(y) < 16777216.0)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    negative = tl.where(whole != y, float("nan"), tl.where(odd, -size, size))
    signed = tl.where(x < 0, negative, size)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, signed)


@triton.jit
def floor_div(x, y):
    """floor(x / y) of integers, y > 0; the language's own division truncates."""
    q = x // y
    return q - (x - q * y < 0).to(tl.int32)


@triton.jit
def floor_mod(x, y):
    """x - y * floor(x / y) of integers, y > 0."""
    r = x - (x // y) * y
    return tl.where(r < 0, r + y, r)


@triton.jit
def hashed(key, counter):
    """A pseudo-random integer in [0, 2**31) of two integers, of which the lower 32 bits count."""
    x = tl.cast(key, tl.uint32) ^ (tl.cast(counter, tl.uint32) * {HASH_SPREAD:#x})
{_HASH_STEPS}
    return tl.cast((x ^ (x >> 16)) >> 1, tl.int32)
'''

HELPERS = {re.findall(r"def (\w+)", text)[0]: text for text in _TEXT.strip().split("\n\n\n")}
"""Name of the function in a module -> its text."""
