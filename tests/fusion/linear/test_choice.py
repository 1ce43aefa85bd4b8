"""The choice between the libraries: by times that are measured, read from disk, or given."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import fusion
from fusion import linear
from fusion.caching import OncePerKey
from fusion.cli import main
from fusion.linear import packing, products, speeds
from fusion.linear.redirect import ProductsPass
from fusion.linear.speeds import ROWS, SIZES
from fusion.torch_private import devices
from fusion.torch_private.inductor import CustomGraphPass, config
from tests.fusion.linear.graphs import given
from tests.numerics import assert_runs_as_exact_as_eager

pytestmark = pytest.mark.skipif(bool(products.lacks()), reason=products.lacks() or "it is there")


class Layers(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def compiled(module, x, **options) -> tuple[list[str], int]:
    """The notes of a compilation, and how many products went to oneDNN in it."""
    counters["fusion"].clear()
    with fusion.collect_reports() as reports, torch.no_grad():
        run = torch.compile(module, backend="fusion", options=options)
        assert_runs_as_exact_as_eager(run, module, x)
    return [note for report in reports for note in report.notes if "oneDNN" in note], counters["fusion"]["products"]


def test_where_mkl_is_slow_many_rows_go_to_onednn() -> None:
    zen = given(200, 450)
    assert zen.onednn_pays(512, 384, 3072, 0) and zen.onednn_pays(197, 768, 768, 0)
    assert not zen.onednn_pays(1, 64, 64, 0) and not zen.onednn_pays(4, 128, 128, 0)
    assert not zen.onednn_pays(100000, 768, 4, 0), "too narrow to have been measured"
    assert not zen.onednn_pays(0, 768, 768, 0)


def test_where_mkl_is_as_fast_nothing_pays() -> None:
    for own in (300, 320):
        assert not given(300, own).ever_pays


def test_copies_count() -> None:
    zen = given(200, 450)
    assert zen.onednn_pays(16, 768, 768, 0) and not zen.onednn_pays(16, 768, 768, 768 * 768)


def test_times_between_and_beyond_what_was_measured() -> None:
    zen = given(200, 450, overhead=0)
    for m, k, n in ((1, 64, 64), (3, 100, 90), (256, 384, 1024), (5000, 768, 30000)):
        rate = 2 * m * k * n / zen.seconds(zen.mkl, m, k, n) / 1e9
        assert round(rate) == 200
    assert zen.seconds(zen.mkl, 1, 8, 8) == zen.seconds(zen.mkl, 1, 64, 64)


def test_the_report_says_what_went_where(set_speeds) -> None:
    set_speeds(given(200, 450, overhead=0))
    notes, count = compiled(Layers(), torch.randn(96, 256))
    assert notes == ["linear: 2 products by oneDNN (oneDNN 450 GFLOP/s, MKL 200)"] and count == 2
    torch._dynamo.reset()
    assert compiled(Layers(), torch.randn(96, 256)) == (notes, 2), "a graph from Inductor's cache is counted, too"


def test_nothing_changes_where_mkl_is_as_fast(set_speeds) -> None:
    set_speeds(given(400, 420, overhead=0))
    assert compiled(Layers(), torch.randn(96, 256)) == ([], 0)


def test_never(set_speeds) -> None:
    set_speeds(given(200, 450, overhead=0))
    assert compiled(Layers(), torch.randn(96, 256), linear="never") == ([], 0)


class Counting(CustomGraphPass):
    """A pass of somebody else."""

    def __init__(self) -> None:
        self.products = []

    def __call__(self, graph) -> None:
        self.products.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)))

    def uuid(self) -> None:
        return None


def test_passes_of_others_run_before(set_speeds) -> None:
    set_speeds(given(200, 450, overhead=0))
    theirs = Counting()
    with config.patch(post_grad_custom_pre_pass=theirs):
        assert compiled(Layers(), torch.randn(96, 256))[1] == 2
        assert config.post_grad_custom_pre_pass is theirs
    assert theirs.products == [2]


@pytest.mark.parametrize(
    "setting",
    ["freezing", pytest.param("cpp_wrapper", marks=pytest.mark.long)],  # 20 s of a C++ compiler
)
def test_settings_of_inductors(setting: str, set_speeds) -> None:
    """Weights that are constants of the graph, and code in C++."""
    set_speeds(given(200, 450, overhead=0))
    with config.patch({setting: True}):
        assert compiled(Layers().requires_grad_(False), torch.randn(96, 256))[1] == 2


@pytest.mark.parametrize("rows", [3, 96])
def test_frozen_weights_are_packed_for_the_faster_library(rows: int, set_speeds) -> None:
    """Where Inductor would pack them for MKL. With two or three rows MKL is more exact."""
    set_speeds(given(200, 450, overhead=0))
    module, x = Layers(1024).requires_grad_(False), torch.randn(rows, 1024)
    before = len(packing.packed)
    with config.patch(freezing=True):
        assert compiled(module, x)[1] == (0 if products.stays(rows) else 2)
    assert len(packing.packed) == before + (0 if products.stays(rows) else 2)


@pytest.mark.parametrize(("precision", "has_tf32"), [("bf16", False), ("tf32", True), ("tf32", False)])
def test_less_precision_is_asked_for(precision: str, has_tf32: bool, set_speeds, monkeypatch) -> None:
    """Where the processor has it, torch's own products have it; where it has no tf32, they are in float32."""
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: has_tf32)
    set_speeds(given(200, 450, overhead=0))
    torch.backends.mkldnn.matmul.fp32_precision, count = precision, int(precision == "tf32" and not has_tf32)
    try:
        assert compiled(Layers(), torch.randn(96, 256), linear="always")[1] == 2 * count
        assert redirected_products() == count
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert redirected_products() == 1


