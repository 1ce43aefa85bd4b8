"""The simulated memory counts every element and refuses what a real one could not do."""

import numpy as np
import pytest

from examples.simulate.memory import FastMemoryError, TwoLevelMemory


@pytest.fixture
def memory() -> TwoLevelMemory:
    return TwoLevelMemory(10, A=np.arange(12.0).reshape(3, 4))


def test_counts_loads_and_stores_by_element(memory):
    memory.load("a", "A", slice(0, 2))
    memory["a"] = memory["a"] * 2
    memory.store("a", "A", slice(1, 3))
    assert (memory.loads, memory.stores, memory.io, memory.peak) == (8, 8, 16, 8)
    assert memory.result("A")[1].tolist() == [0, 2, 4, 6]


def test_refuses_more_than_its_capacity(memory):
    memory.load("a", "A", slice(0, 2))
    with pytest.raises(FastMemoryError, match=r"4 elements does not fit: 8 of M=10"):
        memory.load("b", "A", 2)
    memory.free("a")
    memory.load("b", "A", 2)


def test_refuses_to_compute_on_what_is_not_loaded(memory):
    with pytest.raises(FastMemoryError, match="'a' was used but is not in fast memory"):
        memory["b"] = memory["a"] + 1
    with pytest.raises(FastMemoryError, match="slow memory holds no 'B'"):
        memory.load("b", "B")


def test_refuses_to_lose_a_block_or_to_reshape_one(memory):
    memory.load("a", "A", 0)
    with pytest.raises(FastMemoryError, match="already in fast memory"):
        memory.load("a", "A", 1)
    with pytest.raises(FastMemoryError, match="was given a value of shape"):
        memory["a"] = np.zeros(3)


def test_a_block_used_after_it_was_freed_is_poisoned(memory):
    stale = memory.load("a", "A", 0)
    memory.free("a")
    assert np.isnan(stale).all()


def test_a_result_that_was_not_written_is_not_a_number(memory):
    memory.reserve("O", (2, 2))
    assert np.isnan(memory.result("O")).all()


def test_what_is_computed_counts_against_the_capacity(memory):
    memory.load("a", "A", slice(0, 2))
    with pytest.raises(FastMemoryError, match="does not fit"):
        memory["square"] = memory["a"] @ memory["a"].T
