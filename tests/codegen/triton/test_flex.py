"""FlexAttention on FlashAttention-4 in place of our own kernel: what it is told, and when autotune takes it."""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

pytest.importorskip("triton", reason="kernels need triton")

from fusion.codegen.reference.forward import Execution
from fusion.codegen.triton import flex, launch, peers
from fusion.codegen.triton.autotune import Tuner
from fusion.codegen.triton.flex import POSITIONS, Flex, modification
from fusion.codegen.triton.launch import Kernel
from fusion.ir import AttentionSpec, MaskFacts, Normalizer, integers
from fusion.ir.expr import SCORE, I, J, const, size
from fusion.ir.mask_facts import LARGEST
from fusion.ir.ops import apply, where
from tests.codegen.mlir.cases import CAUSAL, FMIN, INF, PROGRAMS, Case, assert_as_exact_as_eager, case, draw, eager
from tests.codegen.triton.test_peers import prefers_peers
from tests.numerics import assert_as_exact_as_eager as assert_exact

LONG = functools.partial(pytest.param, marks=pytest.mark.long)

SHAPE = {"B": 2, "H": 2, "Nq": 40, "Nk": 50}
CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own reference, which computes all scores."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compiled", lambda method, name: method)


def run(c: Case, operands: list[torch.Tensor], sizes: list[int], made: Flex | None = None) -> torch.Tensor:
    """What FlexAttention gives, in float64."""
    made = made or Flex(c.spec, torch.float64)
    out = torch.full((*operands[0].shape[:3], operands[2].shape[3]), math.nan, dtype=torch.float64)
    made(operands[:3], out, operands, sizes)
    return out


def widened(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.double() if x.is_floating_point() else x for x in operands]