def redirected_products() -> int:
    """How many products of a graph with one the pass redirects."""
    graph = torch.fx.symbolic_trace(lambda x, w: torch.ops.aten.mm.default(x, w)).graph
    for node in graph.nodes:
        node.meta["val"] = torch.empty(64, 64)
    ProductsPass(always=True)(graph)
    return len(graph.find_nodes(op="call_function", target=torch.ops.fusion.linear.default))


def test_products_in_other_dtypes_stay() -> None:
    with torch.no_grad(), fusion.collect_reports() as reports:
        torch.compile(Layers().double(), backend="fusion", options={"linear": "always"})(
            torch.randn(96, 256, dtype=torch.float64)
        )
    assert not any("oneDNN" in note for report in reports for note in report.notes)


@pytest.mark.skipif(not devices.onednn_has(torch.bfloat16), reason="this processor has no bfloat16 in oneDNN")
def test_products_in_bfloat16_have_gelu_inside(set_speeds) -> None:
    """Others are oneDNN's already."""
    set_speeds(given(200, 450, overhead=0))
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).bfloat16()
    notes, count = compiled(module, torch.randn(96, 256, dtype=torch.bfloat16))
    assert count == 1 and notes[0].startswith("linear: 1 product by oneDNN, 1 with GELU inside")


def test_gelu_is_inside_where_that_is_faster() -> None:
    """Where Inductor reads the result in a pass of its own, that pass is there anyway."""
    zen = given(200, 450)
    assert zen.gelu_pays("none", False) and zen.gelu_pays("tanh", True)
    assert not replace(zen, sweep=3e-10).gelu_pays("none", True)
    assert not replace(zen, inside=(1, 1)).gelu_pays("tanh", False)
    assert zen.gelu_pays("tanh", False, turned=5) and not zen.gelu_pays("tanh", False, turned=7)


@pytest.mark.skipif(not devices.onednn_has(torch.bfloat16), reason="this processor has no bfloat16 in oneDNN")
@pytest.mark.parametrize(("rows", "inside"), [(512, 1), (64, 0), (0, 0)])
def test_few_rows_do_not_pay_for_a_weight_in_columns(rows: int, inside: int, set_speeds) -> None:
    """As GPT-2's are: with GELU inside oneDNN would copy the weight at every call."""
    set_speeds(given(200, 450, overhead=0))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.bias = (torch.nn.Parameter(torch.randn(*s)) for s in ((256, 512), (512,)))

        def forward(self, x):
            return torch.nn.functional.gelu(torch.addmm(self.bias, x, self.w))

    _, count = compiled(Layer().bfloat16(), torch.randn(rows, 256, dtype=torch.bfloat16))
    assert count == inside


