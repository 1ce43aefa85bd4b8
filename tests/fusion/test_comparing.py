"""`report.compare` and `fusion.compare`."""

import copy

import pytest
import torch

import fusion
from fusion.api.compare import Comparison, Measured, peak_memory
from fusion.errors import ComparisonError
from fusion.exactness import reference
from tests.numerics import allowance, assert_same_in_float64, wide


def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def inputs(n=65):
    return [torch.randn(1, 2, n, 16) for _ in range(3)]


def test_eager_inductor_and_fusion_side_by_side(tmp_path):
    given = inputs()
    report = fusion.explain(attend, *given)
    found = report.compare(*given, seconds=0.01)
    assert [entry.name for entry in found.entries] == ["eager", "inductor", "fusion"]
    for entry in found.entries:
        assert entry.seconds > 0 and entry.peak > 0 and not entry.failure
    assert found["fusion"].error <= found["fusion"].allowed and found["eager"].error > 0
    assert report.comparison is found
    assert "speed-up" in str(report) and "Medians of" in str(report)
    assert [plan.choice for plan in found.plans] == [site.plan.choice for site in report.sites]
    line = str(found).splitlines()[-1]
    assert line == found.optimum and line.startswith("Attention in fusion: ") and "by the measured call" in line
    assert found.optimum in report.to_html(tmp_path / "page.html").read_text().replace("&#x27;", "'")


@pytest.mark.parametrize(("times", "said"), [(1.9, False), (5.2, True)])
def test_a_time_far_above_the_predicted_one_says_what_to_check(times, said):
    plans = (fusion.plan(fusion.Problem(n_q=64, n_k=64, d=16, d_v=16)),)
    entry = Measured(name="fusion", seconds=times * plans[0].time)
    text = Comparison(entries=(entry,), turns=3, threads=2, device="cpu", plans=plans).optimum
    assert ("The call takes 5.2 times what is predicted for attention. Check what else" in text) is said


def test_compare_of_a_model_takes_its_parameters_to_float64():
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 9, 16)
    found = fusion.compare(model, x, x, x, seconds=0.01, need_weights=False)
    with torch.no_grad():
        eager, exact = model(x, x, x)[0], copy.deepcopy(model).double()(*wide((x, x, x)))[0]
    assert_same_in_float64(found["fusion"].allowed, allowance(eager, exact), terms=exact)
    assert found["fusion"].error <= found["fusion"].allowed
    assert next(model.parameters()).dtype is torch.float32


def test_compare_of_a_compiled_model_is_that_of_the_model():
    model, hooked = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval(), []
    model.register_forward_hook(lambda *_: hooked.append(1))
    x = torch.randn(1, 9, 16)
    found = fusion.compare(torch.compile(model), x, x, x, seconds=0.01, need_weights=False)
    assert not found.note and found["fusion"].error <= found["fusion"].allowed and hooked


def test_peak_memory_is_what_a_call_holds_at_most():
    keep = torch.zeros(10)

    def call():
        a = torch.empty(1000, dtype=torch.float32)
        del a
        b = torch.empty(3000, dtype=torch.float32)
        return b.sum() + keep.sum()

    assert 12000 <= peak_memory(call) < 13000


def test_a_collected_report_cannot_be_compared():
    with fusion.collect_reports() as reports:
        torch.compile(attend, backend="fusion", options={"inner": "eager"})(*inputs())
    with pytest.raises(ComparisonError, match=r"collected while a model compiled.*fusion\.explain\(model"):
        reports[0].compare(*inputs())


def test_inputs_that_eager_refuses():
    with pytest.raises(ComparisonError, match="fails in eager mode: RuntimeError"):
        fusion.compare(attend, torch.randn(2, 3), torch.randn(4, 5), torch.randn(6, 7))


def test_a_competitor_that_fails_is_named(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    monkeypatch.setattr("fusion.inner_compiler.compile_rest", lambda module, *rest: module.forward)
    found = fusion.compare(attend, *inputs(), seconds=0.01)
    assert "no compiler" in found["inductor"].failure and found["fusion"].seconds > 0
    assert "failed" in str(found)


def test_without_float64_the_errors_are_missing_and_the_note_says_why():
    def picky(q, k, v):
        assert q.dtype is torch.float32, "only float32"
        return attend(q, k, v)

    found = fusion.compare(picky, *inputs(), seconds=0.01)
    assert found["fusion"].error is None and "only float32" in found.conditions


class _Casting(torch.nn.Module):
    """Casts that are written out, and tensors that are no parameters."""

    def __init__(self):
        super().__init__()
        self.linear, self.offset = torch.nn.Linear(16, 16), [torch.randn(16)]

    def forward(self, x):
        counted = torch.arange(x.shape[-1]).float() / 16
        x = self.linear(x.float() + counted) + torch.full((16,), 0.125)
        made = torch.zeros(16, dtype=torch.float32)
        made += self.offset[0]
        return torch.softmax(x.mT @ x, -1, dtype=torch.float32) @ made


def test_a_reference_is_float64_throughout():
    model, x = _Casting(), torch.randn(1, 9, 16)
    results, note = reference(model, (x,), {})
    assert results is not None and not note
    (exact,) = results
    assert exact.dtype is torch.float64
    wide = x.double() + torch.arange(16).double() / 16
    wide = wide @ model.linear.weight.double().mT + model.linear.bias.double() + 0.125
    expected = torch.softmax(wide.mT @ wide, -1) @ model.offset[0].double()
    assert_same_in_float64(exact, expected, terms=16)
