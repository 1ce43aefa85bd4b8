"""What is emitted: a change that only moves an emitter's code leaves all texts as they are."""

from __future__ import annotations

import importlib
import pkgutil

from fusion.codegen import cpu, mlir
from fusion.codegen.mlir.thread_function import ThreadFunction
from tests.codegen.mlir import kernel_texts


def test_texts_are_those_of_the_hashes() -> None:
    """Where a change of what is emitted is meant, `python -m tests.codegen.mlir.kernel_texts` renews the file."""
    assert kernel_texts.hashes().splitlines() == kernel_texts.HASHES.read_text().splitlines()


def test_a_class_has_at_most_two_bases_above_it() -> None:
    """A reader of a kernel opens few files: what kernels share beyond that is composed."""
    classes = set[type]()
    for package in (mlir, cpu):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name)).values()
            classes |= {x for x in members if isinstance(x, type) and x.__module__.startswith(package.__name__)}
    assert {ThreadFunction, *ThreadFunction.__subclasses__()} <= classes
    depths = {x.__name__: sum(base in classes for base in x.__mro__) for x in classes}
    assert {name for name, depth in depths.items() if depth > 3} == set()
