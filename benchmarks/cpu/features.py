"""Attention that is more than a softmax over all scores, on a CPU: a study for each row of docs/performance.md.

    python -m benchmarks.cpu.features divided [--lengths 512 1024] [--heads 12] [--dtype bfloat16] [--cases of_relu]
    python -m benchmarks.cpu.features weights --train

masks: those that are data; SDPA gets its mask, made outside the time, fusion eager code and what a model passes
("without map": no dead tiles are looked for in mask tensors; "full": no mask). Masks of positions are in
`benchmarks.cpu.attention`. divided: weights that are divided by a sum of their own (docs/weights.md). weights: weights
or statistics of them as results ("alone": the attention without them; "writing": a fresh tensor of the weights' size).
mixed_heads: heads that are mixed before and after the softmax, as in CaiT ("unmixed": the same without). indexer: 512
keys for each query (DeepSeek-V3.2), as sets of keys, as a mask of all keys, and what the indexer takes by itself.
nested: a layer over jagged nested tensors, and padded. recurrent: one query over few keys, once for each token
("kernels": nothing is left to Inductor). reproducible: with that option and without it. approximate: queries and keys
on the unit sphere (scores within 1), with the measured and certified error of the last 256 rows, and what ran.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from benchmarks.common.compare import Case, Function, chosen, compiled, contestants, draw, main
from benchmarks.common.rows import full
from fusion.planning import pays

D = 64


def scores(q: Tensor, k: Tensor) -> Tensor:
    """[1, H, N, N]."""
    return q @ k.mT / q.shape[-1] ** 0.5


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax(scores(q, k).masked_fill(~keep, -torch.inf), -1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) + bias, -1) @ v


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return masked(q, k, v, documents[:, None, :, None] == documents[:, None, None, :])


def real_and_past(q: Tensor, k: Tensor, tokens: Tensor) -> Tensor:
    """[B, 1, N, N]: keys that are no padding, up to each query."""
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
    return (j <= i) & (tokens[:, None, None, :] != 0)


def padded(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    dead = ~real_and_past(q, k, tokens)
    return torch.softmax(scores(q, k).masked_fill(dead, torch.finfo(q.dtype).min), -1) @ v


def padded_call(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, real_and_past(q, k, tokens))


def masks_of(n: int, dtype: torch.dtype) -> dict[str, tuple[Function, Tensor]]:
    """Functions, and the data that each takes. Four documents of equal length; a third of the tokens is padding, on the
    left."""
    documents = (torch.arange(n) // -(-n // 4))[None]
    tokens = (torch.arange(n) >= n // 3).long()[None]
    causal = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    return {
        "packed": (packed, documents),
        "packed mask": (masked, (documents[0][:, None] == documents[0])[None, None]),
        "causal mask": (biased, torch.zeros(1, 1, n, n, dtype=dtype).masked_fill(~causal, torch.finfo(dtype).min)),
        "random": (masked, torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(1)) > 0.5),
        "padded": (padded, tokens),
        "padded call": (padded_call, tokens),
    }


def masks(options: argparse.Namespace) -> Iterator[Case]:
    for n in options.lengths or [4096]:
        operands = draw(options, *[(1, options.heads or 4, n, D)] * 3)
        known = masks_of(n, operands[0].dtype)
        for name in options.cases or known:
            plain, data = known[name]
            functions: dict[str, Function | None] = {
                "fusion": compiled(plain, strict=True),
                "without map": compiled(lambda *x, plain=plain: plain(*x), tile_maps="never"),
                "full": compiled(lambda q, k, v, _: full(q, k, v)),
                "SDPA": F.scaled_dot_product_attention if plain in (masked, biased) else None,
            }
            yield Case(name=f"{name}, N = {n}", tensors=[*operands, data], functions=functions, plain=plain)


def renormalised(q, k, v):
    """Softmax weights that are masked and normalised again: one attention."""
    w = torch.softmax(scores(q, k), -1) * (torch.arange(k.shape[-2]) % 5 > 0).to(q.dtype)
    return w / (w.sum(-1, keepdim=True) + 1e-13) @ v


def of_relu(q, k, v):
    w = torch.relu(scores(q, k)) + 1e-3
    return w / w.sum(-1, keepdim=True) @ v


RENORMALISED = {f.__name__: f for f in (renormalised, of_relu)}


def divided(options: argparse.Namespace) -> Iterator[Case]:
    for length in options.lengths or [512, 1024]:
        tensors = draw(options, *[(1, options.heads or 12, length, D)] * 3)
        for name, function in chosen(options, RENORMALISED):
            functions = contestants(function, eager=True)
            yield Case(name=f"{name}, N = {length}", tensors=tensors, functions=functions, plain=function)


def with_weights(q, k, v, statistic=lambda w: w):
    w = torch.softmax(scores(q, k), -1)
    return w @ v, statistic(w)


def with_logits(q, k, v, statistic):
    s = scores(q, k)
    return torch.softmax(s, -1) @ v, statistic(s)


WEIGHTS = {
    "weights": with_weights,
    "mean_of_heads": lambda q, k, v: with_weights(q, k, v, lambda w: w.mean(1)),
    "entropy": lambda q, k, v: with_weights(q, k, v, lambda w: -(w * torch.log(w + 1e-9)).sum(-1)),
    "key_sums": lambda q, k, v: with_weights(q, k, v, lambda w: w.sum(-2)),
    "log_sum": lambda q, k, v: with_logits(q, k, v, lambda s: s.logsumexp(-1)),
    "largest_logit": lambda q, k, v: with_logits(q, k, v, lambda s: s.amax(-1)),  # no kernel computes its gradient
}


def weights(options: argparse.Namespace) -> Iterator[Case]:
    for length in options.lengths or [1024]:
        shape = (1, options.heads or 12, length, D)
        tensors = draw(options, *[shape] * 3)
        for name, function in chosen(options, WEIGHTS):
            if options.train and name == "largest_logit":
                continue
            functions = contestants(function) | {"alone": compiled(full)}
            if not options.train:
                functions["writing"] = lambda q, *_: q.new_empty((*q.shape[:3], q.shape[2])).fill_(1.0)
            yield Case(name=f"{name}, N = {length}", tensors=tensors, functions=functions, plain=function)


def mixed(x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """x: [B, H, N, N], as CaiT of timm writes it."""
    return F.linear(x.permute(0, 2, 3, 1), matrix, bias).permute(0, 3, 1, 2)


def talking(q, k, v, before, before_bias, after, after_bias):
    return mixed(mixed(scores(q, k), before, before_bias).softmax(-1), after, after_bias) @ v


def mixed_heads(options: argparse.Namespace) -> Iterator[Case]:
    """Shapes of CaiT at 224 and 384 pixels (XXS, S, M), and longer."""
    for b, h, n, d in ((8, 4, 196, 48), (8, 8, 196, 48), (2, 8, 576, 48), (2, 16, 576, 48), (1, 8, 1024, 64),
                       (1, 8, 4096, 64)):  # fmt: skip
        if n in (options.lengths or [n]):
            tensors = draw(options, *[(b, h, n, d)] * 3, *[(h, h), (h,)] * 2)
            functions = contestants(talking) | {"unmixed": compiled(lambda q, k, v, *_: full(q, k, v))}
            yield Case(name=f"{b}, {h}, {n}, {d}", tensors=tensors, functions=functions, plain=talking)


def keys_of(index_q: Tensor, index_k: Tensor, index_weights: Tensor, keys: int = 512) -> Tensor:
    """[1, N, keys]: the keys of each query with the largest scores. index_q: [1, N, H, d], index_k: [1, N, d],
    index_weights: [1, N, H]."""
    s = F.relu(torch.matmul(index_q, index_k.transpose(-1, -2).unsqueeze(1)) * index_q.shape[-1] ** -0.5)
    s = torch.matmul(index_weights.unsqueeze(-2), s).squeeze(-2)
    future = torch.arange(s.shape[-1]) > torch.arange(s.shape[-2])[:, None]
    return s.masked_fill(future, float("-inf")).topk(min(keys, s.shape[-1]), dim=-1).indices.to(torch.int32)


def sparse_layer(q, k, v, *index):
    """[1, H, N, d_v]: causal attention over the keys that the indexer leaves, as transformers writes it."""
    indices, n = keys_of(*index), q.shape[-2]
    outside = indices.new_ones((1, n, n), dtype=torch.bool).scatter(-1, indices.long(), False).unsqueeze(1)
    mask = (torch.arange(n) <= torch.arange(n)[:, None]) & ~outside
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def as_mask() -> Function:
    """The layer, compiled so that attention sees a mask of all keys."""
    run = compiled(lambda *tensors: sparse_layer(*tensors))  # a code object of its own, which Dynamo compiles apart

    def call(*tensors: Tensor) -> Tensor:
        with mock.patch.object(pays, "sets_pay", lambda *_: "not asked for"):
            return run(*tensors)

    return call


def indexer(options: argparse.Namespace) -> Iterator[Case]:
    """Query heads, key heads, and columns of K and V: keys for each head, and keys that all heads share."""
    for name, (heads, key_heads, d, d_v) in {"heads": (2, 2, 192, 128), "latent": (24, 1, 96, 64)}.items():
        for n in options.lengths or [8192]:
            if name in (options.cases or [name]):
                tensors = draw(options, (1, heads, n, d), (1, key_heads, n, d), (1, key_heads, n, d_v))
                tensors += [torch.randn(shape) for shape in ((1, n, 4, 64), (1, n, 64), (1, n, 4))]
                functions = contestants(sparse_layer) | {"mask": as_mask()}
                for label, backend in (("indexer", "fusion"), ("Inductor's indexer", "inductor")):
                    functions[label] = compiled(lambda q, k, v, *index: keys_of(*index), backend)
                yield Case(name=f"{name}, N = {n}", tensors=tensors, functions=functions)


class Layer(nn.Module):
    """Self-attention, 512 wide, of 8 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x: nested, or padded to the longest of `lengths`."""
        q, k, v = (f(x).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        live = None if lengths is None else torch.arange(x.shape[1]) < lengths[:, None, None, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, live).transpose(1, 2).flatten(-2))


def nested(options: argparse.Namespace) -> Iterator[Case]:
    for sequences, least, most in ((64, 16, 128), (16, 64, 1024)):
        if options.lengths and most not in options.lengths:
            continue
        lengths = torch.randint(least, most + 1, (sequences,)).tolist()
        dtype = getattr(torch, options.dtype)
        layer = Layer().to(dtype)
        x = torch.nested.nested_tensor([torch.randn(n, 512, dtype=dtype) for n in lengths], layout=torch.jagged)
        inputs = {"": (x,), "padded, ": (x.to_padded_tensor(0.0), torch.tensor(lengths))}
        functions = {}
        for prefix, given in inputs.items():
            for name, run in contestants(layer, eager=not prefix).items():
                functions[prefix + name] = lambda *_, run=run, given=given: run(*given)
        yield Case(name=f"{sequences} of {least} to {most}", tensors=list(layer.parameters()), functions=functions)


class Recurrent(nn.Module):
    """A recurrent decoder that attends to what was encoded, [B, N, width], before each token."""

    def __init__(self, width: int, tokens: int = 40) -> None:
        super().__init__()
        self.cell, self.tokens = nn.Linear(2 * width, width), tokens

    def forward(self, state: Tensor, encoded: Tensor) -> Tensor:
        for _ in range(self.tokens):
            w = torch.softmax(state[:, None] @ encoded.mT * state.shape[-1] ** -0.5, -1)
            state = torch.tanh(self.cell(torch.cat([state, (w @ encoded)[:, 0]], -1)))
        return state


def recurrent(options: argparse.Namespace) -> Iterator[Case]:
    for batch, keys, width in ((1, 24, 64), (1, 24, 256), (8, 24, 64), (1, 96, 64), (32, 24, 64)):
        if keys in (options.lengths or [keys]):
            decoder = Recurrent(width).eval()
            functions = contestants(decoder) | {"kernels": compiled(decoder, strict=True)}
            tensors = draw(options, (batch, width), (batch, keys, width))
            yield Case(name=f"{batch} x {keys} x {width}", tensors=tensors, functions=functions)


def reproducible(options: argparse.Namespace) -> Iterator[Case]:
    for heads, group, n_q, n_k, d in (
        (12, 1, 512, 512, 64), (12, 1, 2048, 2048, 64), (8, 1, 1, 4096, 64), (8, 1, 1, 32768, 64),
        (8, 4, 1, 4096, 128), (8, 4, 1, 32768, 128),
    ):  # fmt: skip
        if n_q > 1 or not options.train:
            tensors = draw(options, (1, heads * group, n_q, d), *[(1, heads, n_k, d)] * 2)
            function = functools.partial(F.scaled_dot_product_attention, is_causal=n_q > 1, enable_gqa=group > 1)
            functions = {"fusion": compiled(function), "reproducible": compiled(function, reproducible=True)}
            name = f"{n_q} queries, {n_k} keys, {heads * group}/{heads} heads of {d}"
            yield Case(name=name, tensors=tensors, functions=functions, plain=function)


unscaled: Function = functools.partial(F.scaled_dot_product_attention, scale=1.0)
unscaled_causal: Function = functools.partial(unscaled, is_causal=True)


def bounded(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries and keys on the unit sphere, values standard normal; 4 heads."""
    q, k, v = torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (0.98 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))


