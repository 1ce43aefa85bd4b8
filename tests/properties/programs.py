"""Random attentions: score programs, shapes, strides, masks and dtypes, as hypothesis draws them.

A case is a dictionary of choices. `attention(case)` is the plain PyTorch function of it, whose inputs are `tensor`s for
Q, K and V, `captured(case)` for what is added to the scores, and `mask(case)`.
"""

import math

import hypothesis.strategies as st
import torch
import torch.nn.functional as F

UNARY = {
    "tanh": lambda s: 5 * torch.tanh(s / 5), "sigmoid": torch.sigmoid, "silu": F.silu, "abs": torch.abs,
    "clamp": lambda s: s.clamp(-2, 3), "square": lambda s: 0.1 * s.square(), "softplus": F.softplus,
    "gelu": F.gelu, "sin": torch.sin, "leaky": lambda s: F.leaky_relu(s, 0.1), "neg": torch.neg,
    "log1p": lambda s: torch.log1p(s.abs()), "floor": lambda s: torch.floor(s) * 0.5,
}  # fmt: skip
BIASES = ("none", "scalar", "head", "row", "column", "full", "alibi", "table")
MASKS = ("none", "causal", "window", "padding", "dense", "documents", "prefix")
BUCKETS = 17


@st.composite
def cases(
    draw,
    queries=(1, 70),
    keys=(1, 150),
    widths=(1, 5, 8, 16, 17, 33, 64),
    dtypes=(torch.float32, torch.float32, torch.bfloat16, torch.float16),
):
    """Choices for one attention. queries, keys: ranges of lengths; widths: head dimensions of Q and K."""
    h = draw(st.sampled_from([1, 2, 4]))
    return {
        "b": draw(st.integers(1, 3)), "h": h, "group": draw(st.sampled_from([g for g in (1, 2, 4) if h % g == 0])),
        "n": draw(st.integers(*queries)), "m": draw(st.integers(*keys)),
        "d": draw(st.sampled_from(widths)), "e": draw(st.sampled_from([1, 7, 16, 40, 64])),
        "scale": draw(st.sampled_from([1.0, 0.125, -0.3])),
        "unary": draw(st.lists(st.sampled_from(sorted(UNARY)), max_size=2)),
        "bias": draw(st.sampled_from(BIASES)), "mask": draw(st.sampled_from(MASKS)),
        "fill": draw(st.sampled_from((torch.finfo(torch.float32).min, -1e9))), "finite": draw(st.booleans()),
        "dtype": draw(st.sampled_from(dtypes)), "sink": draw(st.booleans()),
        "layout": draw(st.sampled_from(["bhnd", "bnhd", "strided"])), "safe_rows": draw(st.booleans()),
    }  # fmt: skip


def draws(case):
    """How often to draw the tensors of a case and compare all together: the error of a few elements is luck."""
    return 1 if case["b"] * case["h"] * case["n"] * case["e"] >= 64 else 8


def tensor(b, h, n, d, layout, dtype):
    """Random `[b, h, n, d]`, laid out as a layer makes it or as a strided view."""
    if layout == "bnhd":
        return torch.randn(b, n, h, d).to(dtype).transpose(1, 2)
    if layout == "strided":
        return torch.randn(b, h, 2 * n, d + 3).to(dtype)[:, :, ::2, 1 : d + 1]
    return torch.randn(b, h, n, d).to(dtype)


def operands(case):
    """Q, K and V of a case."""
    keys = case["b"], case["h"] // case["group"], case["m"]
    sizes = ((case["b"], case["h"], case["n"], case["d"]), (*keys, case["d"]), (*keys, case["e"]))
    return [tensor(*size, case["layout"], case["dtype"]) for size in sizes]


def captured(case):
    """The tensor that the bias of a case is made of, or None."""
    b, h, n, m = (case[x] for x in "bhnm")
    shapes = {"scalar": (), "head": (h, 1, 1), "row": (n, 1), "column": (b, 1, 1, m), "full": (1, h, n, m)}
    if case["bias"] == "alibi":
        return torch.linspace(0.1, 1, h)
    if case["bias"] == "table":
        return torch.randn(BUCKETS, h)
    return torch.randn(shapes[case["bias"]]).to(case["dtype"]) if case["bias"] in shapes else None


def sink(case):
    """A logit per head that takes part in the sum of its rows, or None."""
    return torch.randn(case["h"]) if case["sink"] else None


def bias(case, leaf):
    """What is added to the scores, from `captured(case)`."""
    i, j = torch.arange(case["n"])[:, None], torch.arange(case["m"])[None]
    if case["bias"] == "alibi":
        return leaf[:, None, None] * (j - i)
    if case["bias"] == "table":
        return leaf[(i - j).clamp(-(BUCKETS // 2), BUCKETS // 2) + BUCKETS // 2].permute(2, 0, 1)
    return leaf


def mask(case):
    """Which scores are kept, or None."""
    if case["mask"] == "none":
        return None
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


def attention(case):
    """The function of Q, K, V, a bias, a mask, a sink and a temperature (each of which may be None) that a case stands
    for."""

    def attend(q, k, v, bias, mask, sink=None, temperature=None):
        k, v = (x.repeat_interleave(case["group"], 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * case["scale"]
        s = s if temperature is None else s * temperature
        for name in case["unary"]:
            s = UNARY[name](s)
        s = s if bias is None else s + bias.to(s.dtype)
        if mask is not None:
            s = s.masked_fill(~mask, max(case["fill"], torch.finfo(s.dtype).min) if case["finite"] else -math.inf)
        if sink is not None:
            s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)], -1)
        w = torch.softmax(s, -1, dtype=torch.float32).to(v.dtype) if s.dtype != v.dtype else s.softmax(-1)
        return (w if sink is None else w[..., :-1]) @ v

    return attend
