"""Random score programs, shapes, strides, masks and dtypes through the whole backend, against float64 eager."""

import math

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F

import fusion
from tests.numerics import assert_as_exact_as_eager

_UNARY = {
    "tanh": lambda s: 5 * torch.tanh(s / 5), "sigmoid": torch.sigmoid, "silu": F.silu, "abs": torch.abs,
    "clamp": lambda s: s.clamp(-2, 3), "square": lambda s: 0.1 * s.square(), "softplus": F.softplus,
    "gelu": F.gelu, "sin": torch.sin, "leaky": lambda s: F.leaky_relu(s, 0.1), "neg": torch.neg,
    "log1p": lambda s: torch.log1p(s.abs()), "floor": lambda s: torch.floor(s) * 0.5,
}  # fmt: skip
_BIASES = ("none", "scalar", "head", "row", "column", "full", "alibi", "table")
_MASKS = ("none", "causal", "window", "padding", "dense", "documents", "prefix")


@st.composite
def cases(draw):
    h = draw(st.sampled_from([1, 2, 4]))
    return {
        "b": draw(st.integers(1, 3)), "h": h, "group": draw(st.sampled_from([g for g in (1, 2, 4) if h % g == 0])),
        "n": draw(st.integers(1, 70)), "m": draw(st.integers(1, 150)),
        "d": draw(st.sampled_from([1, 5, 8, 16, 17, 33, 64])), "e": draw(st.sampled_from([1, 7, 16, 40, 64])),
        "scale": draw(st.sampled_from([1.0, 0.125, -0.3])),
        "unary": draw(st.lists(st.sampled_from(sorted(_UNARY)), max_size=2)),
        "bias": draw(st.sampled_from(_BIASES)), "mask": draw(st.sampled_from(_MASKS)),
        "fill": draw(st.sampled_from((torch.finfo(torch.float32).min, -1e9))), "finite": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        "layout": draw(st.sampled_from(["bhnd", "bnhd", "strided"])), "safe_rows": draw(st.booleans()),
    }  # fmt: skip


def _tensor(b, h, n, d, layout, dtype):
    if layout == "bnhd":
        return torch.randn(b, n, h, d).to(dtype).transpose(1, 2)
    if layout == "strided":
        return torch.randn(b, h, 2 * n, d + 3).to(dtype)[:, :, ::2, 1 : d + 1]
    return torch.randn(b, h, n, d).to(dtype)


def _bias(case, dtype):
    b, h, n, m = (case[x] for x in "bhnm")
    shapes = {"scalar": (), "head": (h, 1, 1), "row": (n, 1), "column": (b, 1, 1, m), "full": (1, h, n, m)}
    if case["bias"] == "alibi":
        return torch.linspace(0.1, 1, h)[:, None, None] * (torch.arange(m)[None] - torch.arange(n)[:, None])
    if case["bias"] == "table":
        index = (torch.arange(n)[:, None] - torch.arange(m)[None]).clamp(-8, 8) + 8
        return torch.randn(17, h)[index].permute(2, 0, 1)
    return torch.randn(shapes[case["bias"]]).to(dtype) if case["bias"] in shapes else None


def _mask(case):
    b, n, m = case["b"], case["n"], case["m"]
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    if case["mask"] == "dense":
        keep = torch.rand(b, 1, n, m) < 0.7
    elif case["mask"] == "padding":
        keep = (torch.arange(m)[None] >= torch.arange(b)[:, None] * (m // 3))[:, None, None]
    elif case["mask"] == "documents":
        keep = (i * 3 // max(n, 1) == j * 3 // max(m, 1))[None, None]
    else:
        keep = {"causal": j <= i, "window": (i - j).abs() < 9, "prefix": (j <= i) | (j < 5)}[case["mask"]][None, None]
    return keep | (j == 0) if case["safe_rows"] else keep


@hypothesis.given(cases())
@hypothesis.settings(max_examples=30)
def test_random_programs(case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    b, h, n, m, d, e = (case[x] for x in "bhnmde")
    q = _tensor(b, h, n, d, case["layout"], case["dtype"])
    k = _tensor(b, h // case["group"], m, d, case["layout"], case["dtype"])
    v = _tensor(b, h // case["group"], m, e, case["layout"], case["dtype"])
    bias, mask = _bias(case, case["dtype"]), None if case["mask"] == "none" else _mask(case)

    def attend(q, k, v, bias, mask):
        k, v = (x.repeat_interleave(case["group"], 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * case["scale"]
        for name in case["unary"]:
            s = _UNARY[name](s)
        s = s if bias is None else s + bias.to(s.dtype)
        if mask is not None:
            s = s.masked_fill(~mask, max(case["fill"], torch.finfo(s.dtype).min) if case["finite"] else -math.inf)
        return torch.softmax(s, -1, dtype=torch.float32).to(v.dtype) @ v if s.dtype != v.dtype else s.softmax(-1) @ v

    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(attend, backend="fusion", options={"inner": "eager"})(q, k, v, bias, mask)
        eager = attend(q, k, v, bias, mask)
        exact = attend(q.double(), k.double(), v.double(), None if bias is None else bias.double(), mask)
    assert all(site.fused for report in reports for site in report.sites)
    assert_as_exact_as_eager(actual, eager, exact, case["dtype"])
