"""Validation catches faults of the compiler, and nothing else: each fault put in, and each program without it."""

import pytest
import torch
from torch._dynamo.utils import counters

import fusion
from fusion.caching import BoundedCache
from fusion.passes.pullback import indexing
from fusion.validation import mask_check, sites
from tests.fusion.validation import faults

CASES = faults.FOUND | faults.INJECTED


def _compiled(program, further, trained):
    """The reports' sites of one call."""
    heads = 2 if program.__name__.startswith("grouped") else 4
    with fusion.collect_reports() as reports, torch.set_grad_enabled(trained):
        options = {"inner": "eager", "emitter": "reference", "verify": True}
        torch.compile(program, backend="fusion", options=options)(*faults.inputs(trained, heads), *further)
    return [site for report in reports for site in report.sites]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_caught(monkeypatch, caplog, name):
    program, further, trained, put_in = CASES[name]
    put_in(monkeypatch)
    before = counters["fusion"]["invalid"]
    (site,) = _compiled(program, further, trained)
    assert not site.fused
    assert "a defect of fusion" in site.reason
    assert counters["fusion"]["invalid"] == before + 1
    assert [record.levelname for record in caplog.records if record.name == "fusion.decide"] == ["ERROR"]


PROGRAMS = {(program, trained): further for program, further, trained, _ in faults.INJECTED.values()}


