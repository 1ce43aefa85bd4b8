"""Exact integer arithmetic on index expressions, in a normal form.

An INT expression is a polynomial over atoms (coordinates, sizes, loads, floor divisions, remainders, ...) with integer
coefficients; equal polynomials are the same node. Floor division and remainder are resolved where the bounds of the
coordinates allow it, which is what makes `h` of `reshape(B * H)` and back the coordinate `h` again:

    (H * b0 + b1) // H = b0          because 0 <= b1 < H
    (H * b0 + b1) %  H = b1
    H * (x // H) + x % H = x

All divisors are positive. Bounds of coordinates are given by a `Bounds` mapping: coordinate -> its size, 0 <= x < size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from fusion.ir.expr import Expr, Kind, const, contains, node

Bounds = Mapping[Expr, Expr]
Monomial = tuple[Expr, ...]
_NO_BOUNDS: Bounds = {}


def integer(value: int | Expr) -> Expr:
    """INT expression of a Python integer; an expression is returned unchanged."""
    return value if isinstance(value, Expr) else _integer(int(value))


@functools.lru_cache(maxsize=4096)
def _integer(value: int) -> Expr:
    return const(value, Kind.INT)


def in_64_bits(value: int) -> int:
    """Integer wrapped around to 64 bits, which sums of constants may leave."""
    return (value + 2**63) % 2**64 - 2**63


def terms(expr: Expr) -> dict[Monomial, int]:
    """The polynomial as {monomial (sorted atoms): coefficient}; () is the constant term."""
    if expr.op == "const":
        return {(): expr.integer} if expr.attr else {}
    if expr.op == "add":
        total: dict[Monomial, int] = {}
        for arg in expr.args:
            for monomial, coefficient in terms(arg).items():
                total[monomial] = total.get(monomial, 0) + coefficient
        return total
    if expr.op == "mul":
        coefficient, atoms = 1, expr.args
        if atoms[0].op == "const":
            coefficient, atoms = atoms[0].integer, atoms[1:]
        return {tuple(atoms): coefficient}
    return {(expr,): 1}


@functools.lru_cache(maxsize=4096)
def _key(atom: Expr) -> tuple[str, str, tuple]:
    return (atom.op, str(atom.attr), tuple(_key(arg) for arg in atom.args))


def from_terms(polynomial: Mapping[Monomial, int]) -> Expr:
    """The normal form of a polynomial."""
    parts = []
    items = [(m, c) for m, c in polynomial.items() if c]
    for monomial, coefficient in sorted(items, key=lambda item: (not item[0], [_key(a) for a in item[0]])):
        if not monomial:
            parts.append(_integer(coefficient))
        elif coefficient == 1 and len(monomial) == 1:
            parts.append(monomial[0])
        else:
            factors = monomial if coefficient == 1 else (_integer(coefficient), *monomial)
            parts.append(node("mul", factors, Kind.INT))
    if not parts:
        return _integer(0)
    return parts[0] if len(parts) == 1 else node("add", tuple(parts), Kind.INT)


def add(*values: int | Expr) -> Expr:
    """Sum, in normal form; joins m * (x // m) + x % m to x."""
    total: dict[Monomial, int] = {}
    for value in values:
        for monomial, coefficient in terms(integer(value)).items():
            total[monomial] = total.get(monomial, 0) + coefficient
    return from_terms(_rejoin({m: c for m, c in total.items() if c}))


def mul(*values: int | Expr) -> Expr:
    """Product, distributed."""
    total: dict[Monomial, int] = {(): 1}
    for value in values:
        step: dict[Monomial, int] = {}
        for left, a in total.items():
            for right, b in terms(integer(value)).items():
                monomial = tuple(sorted(left + right, key=_key))
                step[monomial] = step.get(monomial, 0) + a * b
        total = step
    return from_terms(_rejoin({m: c for m, c in total.items() if c}))


def neg(value: int | Expr) -> Expr:
    return mul(-1, value)


def sub(left: int | Expr, right: int | Expr) -> Expr:
    return add(left, neg(right))


def _rejoin(polynomial: dict[Monomial, int]) -> dict[Monomial, int]:
    """Apply k * m * (x // m) + k * (x % m) = k * x until nothing changes."""
    for monomial, coefficient in list(polynomial.items()):
        for atom in monomial:
            if atom.op != "mod":
                continue
            rest = list(monomial)
            rest.remove(atom)
            x, divisor = atom.args
            quotient = node("floordiv", (x, divisor), Kind.INT)
            scaled = terms(mul(from_terms({tuple(rest): coefficient}), divisor, quotient))
            if all(polynomial.get(m) == c for m, c in scaled.items()):
                left = {m: c for m, c in polynomial.items() if m not in scaled and m != monomial}
                return terms(add(from_terms(left), mul(from_terms({tuple(rest): coefficient}), x)))
    return polynomial


def _divide_exactly(monomial: Monomial, coefficient: int, divisor: Expr) -> tuple[Monomial, int] | None:
    """monomial * coefficient / divisor where that is exact and divisor is a single term."""
    if len(items := list(terms(divisor).items())) != 1:
        return None
    ((atoms, factor),) = items
    if factor == 0 or coefficient % factor:
        return None
    rest = list(monomial)
    for atom in atoms:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest), coefficient // factor


