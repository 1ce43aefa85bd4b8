"""Random score programs, shapes, strides, masks and dtypes through the whole backend, against float64 eager."""

import hypothesis
import torch

import fusion
from tests.numerics import assert_as_exact_as_eager
from tests.properties import programs


@hypothesis.given(programs.cases())
@hypothesis.settings(max_examples=30)
def test_random_programs(case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    attend = programs.attention(case)
    compiled = torch.compile(attend, backend="fusion", options={"inner": "eager"})
    found: list[list[torch.Tensor]] = []
    with torch.no_grad(), fusion.collect_reports() as reports:
        for _ in range(programs.draws(case)):
            q, k, v = programs.operands(case)
            leaf, mask = programs.captured(case), programs.mask(case)
            bias = None if leaf is None else programs.bias(case, leaf)
            given = q, k, v, bias, mask, programs.sink(case)
            exact = attend(*(x.double() if x is not None and x.is_floating_point() else x for x in given))
            found.append([compiled(*given), attend(*given), exact])
    assert all(site.fused for report in reports for site in report.sites)
    assert_as_exact_as_eager(*(torch.stack(of_all) for of_all in zip(*found, strict=True)), case["dtype"])
