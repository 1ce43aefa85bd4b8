"""Gradients of random score programs: of the reference by numerical differences, of kernels against float64 eager."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fusion
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager
from tests.properties import programs

NAMES = ("q", "k", "v", "leaf", "sink", "temperature")


@pytest.fixture(autouse=True)
def _no_silent_fallback():
    """A kernel that fails is left for the reference interpreter, whose numbers would pass."""

    with failures_raised():
        yield


@st.composite
def trained(draw, **ranges):
    """A case, which of its tensors are trained (at least one), and whether scores have a temperature per head."""
    case = draw(programs.cases(**ranges))
    tempered = draw(st.booleans())
    there = {"leaf": case["bias"] != "none", "sink": case["sink"], "temperature": tempered}
    names = [name for name in NAMES if there.get(name, True)]
    return case | {"tempered": tempered, "needs": draw(st.sets(st.sampled_from(names), min_size=1))}


def tensors_of(case):
    """What may be trained, by name, and the mask."""
    q, k, v = programs.operands(case)
    temperature = torch.rand(case["h"], 1, 1) + 0.5 if case["tempered"] else None
    captured = {"leaf": programs.captured(case), "sink": programs.sink(case), "temperature": temperature}
    named = {"q": q, "k": k, "v": v} | captured
    return named, programs.mask(case)


def function_of(case):
    attend = programs.attention(case)

    def function(q, k, v, leaf, sink, temperature, mask):
        bias = None if leaf is None else programs.bias(case, leaf)
        return attend(q, k, v, bias, mask, sink, None if temperature is None else temperature.to(q.dtype))

    return function


def gradients(function, named, mask, needs, upstream, dtype=None):
    """Output and gradients by name, in the dtypes given or in another."""
    tensors = {
        name: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(name in needs)
        for name, t in named.items()
    }
    out = function(*tensors.values(), mask)
    wanted = {name: tensors[name] for name in sorted(needs)}
    found = torch.autograd.grad(out, list(wanted.values()), upstream.to(out.dtype))
    return {"out": out.detach()} | dict(zip(wanted, found, strict=True))


def compiled(function, emitter):
    options = {"inner": "eager", "emitter": emitter, "strict": True, "transforms": "always"}
    return torch.compile(function, backend="fusion", options=options)


@hypothesis.given(trained(queries=(1, 6), keys=(1, 7), widths=(1, 3, 5), dtypes=(torch.float64,)))
@hypothesis.settings(max_examples=10)
def test_gradcheck_of_the_reference(case):
    """Rows without a live key are NaN, of which there are no differences: here each row has one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    named, mask = tensors_of(case | {"safe_rows": True})
    tensors = [t if t is None else t.double().requires_grad_(name in case["needs"]) for name, t in named.items()]
    function = compiled(function_of(case), "reference")
    assert torch.autograd.gradcheck(lambda *given: function(*given, mask), tensors, nondet_tol=1e-12, fast_mode=True)


@hypothesis.given(trained())
@hypothesis.settings(max_examples=6)
def test_gradients_of_kernels(case):
    check(case, draws=8)


def check(case, draws):
    """Several draws of the tensors count together: the error of a few elements is luck."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    function = function_of(case)
    ours = compiled(function, "auto")
    found: list[list[dict[str, torch.Tensor]]] = []
    with fusion.collect_reports() as reports:
        for _ in range(draws):
            named, mask = tensors_of(case)
            given = named, mask, case["needs"], torch.randn(case["b"], case["h"], case["n"], case["e"])
            exact = gradients(function, *given, torch.float64)
            found.append([gradients(ours, *given), gradients(function, *given), exact])
    assert sum(report.fused for report in reports) == 1
    together = ({name: torch.stack([one[name] for one in way]) for name in way[0]} for way in zip(*found, strict=True))
    assert_as_exact_as_eager(*together, case["dtype"])
