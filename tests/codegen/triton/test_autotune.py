"""Which tile a GPU kernel runs in: the table's, a smaller one where that does not fit, the fastest where measured.

Nothing is timed: clocks are injected, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from triton.runtime.errors import OutOfResources, PTXASError

from fusion import caching
from fusion.codegen import reference
from fusion.codegen.triton import autotune
from fusion.codegen.triton.autotune import Stage, Tuner, call_of
from fusion.ir.request import Request
from fusion.options import Options
from fusion.planning.choice import Tile
from fusion.runtime.kernels import kernel_of
from tests.codegen.mlir.cases import case
from tests.numerics import assert_runs_as_exact_as_eager

REFUSAL = OutOfResources(300_000, 232_448, "shared memory")


pytestmark = pytest.mark.usefixtures("own_cache")


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
        autotune.run([self.stage], call, tuner, lambda: None, lambda: pytest.fail("nobody else measures"))
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
    kernels.failing = {OTHERS[0]: PTXASError("ptxas met an internal error"), OTHERS[1]: REFUSAL}
    assert kernels.run(Tuner(clock=kernels.clock))[-1] == OTHERS[2]
    (path,) = own_cache.glob("tiles_*.json")
    content = json.loads(path.read_text())
    (choice,) = content["choices"].values()
    assert [entry["tile"] for entry in choice["measured"]] == [str(tile) for tile in (OTHERS[2], TABLE, OTHERS[3])]
    assert [text.split(":")[0] for text in choice["failed"].values()] == ["PTXASError", "OutOfResources"]
    assert content["device"] == "cpu" and content["triton"] and set(choice["failed"]) == set(map(str, OTHERS[:2]))


def test_where_nothing_can_be_timed_the_largest_that_fits_is_taken() -> None:
    kernels = Kernels()
    kernels.failing = dict.fromkeys([TABLE, *OTHERS], REFUSAL)
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
    monkeypatch.setattr(caching, "directory", lambda: own_cache / "missing")
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


# -- the option --------------------------------------------------------------------------------------------------------


def test_the_option_and_the_mode() -> None:
    given = {"strict": True}
    assert Options.parse(given, "max-autotune").autotune and given == {"strict": True}
    assert Options.parse(None, "max-autotune-no-cudagraphs").autotune
    assert not Options.parse({"autotune": False}, "max-autotune").autotune
    assert not Options.parse(None, "reduce-overhead").autotune and not Options.parse(None).autotune


@pytest.mark.parametrize("given", [{"options": {"autotune": True}}, {"mode": "max-autotune"}])
def test_the_op_carries_it(given: dict, monkeypatch, emits) -> None:
    from fusion import inner_compiler as inner

    graphs = []
    monkeypatch.setattr(inner, "compile_rest", lambda graph, *_: graphs.append(graph) or graph.forward)
    emits(reference.ReferenceKernel)
    torch._dynamo.reset()
    inputs, sdpa = torch.randn(3, 1, 2, 8, 16).unbind(), torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        assert_runs_as_exact_as_eager(torch.compile(sdpa, backend="fusion", **given), sdpa, *inputs)
    calls = [n for g in graphs for n in g.graph.nodes if n.target is torch.ops.fusion.attention.default]
    assert calls and all(call.args[3] == "auto/tuned" for call in calls)


@pytest.mark.parametrize("trained", [False, True])
def test_gpu_kernels_are_tuned_where_it_is_asked_for(trained: bool) -> None:
    spec = case("plain").spec
    tuned, plain = (kernel_of(spec, "cpu", Request(tuned=tuned), trained) for tuned in (True, False))
    assert tuned.tuner is not None and plain.tuner is None
    if trained:
        assert tuned.tuner is tuned.kernel.tuner
