"""What is known of the data before a method is chosen: a glance at a sample, and all of it by a kernel."""

import pytest
import torch

import fusion
from fusion.approximate.head_batches import HeadPacker
from fusion.approximate.score_bounds import MOMENT_MARGIN, Inspection
from fusion.codegen import cpu
from tests.fusion.approximate.cases import cached_spec, executor, sizes_of
from tests.numerics import assert_within


def test_a_glance_ends_the_matter_where_nothing_helps(monkeypatch):
    """Without looking at all of the data, which costs more than the exact kernel may become slower."""
    if cpu.unavailable() is not None:
        pytest.skip(cpu.unavailable())
    x = torch.randn(3, 1, 4, 4096, 16) * 16
    spec = cached_spec(*x, False)
    run = executor(spec, 1e-2)
    run.always = False
    exact = run.exact([*x], sizes_of(spec, x[0], x[1]))
    monkeypatch.setattr(Inspection, "whole", lambda *a, **k: 1 / 0)
    for _ in range(2):
        assert torch.equal(run([*x], sizes_of(spec, x[0], x[1])), exact)
    assert fusion.last_certificates()[-1].reason.startswith("a sample of")
    few = torch.randn(3, 1, 4, 300, 16) * 1e-3
    run([*few], sizes_of(spec, few[0], few[1]))
    assert fusion.last_certificates()[-1].reason.endswith("at this length")


@pytest.mark.parametrize(
    ("groups", "dtype", "causal"), [(1, torch.float32, False), (2, torch.float32, True), (2, torch.bfloat16, False)]
)
def test_the_kernel_that_looks_sees_what_torch_sees(groups, dtype, causal):
    """In tensors of any layout, in all rows and in a few; torch's operations run where it cannot read them."""
    if cpu.unavailable() is not None:
        pytest.skip(cpu.unavailable())
    n = 2300 if causal else 333
    q, k = (torch.randn(2, n, 4 // g, 20).transpose(1, 2).to(dtype) + 1 for g in (1, groups))
    spec = cached_spec(q, k, k, causal)
    looks = [Inspection(HeadPacker(spec), 0.1, causal, native) for native in (True, False)]
    sizes = sizes_of(spec, q, k)
    for operands in ([q, k, k], [q + 1, k + 1, k], [q.contiguous(), k, k]):
        assert looks[0].gather.places(operands, sizes) is not None
        for found, expected in (
            [look.whole(operands, sizes) for look in looks],
            [look.sample(operands, sizes, 12, 10) for look in looks],
        ):
            for one, other in zip(found, expected, strict=True):
                one, other = (torch.as_tensor(x).double() for x in (one, other))
                # Certificates have this much room for the rounding of what was looked at.
                assert_within((one - other).abs(), MOMENT_MARGIN * other.abs().max())
    known = looks[0].whole([q, k, k], sizes)
    for limit, count in ((1e-3, 8), (0.999 * min(known.bounds), 1), (2 * max(known.bounds), 0)):
        found = looks[0].whole([q, k, k], sizes, limit=limit)
        assert found.bounds == known.bounds
        assert found.moments.count(torch.inf) >= count and (count or found.moments == known.moments)
    operands = [q.mT.contiguous().mT, k, k]
    assert looks[0].gather.places(operands, sizes) is None
    assert looks[0].whole(operands, sizes).bounds == looks[1].whole(operands, sizes).bounds
