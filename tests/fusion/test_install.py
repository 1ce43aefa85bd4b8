"""`fusion.install`: the rewrite as a pass of Inductor's gives what the backend gives, beside the passes of others."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.errors import OptionError
from tests.numerics import assert_as_exact_as_eager, assert_same


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    yield
    fusion.uninstall()
    assert config.pre_grad_custom_pass is None and config.joint_custom_pre_pass is None
    assert config.pre_grad_pass_timing == "default"


def attend(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def tensors(gradients: bool = True) -> list[torch.Tensor]:
    return [torch.randn(2, 2, 20, 16, requires_grad=gradients) for _ in range(3)]


def dropped(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT, -1), 0.5) @ v


def checkpointed(q, k, v):
    return checkpoint(dropped, q, k, v, use_reentrant=False)


def in_half(q, k, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attend(q, k, v)


def beside_one_that_is_not_fused(q, k, v):
    """Weights that are returned stay what they were; the constant stands in the graph."""
    weights = torch.softmax(q @ k.mT, -1)
    return attend(q, k, v), weights, weights @ v + torch.tensor([1.0, 2.0] * 8)


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16))
        self.register_buffer("keep", torch.ones(20, 20).tril().bool())

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q @ self.weight, k, v, attn_mask=self.keep)


class Projected(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.softmax(self.project(x) @ x.mT, -1) @ x


def outcome(run: Callable[..., Any], given: list[torch.Tensor], *held: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients, with the same random numbers every time."""
    torch.manual_seed(3)
    results = run(*given)
    results = list(results) if isinstance(results, tuple) else [results]
    gradients = torch.autograd.grad(sum(r.float().square().sum() for r in results), [*given, *held])
    return [*(r.detach() for r in results), *gradients]


def said(report: fusion.Report) -> list[object]:
    """A report without the names that a user's tensors have, which Inductor's passes do not see."""
    texts = [[text[text.index("\nmodule") :] for text in site.sources] for site in report.sites]
    sites = [(s.fused, s.reason, s.location, s.validated, s.specs, s.sizes, s.plans) for s in report.sites]
    return [sites, texts, report.notes, report.graph_breaks]


@pytest.mark.parametrize(
    "function",
    [attend, dropped, checkpointed, in_half, beside_one_that_is_not_fused, Heads()],
    ids=lambda f: getattr(f, "__name__", "module"),
)
def test_results_gradients_and_reports_are_those_of_the_backend(function) -> None:
    given, held = tensors(), list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    with fusion.collect_reports() as reports:
        by_backend = outcome(torch.compile(function, backend="fusion"), given, *held)
    torch._dynamo.reset()
    with fusion.install(), fusion.collect_reports() as installed:
        by_pass = outcome(torch.compile(function), given, *held)
    assert [said(report) for report in installed] == [said(report) for report in reports]
    assert sum(report.fused for report in installed)
    assert_same(by_pass, by_backend)
    if function not in (dropped, checkpointed):
        exact = [t.detach().double().requires_grad_() for t in given]
        eager = outcome(function, given, *held)
        wide = outcome(function.double() if held else function, exact, *held)
        assert_as_exact_as_eager(by_pass, eager, wide, torch.bfloat16 if function is in_half else torch.float32)


def test_sizes_may_change() -> None:
    with fusion.install(), fusion.collect_reports() as reports:
        function = torch.compile(attend, dynamic=True)
        for n in (5, 9, 40):
            given = torch.randn(3, 2, n, 16).unbind()
            assert_as_exact_as_eager(function(*given), attend(*given), attend(*(t.double() for t in given)))
    assert [report.fused for report in reports] == [1]


class Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> str:
        return "counting"


