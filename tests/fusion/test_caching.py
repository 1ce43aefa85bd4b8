"""Caches are bounded, and what one thread collects or sets does not reach another one's."""

import functools
import importlib
import pkgutil
import threading

import pytest
import torch
import torch._dynamo

import fusion
from fusion.caching import BoundedCache, OncePerKey
from fusion.report import report
from fusion.runtime import guards
from tests.codegen.mlir.cases import case


def test_the_oldest_goes_where_there_are_most():
    kept = BoundedCache(3)
    for number in range(5):
        kept[number] = str(number)
    kept[4] = "again"
    assert dict(kept) == {2: "2", 3: "3", 4: "again"}


def test_things_are_made_once_by_many_threads_and_in_bounded_number():
    made, calls, barrier = OncePerKey(2), [], threading.Barrier(8)

    def make(key):
        calls.append(key)
        return object()

    def ask():
        barrier.wait()
        for key in "aab":
            made.get_or_make(key, functools.partial(make, key))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == ["a", "b"]
    made.get_or_make("c", object)
    assert [*made] == ["b", "c"]


def modules():
    names = (found.name for found in pkgutil.walk_packages(fusion.__path__, "fusion."))
    for name in names:
        if not name.endswith("__main__"):
            try:
                yield importlib.import_module(name)
            except ImportError:  # what is optional and not installed
                continue


def cached(owner):
    for name, held in vars(owner).items():
        held = held.__func__ if isinstance(held, staticmethod | classmethod) else held
        if hasattr(held, "cache_parameters"):
            yield f"{owner.__name__}.{name}", held
        elif isinstance(held, type) and held.__module__ == owner.__name__:
            yield from cached(held)


def test_no_cache_of_the_package_grows_without_end():
    """A function without arguments has one result."""
    every = dict(found for module in modules() for found in cached(module))
    assert len(every) > 30
    unbounded = [
        name
        for name, function in every.items()
        if function.cache_parameters()["maxsize"] is None and function.__wrapped__.__code__.co_argcount
    ]
    assert unbounded == []


def attention(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def compiled(shift: float):
    torch._dynamo.reset()
    program = lambda q, k, v: attention(q, k, v) + shift
    torch.compile(program, backend="fusion", options={"inner": "eager"})(*(torch.randn(1, 2, 5, 8) for _ in range(3)))


def test_reports_are_collected_inside_of_others():
    """An inner list that is empty at its end equals an outer one that is empty, too."""
    with fusion.collect_reports() as outer:
        with fusion.collect_reports() as empty:
            pass
        with fusion.collect_reports() as inner:
            compiled(1.0)
        compiled(2.0)
    compiled(3.0)
    assert (len(outer), len(empty), len(inner)) == (2, 0, 1)


def test_reports_of_another_thread_are_its_own():
    found = {}

    def collect():
        with fusion.collect_reports() as reports:
            report.publish(report.Report())
        found["thread"] = reports

    with fusion.collect_reports() as reports:
        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
    assert (len(reports), len(found["thread"])) == (0, 1)


def test_failures_are_raised_as_long_as_any_thread_asks_for_it():
    first, second = guards.failures_raised(), guards.failures_raised()
    must = functools.partial(guards._must_raise, RuntimeError(), case("plain", "float32", 16).spec)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert must()
    second.__exit__(None, None, None)
    with pytest.raises(KeyError), guards.failures_raised():
        raise KeyError
    assert not must()
