"""What holds for every test: fixed seeds, two threads at most, the same random cases, no state of Dynamo left over."""

import gc
import importlib.util
import logging
import os
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads of OpenMP that wait sleep: there are more of them than cores, and by default each takes its core from a thread
# that has work. It is read when torch is loaded, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# On AMX tiles oneDNN's bfloat16 products carry a NaN into the row beside it, so that eager's result is none to compare
# with (a row of weights that is NaN, times V with 70 keys).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# In each empty cache directory, of which tests make many, Inductor would compile a program per instruction set.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that Inductor starts to compile for GPUs

import hypothesis
import numpy
import pytest
import torch

torch.set_num_threads(min(2, os.cpu_count() or 1))
gc.disable()  # until all tests are imported, of which nothing is garbage

# pytest listens to loggers that do not propagate. Torch takes a listener to its structured log for TORCH_TRACE, and
# writes every graph, guard and kernel of every compilation as text.
torch._logging._internal.trace_log.propagate = True

# Compilation makes single examples slow and their times uneven, so there is no deadline. Examples are derived from the
# test itself (derandomize): the same checkout fails or passes everywhere. HYPOTHESIS_PROFILE=search looks for new ones.
_SLOW = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, max_examples=25, print_blob=True, suppress_health_check=_SLOW
)
hypothesis.settings.register_profile(
    "search", deadline=None, max_examples=500, print_blob=True, suppress_health_check=_SLOW
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))

WITHOUT_TORCH_MLIR = (
    "codegen/triton/",
    "fusion/planning/",
    "fusion/ir/test_derivative.py",
    "fusion/ir/test_integers.py",
    "fusion/test_machine.py",
    "fusion/test_plan.py",
    "test_gpu_benchmark.py",
    "test_numerics.py",
    "test_packaging.py",
)
"""Tests that need no kernel for CPU tensors."""

LONGEST = (
    "models/test_zoo.py",
    "ptx/test_kernels.py",
    "codegen/triton/test_backward.py",
    "codegen/triton/test_offline.py",
    "fuzz/test_fuzz.py",
    "codegen/test_aux_gradients.py",
    "fusion/test_training.py",
    "fusion/test_sequences.py",
    "fusion/test_dtensor.py",
    "properties/test_random_derivatives.py",
    "passes/test_find.py",
    "passes/test_pointwise.py",
    "passes/test_nested.py",
    "codegen/mlir/test_float16_tiles.py",
    "codegen/mlir/test_backward_parts.py",
    "codegen/mlir/test_centring.py",
    "codegen/mlir/test_dense_gradients.py",
    "codegen/triton/test_apart.py",
    "codegen/triton/test_tuned_kernels.py",
    "codegen/triton/test_flex.py",
    "codegen/cpu/test_export.py",
    "fuzz/test_guarded.py",
    "test_code_blocks.py",
    "fusion/test_tangents.py",
    "passes/test_aux_outputs.py",
    "peers/test_wrong_elsewhere.py",
    "integrations/test_page.py",
    "integrations/test_registering.py",
    "fusion/test_install.py",
    "test_gpu_benchmark.py",
    "models/test_training.py",
    "models/test_generate.py",
    "fusion/approximate/test_certified.py",
    "fusion/test_warm_start.py",
)
"""Files that take longest, which run first."""

OPTIMISED = (
    "codegen/cpu/",
    "codegen/mlir/test_aarch64.py",
    "codegen/mlir/test_kernel",
    "codegen/mlir/test_micro_kernel.py",
    "codegen/mlir/test_reproducible.py",
    "codegen/mlir/test_vectormath.py",
    "fusion/test_disk_cache.py",
    "fusion/test_warm_start.py",
    "fuzz/",
    "models/test_generate.py",
)
TEXTS = tuple(f"codegen/cpu/test_{name}.py" for name in ("backward_windows", "derived", "limits", "windows"))
"""Tests that run the CPU kernels that users get, but for those of TEXTS; so do tests that start processes, those marked
`optimised`, and all of them in the long set. In the others LLVM takes a kernel's instructions as they stand, in a third
of the time: what they test is the text."""

# What architecture tests found, by the run's title: the table at the end of the run. With several workers (-n) each
# hands its part over when it ends.
OUTCOMES = pytest.StashKey[dict[str, list]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx", metavar="TARGET", help="run tests/codegen/triton as PTX for sm_80, sm_89 or sm_90")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: the exhaustive part of a test, left out unless -m asks for it")
    config.addinivalue_line("markers", "one_in(n): the cases off every n-th diagonal of a test's grid are long")
    config.addinivalue_line("markers", "optimised: with CPU kernels as users get them")
    config.stash[OUTCOMES] = {}