def assert_same(c: Case, operands: list[torch.Tensor], sizes: list[int], got: torch.Tensor) -> None:
    exact = Execution(c.spec, operands, sizes, torch.float64)
    assert_exact(
        got, eager(c, operands, torch.float64), exact.results(0, exact.n_q, *exact.gathered())[0], torch.float64
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("normalizer", [Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_flex_is_told_is_what_the_spec_says(name: str, normalizer: Normalizer, uncompiled) -> None:
    torch.manual_seed(0)
    c = case(name, d=16, d_v=24, group=2, normalizer=normalizer)
    operands, sizes = draw(c, SHAPE, "heads_inside")
    operands = widened(operands)
    if c.program.operands and operands[3].dtype is torch.bool and operands[3].shape[-1] == 50:
        operands[3][0] = False  # rows without a live key
    assert_same(c, operands, sizes, run(c, operands, sizes))


def with_mask(name: str, fill: float, full=None) -> AttentionSpec:
    spec = case(name, d=16).spec
    return replace(spec, score=where(CAUSAL, SCORE, const(fill)), mask=MaskFacts(live=CAUSAL, fill=fill, full=full))


def test_masks_are_skipped_where_dead_keys_have_no_weight() -> None:
    said = {name: flex.words(case(name, d=16).spec) for name in PROGRAMS}
    assert {name for name, each in said.items() if each.live is not None} == {"causal", "left_padded_inf", "alibi"}
    assert all(said[name].live is CAUSAL for name in ("causal", "alibi"))
    assert flex.words(with_mask("causal", FMIN)).live is None
    assert flex.words(with_mask("causal", FMIN, full=SCORE)).live is CAUSAL, "each row has key 0"
    negated = where(apply("not", CAUSAL), const(-INF), apply("tanh", SCORE))
    found = flex.words(replace(case("causal", d=16).spec, score=negated))
    assert found.score is apply("tanh", SCORE), "no mask in the program"


@pytest.mark.parametrize(
    ("score", "scale", "program"),
    [
        (SCORE, 1.0, SCORE),
        (SCORE * 0.5 / 4.0, 0.125, SCORE),
        (apply("tanh", SCORE * 0.5), 0.5, apply("tanh", SCORE)),
        (SCORE * -0.5, 1.0, SCORE * -0.5),
        (SCORE * 0.5 + apply("abs", SCORE), 1.0, SCORE * 0.5 + apply("abs", SCORE)),
    ],
)
def test_the_factor_of_scores_is_not_part_of_the_program(score, scale, program) -> None:
    found = flex.words(replace(case("plain", d=16).spec, score=score))
    assert (found.scale, found.score) == (scale, program)


def test_finite_scores_stay_finite_in_powers_of_two() -> None:
    made = Flex(case("padding", d=16).spec)
    [dead] = [torch.zeros(1, 50, dtype=torch.bool)]
    positions = [torch.tensor(0) for _ in POSITIONS]
    change = made.score_mod([dead])
    assert change is not None
    found = change(torch.tensor(3.0), *positions)
    assert -LARGEST < found * math.log2(math.e) and found < FMIN / 4
    bias = Flex(case("bias", d=16).spec).score_mod([torch.tensor([[[-INF, FMIN, 2.0]]])])
    assert bias is not None
    at = [bias(torch.tensor(1.0), *positions[:3], torch.tensor(j)) for j in range(3)]
    assert at[0] == -INF and math.isfinite(at[1] * math.log2(math.e)) and at[2] == 3.0


def test_integers_take_as_many_bits_as_they_need() -> None:
    n = size("N")
    for factor, kind in ((2**26, torch.int64), (2, torch.int32)):
        made = modification(apply("ile", integers.mul(I, factor), integers.add(J, n)), POSITIONS, torch.float32)
        i, j = torch.tensor(64, dtype=torch.int32), torch.tensor(5, dtype=torch.int32)
        assert made.function(i, i, i, j, torch.tensor(3)) == (64 * factor <= 8)
        casts = {node.args[1] for node in made.function.graph.nodes if node.target == "to"}
        assert casts == {kind}


def test_masks_of_positions_are_kept_and_others_are_not(uncompiled, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[torch_flex.BlockMask] = []
    create = torch_flex.create_block_mask
    monkeypatch.setattr(torch_flex, "create_block_mask", lambda *args: masks.append(create(*args)) or masks[-1])
    for name, counts in (("causal", [1, 1, 2, 2]), ("left_padded_inf", [1, 2, 3, 4])):
        masks.clear()
        c = case(name, d=16)
        made = Flex(c.spec, torch.float64)
        found = []
        for n in (300, 300, 200, 300):
            operands, sizes = draw(c, SHAPE | {"Nq": n, "Nk": n})
            operands = widened(operands)
            assert_same(c, operands, sizes, run(c, operands, sizes, made))
            found.append(len(masks))
        assert found == counts
        visited = masks[0].kv_num_blocks + masks[0].full_kv_num_blocks
        assert visited.shape == (1 if name == "causal" else 2, 1, 3), "of each batch where that has masks of its own"
        assert visited.le(torch.tensor([1, 2, 3])).all()


@pytest.mark.parametrize("name", ["causal_last_key", *map(LONG, ("alibi", "left_padded_inf", "bucket_table"))])
@torch._dynamo.config.patch(recompile_limit=2)
def test_torch_compiles_it_as_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, for other sizes once more, whatever was compiled for other specs."""
    graphs: list[int] = []

    def count(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    torch._dynamo.reset()
    for normalizer in (Normalizer.SOFTMAX, Normalizer.SAFE_SOFTMAX):
        c, of_each = case(name, d=16, normalizer=normalizer), []
        made = Flex(c.spec, torch.float64)
        for n in (130, 150, 170):
            operands, sizes = draw(c, SHAPE | {"Nq": n, "Nk": n})
            operands = widened(operands)
            assert_same(c, operands, sizes, run(c, operands, sizes, made))
            of_each.append(len(graphs))
            graphs.clear()
        assert of_each[0] and of_each[1] == of_each[0] and of_each[2] == 0


class Properties:
    """A device that has the kernels, as far as one can see."""

    capability = (9, 0)

    def __init__(self, patch: pytest.MonkeyPatch):
        patch.setattr(flex, "installed", lambda: "4.0.0")
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: self.capability)


def test_which_devices_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, there, device = case("alibi", "bfloat16").spec, Properties(monkeypatch), torch.device("cuda")
    assert flex.runs(spec, device) and flex.runs(case("plain", "float16", d=128).spec, device)
    assert not flex.runs(spec, CPU)
    assert not flex.runs(case("alibi").spec, device), "float32"
    assert not flex.runs(case("alibi", "bfloat16", d=36).spec, device)
    assert not flex.runs(case("alibi", "bfloat16", d=512).spec, device)
    assert not flex.runs(case("alibi", "bfloat16", d=64, d_v=264).spec, device)
    assert not flex.runs(replace(spec, d=size("D")), device)
    for capability, has in (((8, 0), False), ((10, 3), True), ((12, 0), False)):
        there.capability = capability
        assert flex.runs(spec, device) == has
    there.capability = (9, 0)
    with monkeypatch.context() as patch:
        patch.delattr(torch_flex, "FlexKernelOptions")
        assert not flex.runs(spec, device), "an older torch"
    monkeypatch.setattr(flex, "installed", lambda: "")
    assert not flex.runs(spec, device)


def test_whether_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("flash_attn was built for another torch")

    for find, version in ((lambda name: None, ""), (broken, ""), (lambda name: name, "unknown")):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        flex.installed.cache_clear()
        assert flex.installed() == version
    flex.installed.cache_clear()


REFUSED = {
    "weight": {"weight": True},
    "sinks": {"sinks": True},
    "off_by_one": {"off_by_one": True},
    "zero_softmax": {"normalizer": Normalizer.ZERO_SOFTMAX},
    "none": {"normalizer": Normalizer.NONE},
    "out_dtype": {"out_dtype": "bfloat16"},
}


@pytest.fixture
def there(uncompiled, own_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels, beside one tile."""
    monkeypatch.setattr(launch, "candidates", lambda kernel, spec, extents, tile, machine: [tile])
    monkeypatch.setattr(flex, "runs", lambda spec, device: True)
    monkeypatch.setattr(peers, "PEERS", {"flex flash": peers.PEERS["flex flash"]})
    flex._of_spec.cache_clear()


@pytest.mark.parametrize("name", REFUSED)
def test_other_specs_are_not_flex_s(name: str, there) -> None:
    assert list(peers.calls(case("alibi", d=16).spec, CPU)) == ["flex flash"]
    assert not peers.calls(case("alibi", d=16, **REFUSED[name]).spec, CPU)


def test_reads_that_are_no_views_are_not_flex_s(there) -> None:
    spec = case("plain", d=16).spec
    assert not peers.calls(replace(spec, k=(*spec.k[:2], integers.floordiv(J, 2), spec.k[3])), CPU)
    assert not peers.calls(replace(spec, batch=spec.batch[:1]), CPU)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("name", ["alibi", "documents", "soft_cap"])
def test_it_is_called_where_it_is_faster(name: str, faster: bool, there, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(name, d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=prefers_peers if faster else lambda run, device: 1.0))
    for _ in range(2):
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert kernel.choice(sizes).measured and kernel.choice(sizes).peer == ("flex flash" if faster else "")
    assert ("flex flash, measured to be faster than tiles of" in kernel.source(sizes)) == faster
    assert Kernel(c.spec, tuner=Tuner()).choice(sizes).peer == kernel.choice(sizes).peer, "remembered"
    with monkeypatch.context() as patch:
        patch.setattr(flex, "runs", lambda spec, device: False)
        assert Kernel(c.spec, tuner=Tuner()).choice(sizes).peer == "", "no longer there"
    monkeypatch.setattr(flex, "installed", lambda: "5.0.0")
    assert not Kernel(c.spec, tuner=Tuner()).choice(sizes).measured, "another version"


def test_it_is_not_called_where_it_is_less_exact(there, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_flex.flex_attention
    monkeypatch.setattr(torch_flex, "flex_attention", lambda *args, **kwargs: real(*args, **kwargs) * 1.01)
    c = case("soft_cap", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=prefers_peers))
    got = kernel(operands, sizes)
    assert_as_exact_as_eager(got, c, operands)
    assert kernel.choice(sizes).measured and kernel.choice(sizes).peer == ""


def test_tensors_that_it_refuses_are_ours_from_then_on(there, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("soft_cap", d=16)
    operands, sizes = draw(c, SHAPE)
    kernel = Kernel(c.spec, tuner=Tuner(clock=prefers_peers))
    kernel(operands, sizes)
    calls: list[int] = []

    def refuse(*args, **kwargs):
        calls.append(1)
        raise NotImplementedError("UNSUPPORTED CUTEDSL OPERATION")

    monkeypatch.setattr(torch_flex, "flex_attention", refuse)
    for _ in range(2):
        assert_as_exact_as_eager(kernel(operands, sizes), c, operands)
    assert len(calls) == 1, "another call does not compile once more"
