"""What validation takes eager to compute is what eager computes: in each sample, the whole graph on the same values."""

import pytest
import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from fusion import decide
from fusion.caching import BoundedCache
from fusion.passes import nodes
from fusion.process import outside_compilation
from fusion.validation import sites
from fusion.validation.samples import Role
from tests.numerics import assert_as_exact_as_eager
from tests.passes import spellings

SAMPLES = range(0, 64, 5)
"""Those that are looked at; each kind is among them."""


def _made(region, node):
    """A tensor at which a replay ends, in every sample; floats in float64."""
    shape, own = region.shape(node), nodes.dtype(node)
    flat = torch.arange(max(torch.Size(shape).numel(), 1)).view(1, -1)
    return region.samples.values(region.numbers[node], flat, own, region.roles.get(node, Role.OTHER)).unflatten(
        1, shape or (1,)
    )


def _run(region, made, sample, dtype):
    """The root of a site, computed by the graph's operations on whole tensors, floats in `dtype`."""

    def floats(tensor):
        return tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor

    known = {node: floats(held[sample]).view(region.shape(node)) for node, held in made.items()}

    def value(node):
        if node not in known:
            args, kwargs = map_arg((node.args, node.kwargs), value)
            held = node.op == "get_attr"
            result = getattr(node.graph.owning_module, node.target) if held else node.target(*args, **kwargs)
            known[node] = tree_map(floats, result)
        return known[node]

    return value(region.root)


def _replayed(monkeypatch, function, inputs):
    """(by replay, by the graph, by the graph in float64) of the result's elements that validation looks at."""
    compared, results = [], []

    class Recording(sites._Comparison):
        def verdict(self):
            compared.append(self)
            return super().verdict()

    def validate(site, parts, examples):
        verdict = sites.validate(site, parts, examples)
        with outside_compilation(), torch.no_grad():
            this = compared[-1]
            at = tuple(this.places[name] for name in this.dims)
            replayed = sites.Replay(this.region).value(site.root, at, 2)
            made = {node: _made(this.region, node) for node in this.region.numbers}
            whole = [
                torch.stack(
                    [_run(this.region, made, sample, dtype)[tuple(e[sample] for e in at)] for sample in SAMPLES]
                )
                for dtype in (torch.float32, torch.float64)
            ]
        results.append((replayed[list(SAMPLES)], *whole))
        return verdict

    monkeypatch.setattr(sites, "_Comparison", Recording)
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())
    monkeypatch.setattr(decide, "validate", validate)
    options = {"inner": "eager", "emitter": "reference", "verify": True}
    with torch.no_grad():
        torch.compile(function, backend="fusion", options=options)(*inputs)
    return results


@pytest.mark.parametrize("function", spellings.FUSED, ids=lambda f: f.__name__)
def test_replay_is_what_the_graph_computes(monkeypatch, function):
    results = _replayed(monkeypatch, function, [torch.randn(2, 4, 9, 4) for _ in range(3)])
    assert results
    for replayed, eager, exact in results:
        assert_as_exact_as_eager(replayed, eager.expand_as(replayed), exact.expand_as(replayed), torch.float32)
