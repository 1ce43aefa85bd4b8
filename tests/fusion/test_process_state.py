"""What belongs to the process is as it was after an import, and after the inner compiler failed."""

import os
import platform
import subprocess
import sys
import textwrap

import pytest

STATE = """
import copy, gc, json, logging, random, sys, warnings
import numpy, torch, torch._dynamo
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph
from torch.utils._python_dispatch import TorchDispatchMode

class Operations(TorchDispatchMode):
    seen = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))

def state():
    hooks = torch._C._autograd
    return {
        "dtype": torch.get_default_dtype(), "device": torch.get_default_device(), "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(), "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"), "threads": torch.get_num_threads(),
        "hooks": hooks._saved_tensors_hooks_get_disabled_error_message(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())),
        "warnings": list(warnings.filters), "excepthook": sys.excepthook,
        "handlers": [list(logging.getLogger(n).handlers) for n in (None, "torch", "torch._dynamo", "fusion")],
        "levels": [logging.getLogger(n).level for n in (None, "torch", "torch._dynamo", "torch._inductor")],
        "inductor": {k: copy.copy(v) for k, v in config.get_config_copy().items()},
        "dynamo": {k: copy.copy(v) for k, v in torch._dynamo.config.get_config_copy().items()},
        "handled": set(TorchInGraphFunctionVariable._get_handlers()),
        "passes": [(id(x), *map(id, [e for found in x.patterns.values() for e in found]))
                   for x in joint_graph.pass_patterns],
    }

def same(before, after, but=()):
    changed = [name for name in before if name not in but and before[name] != after[name]]
    assert not changed, {name: (before[name], after[name]) for name in changed}
"""


def run(program: str) -> None:
    """Run a program that counts what Inductor does, which does nothing where its caches have the graph."""
    text = STATE + textwrap.dedent(program)
    uncached = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=uncached)
    assert done.returncode == 0, done.stderr


def test_imports_leave_the_process_as_it_was() -> None:
    run("""
        before = state()
        with Operations():
            import fusion
            same(before, state())
            import fusion.backend
            same(before, state())
        assert Operations.seen == [], Operations.seen
    """)


def test_a_compilation_that_fails_in_the_inner_compiler_leaves_the_process_as_it_was() -> None:
    """Between our pass and the one that Inductor's attention patterns are in; the same graph is right afterwards, and
    another backend's is matched by them."""
    run("""
        import fusion
        from unittest import mock
        from torch._dynamo.utils import counters
        from torch._inductor.fx_passes import post_grad

        def attend(q, k, v):
            return torch.softmax(q @ k.transpose(-2, -1) / 4.0, -1) @ v

        given = [torch.randn(2, 2, 32, 16) for _ in range(3)]
        joint_graph.lazy_init()
        with mock.patch.object(post_grad, "remove_noop_ops", side_effect=ZeroDivisionError("put in")):
            before = state()
            try:
                with torch.no_grad():
                    torch.compile(attend, backend="fusion")(*given)
            except Exception as error:
                assert "put in" in str(error)
            else:
                raise AssertionError("it did not fail")
            same(before, state(), {"handled"})
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            found = torch.compile(attend)(*given)
        assert counters["inductor"]["fuse_attention"] == 1, counters["inductor"]
        assert torch.allclose(found, attend(*given), atol=1e-5)
    """)


def test_dynamo_hears_of_the_backend_when_it_is_asked_for() -> None:
    run("""
        call = torch._C._nn.scaled_dot_product_attention
        import fusion.backend
        handlers = TorchInGraphFunctionVariable._get_handlers()
        for use in (
            lambda: torch.compile(lambda x: x + 1, backend="fusion", options={"inner": "eager"})(torch.ones(2)),
            lambda: fusion.backend.fusion,
            lambda: fusion.explain(lambda x: x + 1, torch.ones(2)),
            lambda: fusion.verify(lambda x: x + 1, torch.ones(2), options={"inner": "eager"}),
        ):
            assert call not in handlers
            use()
            assert call in handlers
            del handlers[call]
            fusion.integrations.nested_tensors.register.cache_clear()
            torch._dynamo.reset()
    """)


MEMORY = """
import resource
import torch
import fusion.backend

def faults(count, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(size) for _ in range(count)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fusion.backend.fuse(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(1)], fusion.Options())
for count, size in ((20, 2 << 18), (5, 50 << 18)):
    print(faults(count, size), min(faults(count, size) for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize("setting", [{}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}], ids=["none", "the user's"])
def test_freed_memory_is_used_again(setting: dict[str, str]) -> None:
    """20 blocks of 2 MiB, then 5 of 50 MiB, are pages of the system's at the first call, and of the process at the next
    ones."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))
    }
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=environment | setting, capture_output=True, text=True, check=True)
    for first, later in (map(int, line.split()) for line in done.stdout.splitlines()):
        assert (later < first / 10) is not bool(setting)
