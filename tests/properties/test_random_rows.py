"""Random functions of which a few rows are read: computing these alone changes nothing."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from fusion.passes.prepare.unread_rows import skip_unread_rows
from fusion.passes.trace.normalize import normalize
from tests.numerics import assert_same_in_float64

B, N, D, HEADS = 2, 7, 8, 2


def heads(x):
    return x.reshape(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def attention(x, y, w, causal):
    return merged(F.scaled_dot_product_attention(heads(x @ w), heads(y), heads(F.linear(y, w)), is_causal=causal))


def masked(x, y, w, width):
    live = torch.arange(x.shape[1])[:, None] - torch.arange(y.shape[1]) < width
    return merged(F.scaled_dot_product_attention(heads(x), heads(y @ w), heads(y), live))


def by_hand(x, y, w, fill):
    s = heads(x @ w) @ heads(y).mT * 0.5
    s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), fill)
    return merged(torch.einsum("bhij,bhjd->bhid", s.softmax(-1), heads(y)))


def written(x, part):
    x = x * 1
    part(x).add_(1)
    return x


STEPS = (
    "F.linear({x}, w)",
    "torch.addmm(w[0], {x}.reshape(-1, D), w).view({x}.shape)",
    "F.layer_norm({x}, (D,), w[1])",
    "{x} + {y}",
    "{x} * w[{digit}] + {x}",
    "F.gelu({x}) * {y}.sigmoid()",
    "{x}.softmax({dim})",
    "{x} - {x}.mean({dim}, keepdim=True)",
    "{x} * torch.rsqrt({x}.pow(2).sum(-1, True) + 1e-3)",
    "merged(heads({x}))",
    "{x}.flatten(0, 1).mm(w).unflatten(0, ({x}.shape[0], {x}.shape[1]))",
    "torch.cat({x}.chunk(2, -1)[::-1], -1)",
    "torch.cat([{y}[:, :2], {x}[:, 2:]], 1)",
    "torch.stack({y}.unbind(0), 0) + {x}",
    "torch.stack({y}.unbind(-1), -1) + {x}",
    "{x}.cumsum({dim})",
    "{x}.flip({dim}) + {y}",
    "{x}[:, :, None].expand(-1, -1, 3, -1).sum(2) + {y}[0]",
    "{x}.transpose(0, 1).contiguous().transpose(0, 1)",
    "torch.bmm(torch.bmm({x}, {y}.mT), {x})",
    "{x}.mT.contiguous().mT",
    "{x}.reshape(-1, 1, D).squeeze(1).reshape(1, *{x}.shape).squeeze()",
    "{x}.sort({dim}).values",
    "torch.var_mean({x}, {dim}, keepdim=True)[1] + {x}",
    "{x}.max({dim}, keepdim=True).values * {x}",
    "{x}.repeat_interleave(2, 1)[:, ::2]",
    "F.pad({x}, (0, 0, 1, 0))[:, :-1] + {y}",
    "F.conv1d({x}.mT, w[:, :, None].expand(-1, -1, 3), padding=1).mT",
    "{x}[:, torch.arange({x}.shape[1]).flip(0)]",
    "torch.where({x} > 0, {x}, {y})",
    "F.glu(torch.cat([{x}, {y}], -1), -1)",
    "F.rms_norm({x}, (D,)) + F.normalize({y}, dim={dim})",
    "{x}.unfold(1, 1, 1).squeeze(-1)",
    "torch.einsum('bid,de->bie', {x}, w)",
    "F.group_norm({x}.mT, 2).mT",
    "{x}.gather(1, {y}[:, :1].argsort(-1).expand(-1, {x}.shape[1], -1) % 3)",
    "written({x}, lambda x: {part})",
    "attention({x}, {y}, w, {flag})",
    "masked({x}, {y}, w, {digit} + 1)",
    "by_hand({x}, {y}, w, -{digit}e9)",
)
READS = ("{x}[:, 0]", "{x}[:, -1]", "{x}[:, -1:]", "{x}[:, :1]", "{x}[:, 1:3]", "{x}.select(1, -2)",
         "{x}.transpose(0, 1)[-1]", "{x}.reshape(-1, D)[3]", "{x}[1]", "{x}[..., :3]", "{x}[:, ::2]",
         "{x}")  # fmt: skip
PARTS = ("x", "x[:, 2:]", "x.transpose(0, 1)[-1]", "x.view(x.shape)[0]")


def text_of(seed):
    """The text of a function `run(x, w)`."""
    draw = random.Random(seed)
    lines, made = [], ["x"]
    for number in range(draw.randint(2, 9)):
        how = {"digit": draw.randint(0, 3), "dim": draw.choice((-1, -1, 1)), "flag": draw.random() < 0.5}
        step = draw.choice(STEPS).format(x=made[-1], y=draw.choice(made[-3:]), part=draw.choice(PARTS), **how)
        made.append(f"x{number}")
        lines.append(f"    {made[-1]} = {step}")
    read = draw.choice(READS[:-1])
    found = [read.format(x=made[-1])]
    if draw.random() < 0.3:
        found.append(draw.choice(READS).format(x=made[-2]))
    if draw.random() < 0.3:
        found.append(read.format(x=made[-1]) + ".exp()")
    found = [item if draw.random() < 0.2 else f"({item} * 2).tanh()" for item in found]
    return "\n".join(["def run(x, w):", *lines, f"    return [{', '.join(found)}]"])


def normalized(run, *inputs, dynamic=False):
    """The graph of a function, and its inputs as the graph takes them."""
    found = []

    def keep(module, example_inputs):
        found.append(normalize(module, example_inputs))
        return lambda *given: found.append(given) or module(*given)

    torch._dynamo.reset()
    torch.compile(run, backend=keep, fullgraph=True, dynamic=dynamic)(*inputs)
    return found


def check(seed, dynamic=False):
    """Whether rows were left out, where both ways agree."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((B, N, D), (D, D)))
    scope = dict(globals())
    exec(text := text_of(seed), scope)
    graph, inputs = normalized(scope["run"], x, w, dynamic=dynamic)
    part = copy.deepcopy(graph)
    notes = skip_unread_rows(part.graph)
    part.graph.lint()
    part.recompile()
    for actual, expected in zip(part(*inputs), graph(*inputs), strict=True):
        assert_same_in_float64(actual, expected, name=text)
        sizes = [n for n, extent in enumerate(actual.shape) if extent > 1]
        assert [actual.stride(n) for n in sizes] == [expected.stride(n) for n in sizes], text
    return bool(notes)


@pytest.mark.parametrize(("dynamic", "seeds", "least"), [(False, 18, 3), (True, 8, 1)], ids=["static", "dynamic"])
def test_random_functions_compute_what_is_read(dynamic, seeds, least):
    left_out = sum(check(seed, dynamic) for seed in range(seeds))
    assert left_out >= least


@pytest.mark.long
def test_many_random_functions_compute_what_is_read():
    for seed in range(1000, 3000):
        check(seed, seed % 3 == 0)
