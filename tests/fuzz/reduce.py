"""A failing program made short: statements and parts of expressions are taken away as long as it fails as before."""

from __future__ import annotations

import ast
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.check import Result, Verdict, check
from tests.fuzz.writer import Program

SECONDS = 30.0


def alike(found: Result, wanted: Result) -> bool:
    """Whether a smaller program fails in the same way: other values, special values in other places, or an exception
    of the same class."""
    if found.verdict is not wanted.verdict:
        return False
    if wanted.verdict is Verdict.FAILED:
        return found.message.split(":")[0] == wanted.message.split(":")[0]
    return ("exceeds" in found.message) == ("exceeds" in wanted.message)


def reduced(
    program: Program, wanted: Result, seconds: float = SECONDS, judge: Callable[[Program], Result] = check
) -> tuple[Program, Result]:
    """The shortest program found in some seconds that fails as `wanted`, and its result."""
    deadline, best = time.monotonic() + seconds, (_simplest_way(program, wanted, judge), wanted)
    before = None
    while before != best[0].text and time.monotonic() < deadline:
        before = best[0].text
        for smaller in (_without_statements, _with_parts, _with_smaller_sizes):
            place = 0
            while time.monotonic() < deadline:
                if (tree := next(itertools.islice(smaller(ast.parse(best[0].text)), place, None), None)) is None:
                    break
                candidate = replace(best[0], text=ast.unparse(tree))
                if candidate.text != best[0].text and alike(result := judge(candidate), wanted):
                    best = candidate, result
                else:
                    place += 1
    return best


def _simplest_way(program: Program, wanted: Result, judge: Callable[[Program], Result]) -> Program:
    """The program without training, on the reference interpreter and traced directly, where it fails there, too."""
    for change in ({"route": "trace"}, {"emitter": "reference"}, {"trained": False}):
        candidate = replace(program, **change)
        if candidate != program and alike(judge(candidate), wanted):
            program = candidate
    return program


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _without_statements(tree: ast.Module) -> Iterator[ast.Module]:
    for number, function in enumerate(_functions(tree)):
        for place in reversed(range(len(function.body) - 1)):
            candidate = copy.deepcopy(tree)
            body = _functions(candidate)[number].body
            removed = body.pop(place)
            if number == 0 and isinstance(removed, ast.Assign) and isinstance(removed.targets[0], ast.Name):
                _drop_input(candidate, removed.targets[0].id)
            yield candidate


def _drop_input(tree: ast.Module, name: str) -> None:
    """Takes a parameter away from both functions; a program that needs it is then no program."""
    inputs, function = _functions(tree)
    returned = inputs.body[-1].value  # type: ignore[attr-defined]
    returned.elts = [element for element in returned.elts if element.id != name]
    function.args.args = [argument for argument in function.args.args if argument.arg != name]


def _with_parts(tree: ast.Module) -> Iterator[ast.Module]:
    """An expression replaced by one of its operands."""
    count = sum(isinstance(node, ast.expr) for node in ast.walk(tree))
    for number in range(count):
        for part in range(3):
            candidate = copy.deepcopy(tree)
            if _Replacement(number, part).apply(candidate):
                yield candidate


class _Replacement(ast.NodeTransformer):
    """Puts operand `part` of the expression with a number in its place."""

    def __init__(self, number: int, part: int):
        self.left, self.part, self.done = number, part, False

    def apply(self, tree: ast.Module) -> bool:
        self.visit(tree)
        return self.done

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            if self.left == 0:
                self.left = -1
                operands = _operands(node)
                if self.part < len(operands):
                    self.done = True
                    return operands[self.part]
                return node
            self.left -= 1
        return super().generic_visit(node)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Compare):
        return [node.left]
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
        return [node.value]
    if isinstance(node, ast.Call):
        of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*of, *node.args]
    return []


def _with_smaller_sizes(tree: ast.Module) -> Iterator[ast.Module]:
    sizes = tree.body[0].value.elts  # type: ignore[attr-defined]
    for number, size in enumerate(sizes):
        for smaller in sorted({1, 2, size.value // 2, size.value - 1}):
            if 1 <= smaller < size.value:
                candidate = copy.deepcopy(tree)
                candidate.body[0].value.elts[number].value = smaller  # type: ignore[attr-defined]
                yield candidate