def _split(value: Expr, divisor: Expr) -> tuple[Expr, Expr]:
    """(q, r) with value = divisor * q + r, where q takes all terms that divide exactly."""
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    numeric = divisor.integer if divisor.op == "const" else 0
    for monomial, coefficient in terms(value).items():
        exact = _divide_exactly(monomial, coefficient, divisor)
        if exact is not None:
            quotient[exact[0]] = quotient.get(exact[0], 0) + exact[1]
        elif not monomial and numeric:
            quotient[()] = quotient.get((), 0) + coefficient // numeric
            rest[()] = coefficient % numeric
        else:
            rest[monomial] = rest.get(monomial, 0) + coefficient
    return from_terms(quotient), from_terms(rest)


def quotient(value: Expr, divisor: Expr) -> Expr | None:
    """value / divisor where the divisor, positive, is a factor of every term; else None."""
    result, rest = _split(value, divisor)
    return result if rest is integer(0) else None


def floordiv(value: int | Expr, divisor: int | Expr, bounds: Bounds = _NO_BOUNDS) -> Expr:
    """floor(value / divisor) for a positive divisor."""
    value, divisor = integer(value), integer(divisor)
    if divisor.op == "const" and value.op == "const":
        return integer(value.integer // divisor.integer)
    quotient, rest = _split(value, divisor)
    if rest is integer(0) or is_below(rest, divisor, bounds):
        return quotient
    if rest.op == "floordiv":
        rest = floordiv(rest.args[0], mul(rest.args[1], divisor), bounds)
    elif rest.op == "mod" and (inner := _split(rest.args[1], divisor))[1] is integer(0):
        rest = mod(floordiv(rest.args[0], divisor, bounds), inner[0], bounds)
    else:
        rest = node("floordiv", (rest, divisor), Kind.INT)
    return add(quotient, rest)


def mod(value: int | Expr, divisor: int | Expr, bounds: Bounds = _NO_BOUNDS) -> Expr:
    """value - divisor * floor(value / divisor) for a positive divisor."""
    value, divisor = integer(value), integer(divisor)
    if divisor.op == "const" and value.op == "const":
        return integer(value.integer % divisor.integer)
    _, rest = _split(value, divisor)
    if rest is integer(0) or is_below(rest, divisor, bounds):
        return rest
    if rest.op == "mod" and _split(rest.args[1], divisor)[1] is integer(0):
        return mod(rest.args[0], divisor, bounds)
    return node("mod", (rest, divisor), Kind.INT)


def extreme(expr: Expr, bounds: Bounds, largest: bool) -> Expr | None:
    """Size expression that is >= expr (or <=, with largest=False) for all coordinates within bounds, or None. Every
    atom is assumed to be >= 0, as coordinates, sizes, remainders and quotients of such are."""
    total = integer(0)
    for monomial, coefficient in terms(expr).items():
        value, upwards = integer(coefficient), (coefficient > 0) == largest
        for atom in monomial:
            if atom.op == "size":
                limit = atom
            elif upwards:
                limit = _atom_bound(atom, bounds)
            else:
                limit = integer(0) if is_nonnegative(atom) else None
            if limit is None:
                return None
            value = mul(value, limit)
        total = add(total, value)
    return total


def _atom_bound(atom: Expr, bounds: Bounds) -> Expr | None:
    """Largest value of a coordinate (without values: as of one with one), remainder or quotient."""
    if atom.op == "coord":
        extent = bounds.get(atom)
        return None if extent is None else extent if extent is integer(0) else sub(extent, 1)
    if atom.op == "mod":
        return sub(atom.args[1], 1)
    if atom.op == "floordiv" and is_nonnegative(atom.args[0]):
        top = extreme(atom.args[0], bounds, True)
        if top is None:
            return None
        # x <= m*q - 1 gives x // m <= q - 1 where the division is exact, else x // m <= top // m.
        quotient, rest = _split(add(top, 1), atom.args[1])
        return sub(quotient, 1) if rest is integer(0) else floordiv(top, atom.args[1])
    if atom.op in ("imin", "imax") and is_nonnegative(atom):
        tops = [extreme(arg, bounds, True) for arg in atom.args]
        result = [top for top in tops if top is not None]
        if atom.op == "imax":
            result = [top for top in result if all(t is not None and _is_at_most(t, top) for t in tops)]
        return result[0] if result else None
    return None


def never_negative(expr: Expr, bounds: Bounds) -> bool:
    """Whether expr >= 0 is provable for all coordinates within bounds (sizes that bound one are at least 1)."""
    low = extreme(expr, bounds, False)
    return low is not None and _is_at_most(integer(0), low)


def always_at_most(low: int | Expr, high: Expr, bounds: Bounds) -> bool | None:
    """Whether low <= high for all coordinates within bounds (True) or none (False); None where neither is provable."""
    margin = sub(high, low)
    if never_negative(margin, bounds):
        return True
    return False if never_negative(sub(neg(margin), 1), bounds) else None


@functools.lru_cache(maxsize=4096)
def is_nonnegative(expr: Expr) -> bool:
    """Whether every term is provably >= 0 (coordinates, sizes, remainders and quotients of such are)."""

    def holds(atom: Expr) -> bool:
        if atom.op == "floordiv":
            return is_nonnegative(atom.args[0])
        if atom.op in ("imin", "imax"):
            return (all if atom.op == "imin" else any)(is_nonnegative(arg) for arg in atom.args)
        return atom.op in ("coord", "size", "mod")

    return all(coefficient >= 0 and all(map(holds, monomial)) for monomial, coefficient in terms(expr).items())


def is_below(expr: Expr, limit: Expr, bounds: Bounds) -> bool:
    """Whether 0 <= expr < limit is provable from the bounds."""
    if not never_negative(expr, bounds):
        return False
    top = extreme(expr, bounds, True)
    if top is None:
        return False
    return _is_at_most(top, sub(limit, 1))


def _is_at_most(low: Expr, high: Expr) -> bool:
    """Whether this holds for two expressions in sizes, for all values of these."""
    return all(c >= 0 and all(atom.op == "size" for atom in m) for m, c in terms(sub(high, low)).items())


def linear(expr: Expr, atom: Expr) -> tuple[Expr, Expr] | None:
    """(coefficient, rest) with expr = coefficient * atom + rest, neither containing atom; None if not linear."""
    coefficient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, factor in terms(expr).items():
        if atom in monomial:
            others = list(monomial)
            others.remove(atom)
            coefficient[tuple(others)] = coefficient.get(tuple(others), 0) + factor
        else:
            rest[monomial] = factor
    parts = from_terms(coefficient), from_terms(rest)
    return None if any(contains(part, atom) for part in parts) else parts