@pytest.mark.parametrize(("program", "trained"), PROGRAMS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_without_a_fault_the_program_is_fused(program, trained):
    (site,) = _compiled(program, PROGRAMS[program, trained], trained)
    assert site.reason is None
    (verdict,) = sites._verdicts.values()
    assert verdict.skipped is None and verdict.wrong is None
    assert site.validated == verdict.checked


def test_last_digits_are_no_contradiction(monkeypatch):
    """Two runs of `torch.tanh` on the same values were seen to differ in them."""

    def capped(q, k, v):
        scores = torch.tanh(q @ k.mT / 30) * 30
        dead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(dead, -torch.inf).softmax(-1) @ v

    evaluate, generator = mask_check.evaluate, torch.Generator().manual_seed(0)

    def evaluate_roughly(expr, leaf):
        value = evaluate(expr, leaf)
        if not value.is_floating_point():
            return value
        return value * (1 + 2e-7 * torch.randn(value.shape, generator=generator))

    monkeypatch.setattr(mask_check, "evaluate", evaluate_roughly)
    (site,) = _compiled(capped, (), False)
    assert site.fused, site.reason


def test_an_operand_that_was_looked_into_in_vain_is_read_as_it_is():
    """Queries made of a sum, beyond a repetition that the analysis looks into: what the sum reads is no bias, and its
    values, of which some are the lowest number, say nothing about this attention."""

    def repeated(q, k, v, x, picture, bias):
        k, v = x.reshape(2, 16, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        q = (picture + picture.sin()).permute(0, 2, 3, 1).repeat_interleave(1, dim=0)
        q = q.reshape(2, 16, 2, 8).permute(0, 2, 1, 3)
        return (q * 0.25 @ k.transpose(-2, -1).contiguous() + bias).softmax(-1) @ v

    further = torch.randn(2, 16, 32), torch.randn(2, 16, 4, 4), torch.randn(2, 16, 16)
    (site,) = _compiled(repeated, further, False)
    assert site.reason is None
    assert "values" in site.validated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distances_that_a_model_rounds_are_no_fault(dtype):
    """ALiBi in half precision, which holds distances up to 256 or 2048."""

    def sloped(q, k, v, slopes):
        i = torch.arange(k.shape[-2])
        distance = (i[None] - i[:, None]).to(dtype)
        return (q @ k.mT + slopes[:, None, None] * distance).softmax(-1) @ v

    q = torch.randn(1, 4, 3000, 8, dtype=dtype)
    with fusion.collect_reports() as reports, torch.no_grad():
        options = {"inner": "eager", "emitter": "reference", "verify": True}
        torch.compile(sloped, backend="fusion", options=options)(q, q, q, torch.rand(4).to(dtype))
    ((site,),) = [report.sites for report in reports]
    assert site.fused, site.reason
    assert "values" in site.validated


def test_one_column_is_compared_with_its_gradients():
    def narrow(q, k, v):
        return faults.plain(q[..., :1], k[..., :1], v[..., :1])

    (site,) = _compiled(narrow, (), True)
    assert "gradients" in site.validated


def test_reads_beyond_an_operand_are_found(monkeypatch):
    """Weights that were padded in front and not cut off there: the first has no key, whatever is made of its score."""

    def shifted(q, k, v):
        return torch.nn.functional.pad(q @ k.mT, (1, 0)).softmax(-1)[..., :-1] @ v

    (site,) = _compiled(shifted, (), False)
    assert not site.fused and "defect" not in site.reason
    torch._dynamo.reset()
    monkeypatch.setattr(indexing, "walk", lambda *_: ())
    (site,) = _compiled(shifted, (), False)
    assert not site.fused and "is read beyond a dimension of 19" in site.reason


@pytest.mark.parametrize("stage", ["mask_check", "fingerprint"])
def test_a_site_whose_validation_fails_stays_as_it_was(monkeypatch, caplog, stage):
    def fail(*_):
        raise ZeroDivisionError("put in")

    monkeypatch.setattr(
        *{"mask_check": (mask_check, "mask_contradiction"), "fingerprint": (sites, "fingerprint")}[stage], fail
    )
    before = counters["fusion"]["skipped"]
    (site,) = _compiled(faults.plain, (), False)
    assert not site.fused and "could not be compared with eager: ZeroDivisionError: put in" in site.reason
    assert counters["fusion"]["skipped"] == before + 1
    assert any(record.exc_info for record in caplog.records if record.name == "fusion.validation.sites")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="not fused: .*ZeroDivisionError: put in"):
        torch.compile(faults.plain, backend="fusion", options={"strict": True})(*faults.inputs(False, 4))


@pytest.mark.parametrize("trained", [True, False])
def test_double_precision_is_compared_and_a_fault_in_it_found(monkeypatch, trained):
    def double(q, k, v):
        return faults.plain(q.double(), k.double(), v.double())

    (site,) = _compiled(double, (), trained)
    assert site.fused and site.validated.startswith("values in")
    sites._verdicts.clear()
    torch._dynamo.reset()
    faults.INJECTED["scale dropped"][3](monkeypatch)
    (site,) = _compiled(double, (), trained)
    assert not site.fused and "would differ from eager" in site.reason


def test_products_by_vecdot_and_differences_of_positions_are_compared():
    def other(q, k, v):
        steps = torch.arange(k.shape[-2] + 1).diff().cumsum(0)
        scores = torch.linalg.vecdot(q.unsqueeze(-2), k.unsqueeze(-3)) - 0.1 * steps
        return scores.softmax(-1) @ v

    (site,) = _compiled(other, (), True)
    assert site.fused and site.validated.startswith("values in")


def test_constants_are_told_apart_by_what_they_hold():
    """By `id`, a constant that is gone would lend its verdict to another one in its place."""

    def verdicts(bias):
        torch._dynamo.reset()
        program = lambda q, k, v: ((q @ k.mT) + torch.tensor(bias)).softmax(-1) @ v
        with fusion.collect_reports() as reports:
            q, k, v = faults.inputs(False, 4)
            torch.compile(program, backend="fusion", options={"inner": "eager", "emitter": "reference"})(q, k, v)
        assert reports[0].sites[0].fused, reports[0]
        return len(sites._verdicts)

    n_q, n_k = (x.shape[-2] for x in faults.inputs(False, 4)[:2])
    one, other = ([[base + i - j for j in range(n_k)] for i in range(n_q)] for base in (0.0, 0.5))
    assert [verdicts(one), verdicts([*map(list, one)]), verdicts(other)] == [1, 1, 2]


def test_equal_layers_are_compared_once():
    def layers(q, k, v):
        for _ in range(3):
            q = faults.plain(q.sin(), k, v)
        return q

    found = _compiled(layers, (), False)
    assert [site.validated for site in found] == [found[0].validated] * 3
    assert len(sites._verdicts) == 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("n_k", [20, 37, 63, 100])
@pytest.mark.parametrize("shift", [lambda s: s.max(dim=-1, keepdim=True).values, lambda s: s.logsumexp(-1, True)])
def test_a_reduction_over_scores_and_sinks_sees_the_sampled_keys(n_k, shift, first):
    """The maximum that GPT-OSS subtracts before its softmax is over the keys and a sink. Where keys are many, those
    that the spec's program sees are the ones whose maximum is taken, no others."""

    def sinking(q, k, v, bias, sinks):
        s = q @ k.mT + bias
        sink = sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        s = torch.cat([sink, s] if first else [s, sink], -1)
        w = torch.softmax(s - shift(s), -1)
        return (w[..., 1:] if first else w[..., :-1]) @ v

    q, k, v = (torch.randn(2, 4, n, 8) for n in (5, n_k, n_k))
    with fusion.collect_reports() as reports:
        options = {"inner": "eager", "emitter": "reference", "verify": True}
        torch.compile(sinking, backend="fusion", options=options)(q, k, v, torch.randn(2, 1, 5, n_k), torch.randn(4))
    (site,) = reports[0].sites
    assert site.reason is None
    assert site.validated.startswith("values in 72 rows")