def pytest_collection_finish() -> None:
    """What was imported by now lives on: looking through it for garbage took an eighth of all time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long set out unless -m says something, and start with the files that take longest: with several
    workers, the last one would keep the others waiting."""
    for item in items:
        if (mark := item.get_closest_marker("one_in")) and _diagonal(item) % mark.args[0]:
            item.add_marker(pytest.mark.long)
    if not config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    _skip_without_torch_mlir(items)
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_place(item), len(order)))


def _place(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


def _diagonal(item: pytest.Item) -> int:
    """Number of a case's diagonal in the grid of its test's parameters. Each value of an axis is on each n-th diagonal
    if another axis has n values or more."""
    return sum(_place_on_axis(item.callspec.params, *mark.args[:2]) for mark in item.iter_markers("parametrize"))


def _place_on_axis(params: dict[str, object], names: str | list[str], rows: Sequence) -> int:
    """Position of a case's values among those of one `parametrize`. (From pytest 9 on, `callspec.indices` is the number
    of the whole case instead.)"""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = (
        row.values if isinstance(row, type(pytest.param())) else [row] if len(names) == 1 else row for row in rows
    )
    return next(k for k, row in enumerate(values) if all(params[n] is x for n, x in zip(names, row, strict=True)))


def _skip_without_torch_mlir(items: list[pytest.Item]) -> None:
    """Without torch-mlir (which has no release for some platforms, and which a machine for GPU work may lack) there are
    no kernels for CPU tensors, and what is tested on them is skipped."""
    if importlib.util.find_spec("torch_mlir") is not None:
        return
    skip = pytest.mark.skip(reason="kernels for CPU tensors need torch-mlir")
    for item in items:
        if not _place(item).startswith(WITHOUT_TORCH_MLIR):
            item.add_marker(skip)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["outcomes"] = pickle.dumps(session.config.stash[OUTCOMES])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    for title, found in pickle.loads(getattr(node, "workeroutput", {}).get("outcomes", pickle.dumps({}))).items():
        node.config.stash[OUTCOMES].setdefault(title, []).extend(found)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if found := config.stash[OUTCOMES]:
        from tests.models.harness import table

        for title in found:
            terminalreporter.section(title)
            terminalreporter.write_line(table(found[title]))


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """CPU kernels as users get them, or not optimised by LLVM."""
    place, marked = _place(request.node), request.node.get_closest_marker("optimised")
    optimised = marked or place.startswith(OPTIMISED) and place not in TEXTS
    if request.config.option.markexpr or optimised or importlib.util.find_spec("torch_mlir") is None:
        yield
        return
    from tests.fuzz.quick import unoptimised

    with unoptimised():
        yield


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test draws the same random numbers whether it runs alone or after others, and compiles from nothing."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a stack trace for each device that may come
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        # It times the guards of all that it compiles, on emptied caches, for a metric that nothing here reads.
        dynamo.guards.profile_guard_manager = lambda *_: 0.0
        # Nor does anything read its metrics, for which it writes Inductor's settings as text at every compilation.
        dynamo.utils._scrubbed_inductor_config_for_logging = lambda: None
    if inductor := sys.modules.get("torch._inductor.config"):
        inductor.aot_inductor.precompile_headers = False  # they take longer than the few packages that are compiled
    yield


class _Defects(logging.Handler):
    """What the compiler says of its own defects."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "a defect of fusion" in record.getMessage():
            self.told.append(record.getMessage())


@pytest.fixture(autouse=True)
def _validation_finds_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """No attention of any test is refused by validation, but where faults are put into the compiler."""
    logger, handler = logging.getLogger("fusion"), _Defects()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if not _place(request.node).startswith(("fusion/validation/", "fusion/proof/", "fuzz/")):
        assert not handler.told


@pytest.fixture(autouse=True)
def _little_work_is_fused() -> Iterator[None]:
    """Tests train with few scores, and have one query over few keys, which by default is left to Inductor."""
    pays = importlib.import_module("fusion.planning.pays")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pays, "TRAINING", dict.fromkeys(pays.TRAINING, (0, 0)))
        patch.setattr(pays, "ONE_QUERY", 0)
        yield


@pytest.fixture(autouse=True)
def _products_stay_with_torchs_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which library computes a product follows from a measurement, on which no test depends."""
    if _place(request.node).startswith("fusion/linear/"):
        yield
        return
    speeds = importlib.import_module("fusion.linear.speeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds, "of_threads", lambda threads, dtype=None: speeds.UNKNOWN)
        yield
