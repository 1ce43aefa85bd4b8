"""MKL's functions of vectors are resolved before threads call them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion import process

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"


@pytest.mark.skipif(not HEADER.is_file(), reason="torch without headers")
def test_all_that_torch_takes_are_called():
    taken = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+), ", HEADER.read_text(), re.MULTILINE))
    assert taken and taken <= {function.__name__ for function in process.VECTORIZED}


PROGRAM = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Called(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "fill_" not in (name := function.overloadpacket.__name__) and args and isinstance(args[0], torch.Tensor):
            print(name, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))

with Called():
    import fusion.backend
    print("imported")
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    fusion.backend.fuse(graph, [torch.ones(1)], fusion.Options())
"""


def test_the_first_graph_calls_each_on_one_element_and_importing_none():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("imported\n")
    called = set(done.stdout.splitlines())
    for function in process.VECTORIZED:
        for dtype in (torch.float32, torch.float64):
            assert f"{function.__name__} {dtype} 1" in called
