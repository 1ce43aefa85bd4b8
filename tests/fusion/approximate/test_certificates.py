"""Where certificates are found, and what they say of a call that ran exact."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import fusion
from fusion.approximate import dispatch
from fusion.approximate.certificates import Certificate
from fusion.approximate.polynomial import PolynomialAttention
from tests.fusion.approximate.cases import assert_certified, inputs
from tests.numerics import assert_as_exact_as_eager, assert_runs_as_exact_as_eager, wide


def test_a_certificate_is_a_sentence_with_its_figures():
    common = {"method": "polynomial", "heads": ((0, 0), (0, 1)), "epsilon": 0.01, "n_q": 64, "n_k": 96}
    certified = Certificate(
        **common, ran="polynomial", weight_error=0.0031, output_error=0.0124, bound=0.98, moment=0.031, degree=2,
        features=561,
    )  # fmt: skip
    assert str(certified) == (
        "polynomial: 2 heads of 64 queries and 96 keys, by a polynomial of degree 2 with 561 features: the weights of "
        "a row are off by at most 0.0031 of their sum (0.01 was allowed), an output row by at most 0.012; no score is "
        "above 0.98 in magnitude, and their mean square in a row is at most 0.031"
    )
    exact = Certificate(**common, ran="exact", reason="no polynomial pays")
    assert str(exact) == "polynomial: 2 heads of 64 queries and 96 keys ran exact, because no polynomial pays"


def test_training_keeps_the_exact_kernel():
    x = torch.randn(1, 2, 256, 8, requires_grad=True)
    options = {"inner": "eager", "approximate": "polynomial", "epsilon": 0.5}
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="fusion", options=options)
    out = compiled(x)
    assert [c.reason for c in fusion.last_certificates()] == [dispatch.TRAINING]
    double = wide(x).requires_grad_()
    ours, eager, exact = (
        [y.detach(), *torch.autograd.grad(y.square().sum(), given)]
        for y, given in ((out, x), *((F.scaled_dot_product_attention(t, t, t), t) for t in (x, double)))
    )
    assert_as_exact_as_eager(ours, eager, exact)


def test_heads_of_one_packed_tensor():
    """Q, K and V are read at computed places of it."""
    packed = torch.randn(1, 512, 3 * 4 * 16) * 0.3

    def heads(x):
        return x.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)

    def attention(x):
        return F.scaled_dot_product_attention(*heads(x))

    options = {"inner": "eager", "approximate": "polynomial", "epsilon": 0.01}
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(lambda x: F.scaled_dot_product_attention(*heads(x)), backend="fusion", options=options)(
            packed
        )
    assert_certified(out, *heads(packed), False, 0.01)


def test_certificates_are_those_of_the_last_call():
    x = torch.randn(1, 2, 2048, 8) * 0.3
    options = {"inner": "eager", "approximate": "polynomial"}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: F.scaled_dot_product_attention(*[F.scaled_dot_product_attention(x, x, x)] * 3),
        backend="fusion", options=options,
    )  # fmt: skip
    for _ in range(2):
        compiled(x)
        assert sorted(head for c in fusion.last_certificates() for head in c.heads) == sorted([(0, 0), (0, 1)] * 2)


def test_certificates_of_models_and_threads_are_told_apart():
    torch._dynamo.reset()

    def compiled(epsilon):
        options = {"inner": "eager", "approximate": "polynomial", "epsilon": epsilon}
        return torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="fusion", options=options)

    x, models = torch.randn(1, 2, 2048, 8) * 0.3, {epsilon: compiled(epsilon) for epsilon in (0.01, 0.02)}
    for model in models.values():
        model(x)
    met = threading.Barrier(2)

    def run(epsilon: float) -> list[set[float]]:
        with fusion.collect_certificates() as found:
            models[epsilon](x)
            met.wait()
            models[epsilon](x)
        last = fusion.last_certificates()
        assert sum(len(c.heads) for c in found) == 4 and sum(len(c.heads) for c in last) == 2
        return [{c.epsilon for c in certificates} for certificates in (found, last)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, models)) == [[{epsilon}] * 2 for epsilon in models]
    with fusion.collect_certificates() as found:
        for model in models.values():
            model(x)
    assert {c.epsilon for c in found} == set(models)
    assert {c.epsilon for c in fusion.last_certificates()} == {0.02}


def test_a_failure_leaves_the_exact_kernel(monkeypatch):
    q, k, v = inputs(0, 4, 4, 4096, 8, 8, (0.2,), "none", torch.float32)
    monkeypatch.setattr(PolynomialAttention, "_run", lambda *a: 1 / 0)
    options = {"inner": "eager", "approximate": "polynomial", "epsilon": 0.1234}
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="fusion", options=options)
    assert_runs_as_exact_as_eager(compiled, F.scaled_dot_product_attention, q, k, v)
    assert "ZeroDivisionError" in fusion.last_certificates()[0].reason