def test_passes_of_others_run_beside_it_and_stay() -> None:
    before, joint, last, late = Counting(), Counting(), Counting(), Counting()
    theirs = {"pre_grad_custom_pass": before, "joint_custom_pre_pass": [joint], "post_grad_custom_post_pass": last}
    with config.patch(theirs), fresh_cache():
        fusion.install()
        (*kept,) = config.pre_grad_custom_pass  # type: ignore[misc]  # pyright: ignore
        config.pre_grad_custom_pass = [*kept, late]
        with torch.no_grad():
            torch.compile(attend)(*tensors())
        fusion.uninstall()
        assert config.pre_grad_custom_pass == [before, late] and config.joint_custom_pre_pass is joint
    assert any("softmax" in name for name in before.seen), before.seen
    for found in (late, joint, last):
        assert any("fusion.attention" in name for name in found.seen), found.seen
        assert not any("softmax" in name for name in found.seen), found.seen


def test_caches_hit_and_tell_both_apart() -> None:
    """A graph is in the caches once as it is and once rewritten, and each is found again, reported all the same."""

    def compiled() -> dict[str, int]:
        torch._dynamo.reset()
        counters.clear()
        outcome(torch.compile(attend), tensors())
        return {name: n for name, n in counters["aot_autograd"].items() if n and "cache" in name}

    miss = {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    with fresh_cache():
        assert compiled() == miss and not counters["fusion"]
        for expected in (miss, {"autograd_cache_hit": 1}):
            with fusion.install({"strict": True}):
                assert compiled() == expected
                assert counters["fusion"]["fused"] == 1
                assert bool(counters["inductor"]["fxgraph_cache_hit"]) == ("autograd_cache_hit" in expected)
        assert compiled() == {"autograd_cache_hit": 1} and not counters["fusion"]


def test_a_cached_graph_does_not_depend_on_what_a_pass_is_called() -> None:
    """The pass has a name that lasts as long as the source and the options, for whoever looks it up before it runs."""
    names = [fusion.inductor_options(given)["pre_grad_custom_pass"].uuid() for given in ({}, {}, {"strict": True})]
    assert names[0] == names[1] != names[2]


def test_it_may_run_after_the_lookup() -> None:
    """As with `pre_grad_pass_timing="late"`: the key is then the name of the pass."""
    with fresh_cache(), config.patch(pre_grad_pass_timing="late"):
        for fused in (1, 0):
            torch._dynamo.reset()
            counters.clear()
            given = tensors()
            with fusion.install():
                result = outcome(torch.compile(attend), given)
            assert counters["fusion"]["fused"] == fused and counters["aot_autograd"]["ok"] == 1
            exact = outcome(attend, [t.detach().double().requires_grad_() for t in given])
            assert_as_exact_as_eager(result, outcome(attend, given), exact)
        assert config.pre_grad_pass_timing == "late"


def fused_by(**keywords: Any) -> list[int]:
    """Fused attentions of each graph that is compiled."""
    torch._dynamo.reset()
    with fusion.collect_reports() as reports, torch.no_grad():
        torch.compile(attend, **keywords)(*tensors())
    return [report.fused for report in reports]


def test_settings_of_one_model() -> None:
    assert fused_by(options=fusion.inductor_options({"strict": True})) == [1]
    assert fused_by() == []


def test_the_backend_goes_its_own_way() -> None:
    with fusion.install():
        assert fused_by(backend="fusion") == [1]
        assert fused_by() == [1]


def test_what_was_installed_before_comes_back() -> None:
    assert fused_by() == []
    with fusion.install():
        with fusion.install({"emitter": "reference"}):
            fusion.install({"strict": True})
        (kept,) = [config.pre_grad_custom_pass]
        assert kept.options == fusion.Options()
        assert fused_by() == [1]
    assert fused_by() == []
    fusion.uninstall()
    fusion.uninstall()


def test_a_strict_pass_refuses() -> None:
    def escaping(q, k, v):
        scores = q @ k.mT
        weights = torch.softmax(scores, -1)
        return scores, weights, weights @ v

    with fusion.install({"strict": True}), pytest.raises(Exception, match="not fused: .*escaping"):
        torch.compile(escaping)(*tensors())
    with fusion.install():
        torch.compile(escaping)(*tensors())


def test_inductors_own_patterns_stay_off_what_is_left_alone() -> None:
    """They take a softmax over the queries for one over the keys (torch 2.13); other graphs still have them."""

    def over_queries(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1) / 4, dim=-2) @ v

    given = tensors(gradients=False)
    with fusion.install(), torch.no_grad():
        result = torch.compile(over_queries)(*given)
    assert_as_exact_as_eager(result, over_queries(*given), over_queries(*(t.double() for t in given)))
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache(), torch.no_grad():
        torch.compile(functools.partial(attend))(*given)
    assert counters["inductor"]["fuse_attention"]