def last_rows(inputs: tuple[Tensor, ...], is_causal: bool) -> Tensor:
    """The last 256 rows in float64 (a float64 product of everything would take longer than all else)."""
    q, k, v = (x.double() for x in inputs)
    scores, n = q[:, :, -256:] @ k.transpose(-1, -2), k.shape[-2]
    if is_causal:
        scores.masked_fill_(torch.arange(n - 256, n)[:, None] < torch.arange(n), -math.inf)
    return torch.softmax(scores, -1) @ v


def case_of(title: str, inputs: tuple[Tensor, ...], function: Function = unscaled) -> Case:
    """Approximate and exact attention on the same inputs; its name has the errors and what ran."""
    ours = compiled(lambda *x: function(*x), inner="eager", approximate="polynomial", epsilon=1e-2)
    result, certificates = ours(*inputs), fusion.last_certificates()
    error = (result[:, :, -256:].double() - last_rows(inputs, function is unscaled_causal)).norm(dim=-1).max()
    ran = sum(len(c.heads) for c in certificates if c.ran != "exact")
    what = "".join(f", degree {c.degree} ({c.features} features)" for c in certificates[:1] if c.degree)
    allowed = max(c.output_error for c in certificates)
    name = f"{title}: error {error:.1e} <= {allowed:.1e}, {ran} heads approximate{what}"
    return Case(name=name, tensors=[*inputs], functions={"fusion": ours, "exact": compiled(function, inner="eager")})


def approximate(options: argparse.Namespace) -> Iterator[Case]:
    dtype = getattr(torch, options.dtype)
    for n in options.lengths or [4096, 8192, 16384]:
        for d in (16, 32):
            yield case_of(f"bounded, d={d}, N={n}", bounded(n, d, dtype))
        yield case_of(f"causal, bounded, d=32, N={n}", bounded(n, 32, dtype), unscaled_causal)


STUDIES = {f.__name__: f for f in (masks, divided, weights, mixed_heads, indexer, nested, recurrent, reproducible,
                                  approximate)}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(__doc__, STUDIES))
