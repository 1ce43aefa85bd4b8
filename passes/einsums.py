"""Einsums that multiply no matrices: sums and permutations of one operand, and products of two that sum over nothing.

They run as what they are, which the analysis knows. ATen makes the same operations of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def without_matrices(equation: Any, *operands: Any) -> Any:
    """The einsum as `sum`, `permute` and `mul`; NotImplemented for others, and for those with dots or a diagonal."""
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
    return NotImplemented


def _of_one(term: str, output: str, x: Tensor) -> Tensor:
    """In the order of the output's letters, the letters that it lacks behind them, and summed."""
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


DECOMPOSITIONS = {torch.einsum: without_matrices, torch.ops.aten.einsum.default: without_matrices}
