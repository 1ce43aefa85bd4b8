"""The letters of the papers as sympy symbols. One attention problem (one batch entry, one head) is meant throughout."""

from __future__ import annotations

import sympy
from sympy import Symbol

N_q = Symbol("N_q", integer=True, positive=True)  # queries
N_k = Symbol("N_k", integer=True, positive=True)  # keys
d = Symbol("d", integer=True, positive=True)  # head dimension of Q and K
d_v = Symbol("d_v", integer=True, positive=True)  # head dimension of V
M = Symbol("M", positive=True)  # fast memory in elements
B_r = Symbol("B_r", integer=True, positive=True)  # rows (queries) of a tile
B_c = Symbol("B_c", integer=True, positive=True)  # columns (keys) of a tile
B_d = Symbol("B_d", integer=True, positive=True)  # depth: how much of d is held at a time
B_e = Symbol("B_e", integer=True, positive=True)  # columns of the output held at a time
B_s = Symbol("B_s", integer=True, positive=True)  # keys of one split
stages = Symbol("stages", integer=True, positive=True)  # key tiles in flight
s = Symbol("s", nonnegative=True)  # share of tiles that are live
r = Symbol("r", integer=True, positive=True)  # polynomial features
B_f = Symbol("B_f", integer=True, positive=True)  # features held at a time
N = Symbol("N", integer=True, positive=True)  # N_q = N_k, in leading orders

SIZES = (N_q, N_k, d, d_v)
TILES = {str(symbol): symbol for symbol in (B_r, B_c, B_d, B_e, B_s, B_f, stages)}
ALL = {str(symbol): symbol for symbol in (*SIZES, *TILES.values(), M, s, r, N)}


def blocks(size: sympy.Expr, block: sympy.Expr) -> sympy.Expr:
    """How many blocks cover `size`: the ceiling of the quotient."""
    return sympy.ceiling(size / block)