def test_rows_that_are_dynamic_are_decided_at_every_call(set_speeds, monkeypatch) -> None:
    set_speeds(given(200, 450, overhead=1e-4))
    rows, product = [], products.product
    monkeypatch.setattr(products, "product", lambda x, w, *others: rows.append(len(x)) or product(x, w, *others))
    module = torch.nn.Linear(256, 1024)
    run = torch.compile(module, backend="fusion", dynamic=True)
    with torch.no_grad():
        for m in (300, 8, 200, 1, 0):
            assert_runs_as_exact_as_eager(run, module, torch.randn(m, 256))
    assert rows == [300, 200]


def test_graphs_without_a_matrix_are_not_measured(monkeypatch) -> None:
    monkeypatch.setattr(speeds, "of_threads", None)
    with torch.no_grad():
        torch.compile(lambda x: x.sin() + 1, backend="fusion")(torch.randn(7, 5))


def test_a_torch_without_the_operator(monkeypatch, caplog) -> None:
    monkeypatch.setattr(products, "lacks", lambda: "this torch has none")
    linear._say_once.cache_clear()
    with caplog.at_level("INFO", logger="fusion"):
        for _ in range(2):
            torch._dynamo.reset()
            assert compiled(Layers(), torch.randn(96, 256), linear="always") == ([], 0)
    assert [r.getMessage() for r in caplog.records if "this torch has none" in r.getMessage()] == [
        "products stay with torch's library: this torch has none"
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(speeds, "known", OncePerKey())
    return tmp_path / "fusion"


def test_a_measurement_is_kept(folder: Path, monkeypatch) -> None:
    found = given(200, 450)
    monkeypatch.setattr(speeds, "measured", lambda seconds, dtype: found)
    threads = torch.get_num_threads()
    assert speeds.of_threads(threads) is found
    monkeypatch.setattr(speeds, "known", OncePerKey())
    monkeypatch.setattr(speeds, "measured", None)
    assert speeds.of_threads(threads) == found, "read, not measured again"
    assert len(list(folder.glob("products_*.json"))) == 1
    monkeypatch.setattr(speeds, "measured", lambda seconds, dtype: replace(found, threads=threads + 1))
    assert speeds.of_threads(threads + 1).threads == threads + 1, "of another number of threads"


def test_a_machine_that_is_busy(folder: Path, monkeypatch) -> None:
    """Runs on a clock that counts other programs never look alike: one thread is measured by its processor time."""
    threads, now, step = torch.get_num_threads(), 0.0, 1e-3

    def clock() -> float:
        nonlocal now, step
        now, step = now + step, 1.5 * step
        return now

    monkeypatch.setattr(time, "perf_counter", clock)
    measured = speeds.of_threads(threads)
    monkeypatch.undo()
    assert measured.threads == 1 and str(measured).endswith(", measured with one thread")
    assert len(measured.mkl) == len(measured.onednn) == len(ROWS) * len(SIZES)
    assert 0 < min(*measured.mkl, *measured.onednn, measured.copy) and max(*measured.mkl, *measured.onednn) < 1
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processor_time_is_taken_as_it_is(dtype: torch.dtype, monkeypatch) -> None:
    """Also where no two runs look alike: what is measured is stored, so that no process goes without."""
    monkeypatch.setattr(speeds, "_settled", lambda times: False)
    assert speeds.measured(0.01, dtype) is None
    assert (measured := speeds.measured(0.01, dtype, alone=True)) is not None
    assert len(measured.mkl) == (len(ROWS) * len(SIZES) if dtype is torch.float32 else 0)


def test_doctor_shows_it(set_speeds, capsys) -> None:
    set_speeds(given(200, 450, overhead=0))
    main(["doctor"])
    assert "oneDNN 450 GFLOP/s, MKL 200" in capsys.readouterr().out
