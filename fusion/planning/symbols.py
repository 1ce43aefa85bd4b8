"""The letters of the papers as sympy symbols. One attention problem (one batch entry, one head) is meant throughout."""

from __future__ import annotations

import sympy


def _positive(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


N_q = _positive("N_q")  # queries
N_k = _positive("N_k")  # keys
N = _positive("N")  # N_q = N_k, in leading orders
d = _positive("d")  # head dimension of Q and K
d_v = _positive("d_v")  # head dimension of V
M = sympy.Symbol("M", positive=True)  # fast memory in elements
s = sympy.Symbol("s", nonnegative=True)  # share of tiles that are live
r = _positive("r")  # polynomial features

B_r = _positive("B_r")  # rows (queries) of a tile
B_c = _positive("B_c")  # columns (keys) of a tile
B_d = _positive("B_d")  # depth of a blocked product: how much of the summed dimension is held at a time
B_o = _positive("B_o")  # rows of the tile of a schedule's second product
B_p = _positive("B_p")  # columns of the tile of a schedule's second kernel
B_e = _positive("B_e")  # head-dimension columns of an output held at a time
B_s = _positive("B_s")  # keys of one split
B_f = _positive("B_f")  # features held at a time
stages = _positive("stages")  # key tiles in flight

SIZES = (N_q, N_k, d, d_v, M, s, r)
TILES = {str(symbol): symbol for symbol in (B_r, B_c, B_d, B_o, B_p, B_e, B_s, B_f, stages)}
CUTS = {"B_r": ("N_q",), "B_c": ("N_k",), "B_d": ("d",), "B_o": ("N_q", "N_k"), "B_p": ("N_q", "N_k"),
        "B_e": ("d", "d_v"), "B_s": ("N_k",), "B_f": ("r",)}  # fmt: skip
"""What each tile variable cuts. The second product of a schedule cuts keys or queries, so both offer candidates."""


def blocks(size: sympy.Expr, block: sympy.Expr) -> sympy.Expr:
    """How many blocks cover `size`: the ceiling of the quotient."""
    return sympy.ceiling(size / block)


def smooth(expression: sympy.Expr) -> sympy.Expr:
    """The expression with every ceiling taken off: what it is where all blocks divide."""
    return expression.replace(sympy.ceiling, lambda inner: inner)


R, C = blocks(N_q, B_r), blocks(N_k, B_c)
PAIRS = N_q * N_k
DIMS = d + d_v
