"""What docs/processes.md says of threads, forks, the network and equal bits."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

import fusion  # noqa: F401  (the backend)
from tests.numerics import assert_runs_as_exact_as_eager, assert_same

ROOT = Path(__file__).parents[2]
OPTIONS = {"inner": "eager"}


def attend(q, k, v, scale=1.0):
    return torch.softmax(q @ k.mT * scale, -1) @ v


def given(seed: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def in_threads(count: int, run: Callable[[int], object]) -> list:
    """The results of `run(0)`, ..., all started at the same time, in a thread each."""
    together = Barrier(count)

    def one(number: int) -> object:
        together.wait()
        return run(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_threads_call_one_compiled_function() -> None:
    compiled = torch.compile(attend, backend="fusion", options=OPTIONS, dynamic=True)
    with torch.no_grad():
        compiled(*given(0, 2, 4, 65, 16))

    def calls(number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [compiled(*given(number, 2, 4, 65 + 7 * k, 16)) for k in range(6)]

    alone = [calls(number) for number in range(4)]
    for ours, expected in zip(in_threads(4, calls), alone, strict=True):
        assert_same(ours, expected)


def test_threads_train_at_the_same_time() -> None:
    compiled = torch.compile(attend, backend="fusion", options=OPTIONS)

    def gradients(number: int) -> list[torch.Tensor]:
        leaves = [tensor.requires_grad_() for tensor in given(number, 2, 4, 65, 16)]
        return list(torch.autograd.grad(compiled(*leaves).square().sum(), leaves))

    alone = [gradients(number) for number in range(4)]
    for ours, expected in zip(in_threads(4, gradients), alone, strict=True):
        assert_same(ours, expected)


def test_threads_compile_at_the_same_time() -> None:
    """Different functions, and the same one, at their first call."""
    functions = [lambda q, k, v, n=n: attend(q, k, v, scale=0.1 + n) for n in range(2)]
    compiled = [torch.compile(function, backend="fusion", options=OPTIONS) for function in functions]
    inputs = given(0, 2, 4, 33, 16)

    def first_call(number: int) -> torch.Tensor:
        with torch.no_grad():
            return compiled[number % 2](*inputs)

    for number, result in enumerate(in_threads(4, first_call)):
        assert_runs_as_exact_as_eager(lambda *_, result=result: result, functions[number % 2], *inputs)


FORK = """
import os, signal, sys, torch
from fusion.exactness import errors
connected = []
sys.addaudithook(lambda event, arguments: connected.append(arguments) if event == "socket.connect" else None)
signal.alarm(500)
torch.set_num_threads(2)

def attend(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v

def other(q, k, v):
    return torch.softmax(torch.tanh(q @ k.mT), -1) @ v

options = {"inner": "eager", "strict": True}
with torch.no_grad():
    inputs = [torch.randn(2, 4, 257, 16) for _ in range(3)]
    compiled = torch.compile(attend, backend="fusion", options=options)
    before = compiled(*inputs)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        same = torch.equal(compiled(*inputs), before)
        new = torch.compile(other, backend="fusion", options=options)(*inputs)
        found = errors(new, other(*inputs), other(*[tensor.double() for tensor in inputs]))
        os._exit(0 if same and found.share <= 1 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after = compiled(*inputs)
print("child", status, "parent", torch.equal(after, before), "connected", connected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_runs_what_was_compiled_and_compiles() -> None:
    """In one thread, as a DataLoader's worker: in more, torch's own operations hang. And nothing is connected to."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "child 0 parent True connected []", done.stdout + done.stderr


def with_bias(q, k, v, bias):
    return torch.softmax(q @ k.mT + bias, -1) @ v


def with_table(q, k, v, table):
    n = torch.arange(q.shape[-2])
    return torch.softmax(q @ k.mT + table[:, (n[:, None] - n[None, :]) % table.shape[1]], -1) @ v


@pytest.mark.parametrize("function", [with_bias, with_table])
def test_the_same_call_gives_the_same_bits(function) -> None:
    """Forward and gradients, those of a shared bias and of a table of positions too, by any number of threads."""
    q, k, v = given(1, 3, 4, 130, 16)
    further = torch.randn(4, 130, 130) if function is with_bias else torch.randn(4, 31)
    compiled = torch.compile(function, backend="fusion", options={**OPTIONS, "strict": True})

    def results() -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, further)]
        result = compiled(*leaves)
        return [result.detach(), *torch.autograd.grad(result.square().sum(), leaves)]

    first, threads = results(), torch.get_num_threads()
    for _ in range(5):
        assert_same(results(), first)
    try:
        torch.set_num_threads(1)
        assert_same(results()[0], first[0])
    finally:
        torch.set_num_threads(threads)


NETWORK = {"socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx", "aiohttp"}


def test_no_module_of_the_package_can_reach_the_network() -> None:
    for top in ("fusion", "passes", "codegen"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not NETWORK & {name.partition(".")[0] for name in names}, file
