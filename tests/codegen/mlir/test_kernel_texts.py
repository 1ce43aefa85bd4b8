"""What is emitted: a change that only moves an emitter's code leaves all texts as they are."""

from __future__ import annotations

from tests.codegen.mlir import kernel_texts


def test_texts_are_those_of_the_hashes() -> None:
    """Where a change of what is emitted is meant, `python -m tests.codegen.mlir.kernel_texts` renews the file."""
    assert kernel_texts.hashes().splitlines() == kernel_texts.HASHES.read_text().splitlines()
