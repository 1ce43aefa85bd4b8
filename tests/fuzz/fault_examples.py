"""A function for each fault of `faults.py` that comes out wrong with it, and right without it."""

from __future__ import annotations

import random

from tests.fuzz.writer import Program, Writer

SIZES = {"B": 2, "H": 4, "N": 6, "M": 6, "D": 8, "E": 8}
INPUTS = {"q": "torch.randn(B, H, N, D)", "k": "torch.randn(B, H, M, D)", "v": "torch.randn(B, H, M, E)"}
PRODUCT, ENDS = "s = q @ k.mT", ("p = s.softmax(-1)", "return p @ v")


def _function(*lines: str, trained: bool = False, **inputs: str) -> Program:
    """A function of q, k, v and further inputs, or of others of these names."""
    w = Writer(random.Random(0), SIZES, "float32", trained, lines=[*lines], arguments=INPUTS | inputs)
    return Program(text=w.text(), trained=trained, route="trace", emitter="reference", intended=True, kinds=())


def _scores(*lines: str, **inputs: str) -> Program:
    """A softmax attention in whose scores something is changed."""
    return _function(PRODUCT, *lines, *ENDS, **inputs)


_EARLIER, _SECOND_ROW = "torch.arange(M) <= torch.arange(N)[:, None]", "(torch.arange(N) == 1)[:, None]"
_PLAIN, _BIASED = _scores("s = s * 0.3"), _scores("s = s + bias", bias="torch.randn(N, M)")
_SCALED = _function("q = q * 0.35", PRODUCT, *ENDS)
_GROUPED = _function("k = k.repeat_interleave(2, 1)", PRODUCT, *ENDS, k="torch.randn(B, 2, M, D)")
_DEAD_ROW = _scores(f"s = s.masked_fill({_SECOND_ROW}, -math.inf)")
EXAMPLES = {
    "mask off by one": _scores(f"s = s.masked_fill(~({_EARLIER}), -math.inf)"),
    "fill of -inf becomes finite": _DEAD_ROW,
    "fill of finfo.min becomes -inf": _scores(f"s = s.masked_fill({_SECOND_ROW}, torch.finfo(s.dtype).min)"),
    "weights after the softmax dropped": _function(
        PRODUCT, "p = s.softmax(-1) * gate", "return p @ v", gate="torch.rand(M)"
    ),
    "sinks dropped": _function(
        PRODUCT, "p = torch.cat([s, sink.expand(B, H, N, 1)], -1).softmax(-1)[..., :-1]", "return p @ v",
        sink="torch.randn(H, 1, 1)",
    ),
    "sum of rows without what is added to it": _function(
        PRODUCT, "e = torch.exp(s - s.amax(-1, keepdim=True))", "return (e / (1 + e.sum(-1, keepdim=True))) @ v"
    ),
    "dead rows give zero": _DEAD_ROW,
    "first dimension of V's index ignored": _PLAIN,
    "heads that share keys, the wrong ones": _GROUPED,
    "a loaded bias is read at the wrong row": _BIASED,
    "scale twice": _SCALED,
    "scale of operands dropped": _SCALED,
    "bias dropped": _BIASED,
    "alpha of an addition ignored": _scores("s = torch.add(s, bias, alpha=2)", bias="torch.randn(N, M)"),
    "comparison without equality": _scores(f"s = s.masked_fill(~({_EARLIER}), -1e9)"),
    "operands of a difference swapped": _scores("s = 2 - s"),
    "tanh for sigmoid": _scores("s = s + s.sigmoid()"),
    "constants are rounded to float16": _scores(f"s = s.masked_fill({_SECOND_ROW}, -1e9)"),
    "every negative constant swallows scores": _scores(f"s = s + torch.where({_SECOND_ROW}, -20.0, 0.0)"),
    "slices begin one early": _function("k = k[..., 1:, :]", PRODUCT, *ENDS, k="torch.randn(B, H, M + 1, D)"),
    "transposition of equal sizes ignored": _function(
        PRODUCT, *ENDS, k="torch.randn(B, H, D, D)", v="torch.randn(B, H, D, E)"
    ),
    "repeat for repeat_interleave": _GROUPED,
    "tril off by one": _scores("s = s.masked_fill(torch.ones(N, M).tril() == 0, -math.inf)"),
    "triu off by one": _scores("s = s.masked_fill(torch.ones(N, M).triu(1) == 1, -math.inf)"),
    "changes in place not seen": _function(PRODUCT, "k.mul_(0.5)", *ENDS),
    "writes seen through aliases taken for private": _function(
        "k = k.clone()", "seen = k[..., 1:, :]", "k.mul_(0.5)", "s = q @ seen.mT", *ENDS,
        k="torch.randn(B, H, M + 1, D)",
    ),
    "gradients flow through detach": _function("s = q @ k.detach().mT", *ENDS, trained=True),
    "any shift is ignored by the softmax": _scores(
        f"s = s - s.masked_fill({_SECOND_ROW}, -math.inf).amax(-1, keepdim=True)"
    ),
    "softmax over any dimension": _function(PRODUCT, "p = s.softmax(-2)", "return p @ v"),
    "beta of baddbmm ignored": _function(
        "s = torch.baddbmm(bias.expand(B, N, M), q, k.mT, beta=0.5)", *ENDS, q="torch.randn(B, N, D)",
        k="torch.randn(B, M, D)", v="torch.randn(B, M, E)", bias="torch.randn(M)",
    ),
    "four-dimensional arguments are read at their first element": _PLAIN,
}  # fmt: skip
"""By name of the fault."""
