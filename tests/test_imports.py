"""Modules import each other in one direction, in functions too."""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UPWARD = {
    ("fusion.ir.expr", "fusion.ir.ops"): "Python's operators on an expression, in normal form",
    ("fusion.ir.expr", "fusion.ir.printing"): "its text",
}
"""Imports in functions that go the other way, and for what."""


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in (path for folder in ("fusion", "passes", "codegen") for path in (ROOT / folder).rglob("*.py")):
        parts = path.resolve().relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "fusion" else ("fusion", *parts))
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Full names that module `name` imports when it runs."""
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {inner for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in skipped:
            place = f"{origin(name, node)}." if isinstance(node, ast.ImportFrom) else ""
            yield from (f"{place}{alias.name}" for alias in node.names)


def origin(name: str, node: ast.ImportFrom) -> str:
    """Full name of the module that `node`, in module `name`, imports from."""
    if not node.level:
        return node.module or ""
    package = name.split(".") if is_package(name) else name.split(".")[:-1]
    return ".".join([*package[: len(package) + 1 - node.level], *([node.module] if node.module else [])])


def is_package(name: str) -> bool:
    return (ROOT / "fusion" / Path(*name.split(".")[1:]) / "__init__.py").exists()


@functools.cache
def edges() -> dict[str, set[str]]:
    """What each module imports of ours."""
    trees = modules()

    def module(name: str) -> str:
        return name if name in trees else name.rpartition(".")[0]

    return {
        name: {module(found) for found in imported(name, tree)} & trees.keys() - {name} for name, tree in trees.items()
    }


def downward() -> dict[str, set[str]]:
    return {name: {to for to in found if (name, to) not in UPWARD} for name, found in edges().items()}


def test_no_module_is_imported_by_what_it_imports() -> None:
    TopologicalSorter(downward()).prepare()


def test_what_writes_mlir_knows_no_tensor_and_nothing_of_what_runs_it() -> None:
    written = {name: set(imported(name, tree)) for name, tree in modules().items() if "codegen.mlir" in name}
    assert "fusion.codegen.mlir.kernel" in written
    others = ("torch", "torch_mlir", "fusion.codegen.cpu", "fusion.codegen.emitter")
    assert not [(name, x) for name, found in written.items() for x in found if x.startswith(others)]


@pytest.mark.parametrize("edge", UPWARD, ids="->".join)
def test_each_exception_is_one(edge: tuple[str, str]) -> None:
    assert edge[1] in edges()[edge[0]], "no such import"
    found = downward()
    found[edge[0]].add(edge[1])
    with pytest.raises(CycleError):
        TopologicalSorter(found).prepare()
