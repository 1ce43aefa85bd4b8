"""Which tile a GPU kernel runs in: the table's, a smaller one where that does not fit, the fastest where measured.

Nothing is timed: clocks are injected, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from triton.runtime.errors import OutOfResources, PTXASError

from fusion import runtime
from fusion.codegen import reference
from fusion.codegen.triton import autotune, module
from fusion.codegen.triton.autotune import Stage, Tuner, call_of
from fusion.codegen.triton.differentiable import Differentiable
from fusion.codegen.triton.launch import Kernel, Variant
from fusion.codegen.triton.tiles import Choice, Tile
from fusion.options import Options
from tests.codegen.mlir.cases import case, draw

SHAPE = {"B": 1, "H": 1, "Nq": 20, "Nk": 20}
REFUSALS = [
    OutOfResources(300_000, 232_448, "shared memory"),
    PTXASError("ptxas error: Entry function 'attention_forward' uses too much shared data"),
    RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tile]]:
    """The kernels that were launched, with their tiles."""
    seen: list[tuple[str, Tile]] = []
    real = Variant.launch

    def launch(self, name: str, programs: int, tile: Tile, *rest) -> None:
        seen.append((name, tile))
        real(self, name, programs, tile, *rest)

    monkeypatch.setattr(Variant, "launch", launch)
    return seen


class Clock:
    """Seconds of the last launch, by kernel and tile."""

    def __init__(self, launched: list[tuple[str, Tile]], seconds: Callable[[str, Tile], float]):
        self.launched, self.seconds, self.calls = launched, seconds, 0

    def __call__(self, launch: Callable[[], None], device: torch.device) -> float:
        self.calls += 1
        return self.seconds(*self.launched[-1])


def prefers(rows: int, keys: int) -> Callable[[str, Tile], float]:
    return lambda name, tile: 1.0 + abs(math.log2(tile.rows / rows)) + abs(math.log2(tile.keys / keys))


def exact(spec, operands, sizes) -> torch.Tensor:
    return reference.run(spec, [o.double() for o in operands], sizes, torch.float64)


# -- measuring, with launches that do nothing --------------------------------------------------------------------------

TABLE = Tile(rows=128, keys=64, warps=8, stages=3)
OTHERS = [replace(TABLE, rows=64), replace(TABLE, keys=32), replace(TABLE, keys=128), replace(TABLE, stages=2)]
CPU = torch.device("cpu")
CALL = autotune.Call(device=CPU, sizes=(4096,), situation="heads <= 16")


class Kernels:
    """A stage whose launches are noted, and a clock for them."""

    def __init__(self, seconds: Callable[[Tile], float] = lambda tile: 1.0, digest: str = "0"):
        self.launches: list[Tile] = []
        self.seconds, self.calls, self.failing = seconds, 0, {}
        variant = SimpleNamespace(digest=digest, reduced={})
        self.stage = Stage(kernel="kernel", variant=variant, tile=TABLE, launch=self.launch, others=lambda: OTHERS)  # type: ignore[arg-type]

    def launch(self, tile: Tile) -> None:
        self.launches.append(tile)
        if tile in self.failing:
            raise self.failing[tile]

    def clock(self, launch: Callable[[], None], device: torch.device) -> float:
        self.calls += 1
        launch()
        return self.seconds(self.launches[-1])

    def run(self, tuner: Tuner | None, call: autotune.Call = CALL) -> list[Tile]:
        """The launches of one call."""
        self.launches.clear()
        autotune.run([self.stage], call, tuner, lambda: None)
        return list(self.launches)


def best(tile: Tile) -> Callable[[Tile], float]:
    return lambda other: 0.5 if other == tile else 1.0


def test_the_fastest_is_taken_and_remembered() -> None:
    kernels = Kernels(best(OTHERS[2]))
    tuner = Tuner(clock=kernels.clock)
    first = kernels.run(tuner)
    assert first == [t for tile in [TABLE, *OTHERS] for t in (tile, tile)] + [OTHERS[2]]
    assert kernels.run(tuner) == [OTHERS[2]]
    assert kernels.run(tuner, replace(CALL, situation="heads <= 32"))[-1] == OTHERS[2]
    assert kernels.calls == 10, "another situation is measured anew"

    again = Kernels(best(TABLE))
    assert again.run(Tuner(clock=again.clock)) == [OTHERS[2]], "another tuner, or process, reads the file"
    assert again.run(Tuner()) == [OTHERS[2]], "which needs no clock"
    assert again.run(None) == [TABLE], "without a tuner it is the table's"
    assert again.calls == 0

    other = Kernels(best(OTHERS[0]), digest="1")
    assert other.run(Tuner(clock=other.clock))[-1] == OTHERS[0], "another module has choices of its own"


def test_the_file_says_what_was_measured(own_cache) -> None:
    kernels = Kernels(best(OTHERS[2]))
    kernels.failing = {OTHERS[0]: PTXASError("ptxas met an internal error"), OTHERS[1]: REFUSALS[0]}
    assert kernels.run(Tuner(clock=kernels.clock))[-1] == OTHERS[2]
    (path,) = own_cache.glob("tiles_*.json")
    content = json.loads(path.read_text())
    (choice,) = content["choices"].values()
    assert [entry["tile"] for entry in choice["measured"]] == [str(tile) for tile in (OTHERS[2], TABLE, OTHERS[3])]
    assert [text.split(":")[0] for text in choice["failed"].values()] == ["PTXASError", "OutOfResources"]
    assert content["device"] == "cpu" and content["triton"] and set(choice["failed"]) == set(map(str, OTHERS[:2]))


def test_where_nothing_can_be_timed_the_largest_that_fits_is_taken() -> None:
    kernels = Kernels()
    kernels.failing = dict.fromkeys([TABLE, *OTHERS], REFUSALS[0])
    assert kernels.run(Tuner(clock=kernels.clock))[-1] == replace(TABLE, stages=1)
    assert kernels.run(Tuner()) == [replace(TABLE, stages=1)]


DAMAGES: dict[str, Callable[[dict, dict], object]] = {
    "empty": lambda content, choice: "",
    "half": lambda content, choice: json.dumps(content)[:-9],
    "list": lambda content, choice: [],
    "number": lambda content, choice: content | {"choices": 1},
    "module": lambda content, choice: content | {"module": "2"},
    "version": lambda content, choice: content | {"triton": "1.0"},
    "format": lambda content, choice: content | {"format": 0},
    "no tile": lambda content, choice: choice.pop("tile") and content,
    "field": lambda content, choice: choice["tile"].pop("stages") and content,
    "odd": lambda content, choice: choice["tile"].update(rows=24) or content,
    "text": lambda content, choice: choice["tile"].update(rows="32") or content,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_damaged_or_of_something_else_are_ignored(damage: str, own_cache) -> None:
    kernels = Kernels(best(OTHERS[2]))
    kernels.run(Tuner(clock=kernels.clock))
    (path,) = own_cache.glob("tiles_*.json")
    content = json.loads(path.read_text())
    (choice,) = content["choices"].values()
    made = DAMAGES[damage](content, choice)
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    kernels.seconds = best(OTHERS[0])
    assert kernels.run(Tuner(clock=kernels.clock))[-1] == OTHERS[0]
    assert kernels.run(Tuner()) == [OTHERS[0]], "and replaced"


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, own_cache) -> None:
    kernels = Kernels(best(OTHERS[2]))
    monkeypatch.setattr(module, "directory", lambda: own_cache / "missing")
    tuner = Tuner(clock=kernels.clock)
    kernels.run(tuner)
    assert kernels.run(tuner) == [OTHERS[2]]


def test_a_tile_takes_the_place_of_the_table_s_only_if_it_is_faster_by_more_than_noise() -> None:
    kernels = Kernels(lambda tile: 1.0 if tile == TABLE else 0.99)
    assert kernels.run(Tuner(clock=kernels.clock))[-1] == TABLE


def test_only_some_calls_are_measured(monkeypatch, own_cache) -> None:
    kernels = Kernels(best(OTHERS[2]))
    assert kernels.run(Tuner()) == [TABLE], "not on a CPU without a clock"
    tuner = Tuner(clock=kernels.clock)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.run(tuner) == [TABLE], "not where results may not depend on a clock"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not list(own_cache.iterdir())
    call = replace(CALL, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tuner.measures(call), "not while a graph is captured"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner.measures(call)
    assert kernels.run(tuner)[-1] == OTHERS[2]


def test_the_model_says_which_are_measured(monkeypatch) -> None:
    monkeypatch.setattr(autotune, "MEASURED", 3)
    kernels, asked = Kernels(), []
    others = [*OTHERS, *(replace(tile, warps=4) for tile in OTHERS)]
    kernels.stage = replace(kernels.stage, others=lambda: others)

    def times(kernel: str, sizes, tiles) -> list[float]:
        asked.append((kernel, sizes, list(tiles)))
        return [-float(tile.keys) + tile.stages for tile in tiles]

    kernels.run(Tuner(times, kernels.clock))
    assert asked == [("kernel", (4096,), others)]
    assert list(dict.fromkeys(kernels.launches)) == [TABLE, OTHERS[2], OTHERS[3]]
    monkeypatch.setattr(autotune, "MEASURED", 99)
    met = kernels.run(Tuner(times, kernels.clock), replace(CALL, situation="heads <= 32"))
    sizes = [OTHERS[2], OTHERS[3], OTHERS[0], others[-1], OTHERS[1]]
    assert list(dict.fromkeys(met)) == [TABLE, *sizes], "one tile of each other size, the nearest"


def test_situations() -> None:
    def situation(operands, extents=(12, 300, 512), precision="ieee") -> str:
        return call_of(operands, (), extents, precision, Tuner()).situation

    q = torch.empty(4, 300, 64)
    assert situation([q]) == "heads <= 16, n_q <= 512, n_k <= 512, aligned, ieee"
    assert situation([q]) == situation([q], (16, 500, 257)) != situation([q], (17, 500, 257))
    assert situation([q]) != situation([q.flatten()[1:]]) and situation([q]) != situation([q[..., :63].contiguous()])
    assert situation([q]) != situation([q], precision="tf32")


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_a_kernel_runs_in_the_fastest_tile(launched) -> None:
    c = case("alibi", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=Clock(launched, prefers(16, 32))))
    assert kernel.tile_of(sizes) == (32, 16) and not kernel.choice_of(sizes).measured
    right = exact(c.spec, operands, sizes).double()
    for _ in range(2):
        torch.testing.assert_close(kernel(operands, sizes).double(), right, atol=1e-5, rtol=1e-5)
    assert [(tile.rows, tile.keys) for _, tile in launched[-2:]] == [(16, 32)] * 2
    assert kernel.choice_of(sizes) == Choice(tile=launched[-1][1], keys=sizes[-1], measured=True)
    launched.clear()
    another = Kernel(c.spec, tuner=Tuner())
    another(operands, sizes)
    assert [(tile.rows, tile.keys) for _, tile in launched] == [(16, 32)]
    assert another.tile_of(sizes) == (16, 32)
    assert Kernel(c.spec).tile_of(sizes) == (32, 16)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bias", "bucket_table"])
def test_gradients_are_right_while_measuring_and_after(name: str, launched) -> None:
    """Gradients of captured tensors are added up: those that were added while measuring must be gone."""
    c = case(name, d=16)
    spec = c.spec
    operands, sizes = draw(c, SHAPE)
    needs_ = tuple(o.is_floating_point() for o in operands)
    clock = Clock(launched, prefers(16, 16))
    run = Differentiable(spec, tuner=Tuner(clock=clock))
    alone = Differentiable(spec, Tile(rows=16, keys=16, warps=4, stages=1))
    for turn in range(2):
        out, statistics = run.forward(operands, sizes)
        grad = torch.randn(out.shape)
        before = clock.calls
        got = run.backward(grad, out, statistics, operands, sizes, needs_)
        assert (clock.calls > before) == (turn == 0)
        seen = list(launched)
        for ours, theirs in zip(got, alone.backward(grad, out, statistics, operands, sizes, needs_), strict=True):
            assert torch.equal(ours, theirs)
        launched[:] = seen
    last = dict(launched)
    for kernel in ("attention_backward_queries", "attention_backward_keys"):
        assert (last[kernel].rows, last[kernel].keys) == (16, 16)


def packed(q, k, v, numbers):
    keep = numbers[:, None, :, None] == numbers[:, None, None, :]
    return torch.softmax((q @ k.mT).masked_fill(~keep, -1e30), -1) @ v


def test_lists_of_tiles_follow_the_tile(launched, monkeypatch) -> None:
    inputs = [torch.randn(1, 1, 40, 16) for _ in range(3)]
    numbers = torch.arange(40).div(20, rounding_mode="floor")[None]
    made: list[Differentiable] = []
    seconds = {"attention_backward_keys": prefers(16, 32)}

    def differentiable(spec, device):
        clock = Clock(launched, lambda name, tile: seconds.get(name, prefers(32, 16))(name, tile))
        made.append(Differentiable(spec, tuner=Tuner(clock=clock)))
        return made[-1]

    monkeypatch.setattr(runtime, "_compile_training", differentiable)
    monkeypatch.setattr(runtime, "_compile", lambda spec, device: Kernel(spec))
    monkeypatch.setattr(runtime, "unsupported", lambda spec, device: None)
    monkeypatch.setattr(runtime, "_differentiables", {})
    monkeypatch.setattr(runtime, "_executors", {})
    torch._dynamo.reset()
    options = {"inner": "eager", "strict": True, "tile_maps": "always"}
    compiled = torch.compile(packed, backend="fusion", options=options)
    for _ in range(2):
        ours, eager = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
        launched.clear()
        weight = torch.randn(1, 1, 40, 16)
        (compiled(*ours, numbers) * weight).sum().backward()
        (packed(*eager, numbers) * weight).sum().backward()
        for mine, theirs in zip(ours, eager, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    assert made and not any(g.broken for g in runtime._differentiables.values())
    names = [name for name, _ in launched]
    assert names.count("attention_backward_prepare") == 1, names
    last = dict(launched)
    assert last["attention_backward_prepare"].rows == last["attention_backward_keys"].rows == 16
    assert last["attention_row_blocks"].rows == 16 and last["attention_row_blocks"].keys == 32


# -- tiles that do not fit ---------------------------------------------------------------------------------------------


@pytest.fixture
def limited(launched, monkeypatch) -> Callable[[Callable[[Tile], bool], Exception], None]:
    """Makes launches of tiles that do not fit raise."""
    real = Variant.launch

    def limit(room: Callable[[Tile], bool], error: Exception) -> None:
        def launch(self, name: str, programs: int, tile: Tile, *rest) -> None:
            if not room(tile):
                raise error
            real(self, name, programs, tile, *rest)

        monkeypatch.setattr(Variant, "launch", launch)

    return limit


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_smaller_tile_is_taken_where_one_does_not_fit(error: Exception, limited, launched, caplog) -> None:
    c = case("alibi", d=16)
    operands, sizes = draw(c, SHAPE)
    limited(lambda tile: tile.rows * tile.keys <= 256, error)
    kernel = Kernel(c.spec)
    with caplog.at_level(logging.INFO, "fusion"):
        for _ in range(2):
            got = kernel(operands, sizes).double()
    torch.testing.assert_close(got, exact(c.spec, operands, sizes).double(), atol=1e-5, rtol=1e-5)
    assert len([r for r in caplog.records if "does not fit" in r.message]) == 1
    assert {(tile.rows, tile.keys) for _, tile in launched} == {(16, 16)}


def test_gradients_in_smaller_tiles(limited, launched) -> None:
    c = case("bias", d=16)
    operands, sizes = draw(c, SHAPE)
    limited(lambda tile: tile.rows * tile.keys <= 256, REFUSALS[0])
    run = Differentiable(c.spec)
    out, statistics = run.forward(operands, sizes)
    grad = torch.randn(out.shape)
    needs_ = (True,) * len(operands)
    got = run.backward(grad, out, statistics, operands, sizes, needs_)
    true = reference.backward(c.spec, grad.double(), [o.double() for o in operands], sizes, needs_)
    for ours, best in zip(got, true, strict=True):
        torch.testing.assert_close(ours.double(), best, atol=1e-4, rtol=1e-4)
    assert {tile.rows * tile.keys for _, tile in launched} == {256}


def test_the_error_is_shown_where_nothing_fits_and_others_always(limited) -> None:
    c = case("plain", d=16)
    operands, sizes = draw(c, SHAPE)
    limited(lambda tile: False, REFUSALS[0])
    with pytest.raises(OutOfResources):
        Kernel(c.spec)(operands, sizes)
    limited(lambda tile: False, RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        Kernel(c.spec)(operands, sizes)


# -- the option --------------------------------------------------------------------------------------------------------


def test_the_option_and_the_mode() -> None:
    given = {"strict": True}
    assert Options.parse(given, "max-autotune").autotune and given == {"strict": True}
    assert Options.parse(None, "max-autotune-no-cudagraphs").autotune
    assert not Options.parse({"autotune": False}, "max-autotune").autotune
    assert not Options.parse(None, "reduce-overhead").autotune and not Options.parse(None).autotune


@pytest.mark.parametrize("given", [{"options": {"autotune": True}}, {"mode": "max-autotune"}])
def test_the_op_carries_it(given: dict, monkeypatch) -> None:
    from fusion import inner

    graphs = []
    monkeypatch.setattr(inner, "compile_rest", lambda graph, *_: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(runtime, "_compile", lambda spec, device: functools.partial(reference.run, spec))
    monkeypatch.setattr(runtime, "unsupported", lambda spec, device: None)
    monkeypatch.setattr(runtime, "_executors", {})
    torch._dynamo.reset()
    inputs = [*torch.randn(3, 1, 2, 8, 16).unbind(), torch.zeros(1, 8, dtype=torch.long)]
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(packed, backend="fusion", **given)(*inputs), packed(*inputs))
    calls = [n for g in graphs for n in g.graph.nodes if n.target is torch.ops.fusion.attention.default]
    assert calls and all(call.args[3] == "auto/tuned" for call in calls)


def test_only_gpu_kernels_are_tuned() -> None:
    spec = case("plain").spec.to_json()
    assert runtime.executor(spec, "cpu", "auto/tuned") is runtime.executor(spec, "cpu", "auto")
    assert runtime.differentiable(spec, "cpu", "auto/tuned") is runtime.differentiable(spec, "cpu", "auto")
    tuned = runtime._build(case("plain").spec, "cuda", "auto/tuned")
    assert isinstance(tuned, runtime.Guarded) and isinstance(tuned.kernel, Kernel) and tuned.kernel.tuner is not None
    plain = runtime._build(case("plain").spec, "cuda", "auto")
    assert isinstance(plain, runtime.Guarded) and plain.kernel.tuner is None
    trained = runtime._build_differentiable(spec, "cuda", "auto/tuned")
    assert isinstance(trained, runtime._GuardedTraining) and trained.kernel.tuner is trained.kernel.kernel.tuner