def test_packages_of_aotinductor_stay_as_they_are() -> None:
    """They would need our operator where they run. (What stands in for their compilation may fail afterwards.)"""
    torch._dynamo.reset()
    with fusion.install(), fusion.collect_reports() as reports, V.set_aot_compilation(True), fresh_cache():
        with torch.no_grad(), contextlib.suppress(Exception):
            torch.compile(attend)(*tensors())
        assert reports == []


def test_a_cache_that_is_written_in_place() -> None:
    def step(cache, at, q, x):
        cache.index_copy_(-2, at, x)
        return attend(q, cache, cache)

    given = [torch.randn(1, 2, 32, 16), torch.tensor([7]), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 1, 16)]
    caches = [given[0].clone() for _ in range(3)]
    exact = caches[2].double()
    with fusion.install(), fusion.collect_reports() as reports:
        result = torch.compile(step)(caches[0], *given[1:])
    eager, wide = step(caches[1], *given[1:]), step(exact, given[1], *(t.double() for t in given[2:]))
    assert_as_exact_as_eager(result, eager, wide)
    assert_same(caches[0], caches[1])
    assert [report.fused for report in reports] == [1]


def test_the_pieces_of_distributed_data_parallel_are_rewritten() -> None:
    """DDP splits a graph where gradients are exchanged; its pieces come from Dynamo no longer."""
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._inductor.compile_fx import compile_fx

    model, x = torch.nn.Sequential(*(Projected() for _ in range(3))), torch.randn(2, 20, 16)
    eager, exact = outcome(model, [x.requires_grad_()]), copy.deepcopy(model).double()
    wide = outcome(exact, [x.detach().double().requires_grad_()])
    split = DDPOptimizer(bucket_bytes_cap=1000, first_bucket_cap=1000, backend_compile_fn=compile_fx)
    with fusion.install(), fusion.collect_reports() as reports:
        found = outcome(torch.compile(model, backend=split.compile_fn), [x])
    assert_as_exact_as_eager(found, eager, wide)
    assert len(reports) > 1 and sum(report.fused for report in reports) == 3


def test_it_holds_for_the_thread_that_installs() -> None:
    found: list[Any] = []
    with fusion.install():
        thread = threading.Thread(target=lambda: found.append(config.pre_grad_custom_pass))
        thread.start()
        thread.join()
    assert found == [None]


def test_compare_measures_inductor_without_it() -> None:
    given = tensors(gradients=False)
    with fusion.install(), fusion.collect_reports() as reports:
        torch.compile(attend)(*given)
        found = fusion.compare(attend, *given, seconds=0.01)
    assert len(reports) == 2 and not any(entry.failure for entry in found.entries)


@pytest.mark.parametrize("ask", [fusion.install, fusion.inductor_options])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strct": True}, "Did you mean 'strict'"),
        ({"inner": "eager"}, "backend='fusion', options={'inner': 'eager'}"),
        ({"approximate": "polynomial"}, "pass of Inductor's was asked for"),
    ],
)
def test_options_that_cannot_be(ask, options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        ask(options)
    assert config.pre_grad_custom_pass is None
