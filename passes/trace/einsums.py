"""Einsums that are no product of matrices with one dimension each for rows, columns and the sum.

They are decomposed into operations that the analysis knows: sums and permutations of one operand, products of two
without a sum, and products that sum over several dimensions at once (the tied rows of the MSA Transformer: Rao et al.,
2021, section 3), which are matrix products after a reshape. ATen decomposes them in the same way.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def decomposed(equation: Any, *operands: Any) -> Any:
    """The einsum as `sum`, `permute`, `mul`, or with fewer dimensions; NotImplemented for dots, diagonals, others."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or not all(isinstance(x, Tensor) for x in operands):
        return NotImplemented
    terms, _, output = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if any(not term.isalpha() or len(set(term)) != len(term) for term in (*inputs, output)):
        return NotImplemented
    if len(inputs) == 1:
        return _of_one(inputs[0], output, *operands)
    if len(inputs) == 2 and set("".join(inputs)) == set(output):
        left, right = (_aligned(term, output, x) for term, x in zip(inputs, operands, strict=True))
        return left * right
    if len(inputs) != 2:
        return NotImplemented
    result = _of_a_vector(inputs, output, operands)
    return result if result is not NotImplemented else _with_fewer_dimensions(inputs, output, operands)


def _of_one(term: str, output: str, x: Tensor) -> Tensor:
    """Einsum of one operand: the output's letters in order; other letters are moved to the end and summed."""
    summed = [letter for letter in term if letter not in output]
    x = x.permute([term.index(letter) for letter in (*output, *summed)])
    return x.sum(list(range(len(output), len(term)))) if summed else x


def _aligned(term: str, output: str, x: Tensor) -> Tensor:
    """The operand with a dimension for each letter of the output, of size 1 where it has none."""
    x = x.permute([term.index(letter) for letter in output if letter in term])
    for dim, letter in enumerate(output):
        if letter not in term:
            x = x.unsqueeze(dim)
    return x


def _of_a_vector(terms: Sequence[str], output: str, operands: Sequence[Tensor]) -> Any:
    """Product of a matrix and a vector, as a matrix product with one row."""
    left, right = map(set, terms)
    matrices = [not set(term) <= other for term, other in zip(terms, (right, left), strict=True)]
    if matrices[0] == matrices[1] or left & right <= set(output) or not left ^ right <= set(output):
        return NotImplemented
    row = next(letter for letter in string.ascii_letters if letter not in "".join(terms))
    place = min(output.index(letter) for letter in left ^ right)
    (one, x), (other, y) = ((term, x) if is_matrix else (term + row, x.unsqueeze(-1))
                            for term, is_matrix, x in zip(terms, matrices, operands, strict=True))  # fmt: skip
    return torch.einsum(f"{one},{other}->{output[:place]}{row}{output[place:]}", x, y).squeeze(place)


def _with_fewer_dimensions(terms: Sequence[str], output: str, operands: Sequence[Tensor]) -> Any:
    """Product with several dimensions in the sum or the columns: each group as one dimension."""
    extents: dict[str, Any] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, extent in zip(term, x.shape, strict=True):
            if extents.setdefault(letter, extent) != extent:  # of size 1, and broadcast
                return NotImplemented
    left, right = map(set, terms)
    summed = "".join(letter for letter in terms[0] if letter in right and letter not in output)
    columns = ["".join(letter for letter in term if letter not in other)
               for term, other in zip(terms, (right, left), strict=True) if term[-1] not in summed]  # fmt: skip
    merged = [letters for letters in (summed, *columns) if len(letters) > 1]
    if not merged or not summed or (left ^ right) - set(output):
        return NotImplemented
    short, flat = zip(*(_merged(term, merged, x) for term, x in zip(terms, operands, strict=True)), strict=True)
    apart = [letters for letters in merged if letters != summed]
    single = "".join(letter for letter in output if not any(letter in letters for letters in apart))
    result = torch.einsum(f"{short[0]},{short[1]}->{single}{''.join(letters[0] for letters in apart)}", *flat)
    for dim, letters in reversed([*enumerate(apart, len(single))]):
        result = result.unflatten(dim, [extents[letter] for letter in letters])
    order = "".join((single, *apart))
    return result.permute([order.index(letter) for letter in output])


def _merged(term: str, merged: Sequence[str], x: Tensor) -> tuple[str, Tensor]:
    """Operand with each of its groups of letters as one dimension behind the others, named by its first letter."""
    groups = [letters for letters in merged if letters[0] in term]
    rest = "".join(letter for letter in term if not any(letter in letters for letters in groups))
    order = "".join((rest, *groups))
    x = x.permute([term.index(letter) for letter in order])
    for dim, letters in enumerate(groups, len(rest)):
        x = x.flatten(dim, dim + len(letters) - 1)
    return "".join((rest, *(letters[0] for letters in groups))), x


DECOMPOSITIONS = {torch.einsum: decomposed, torch.ops.aten.einsum.default: decomposed}
