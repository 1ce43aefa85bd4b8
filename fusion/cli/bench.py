"""`fusion bench`: a model, or attention variants that are built in, as eager, Inductor and fusion run them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from fusion.cli import models
from fusion.errors import ProblemError

HELP = """Time, peak memory and error of eager, Inductor and fusion, in turns in one process.

Without a target, variants of attention that are built in. Peers beyond these: benchmarks/ in the repository."""

EXAMPLES = """examples:
  fusion bench                                         every built-in variant at N = 1024
  fusion bench --variant causal --N 4096 --heads 4 --dtype bfloat16
  fusion bench model.py:Model --seconds 5
  fusion bench --variant full --json

exit codes: 0 done; 1 fusion failed, or its error is beyond twice eager's; 2 the request was wrong"""

Tensor = torch.Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser, optional=True)
    parser.add_argument("--variant", choices=[*VARIANTS], action="append", help="only this one; may be given again")
    parser.add_argument("--N", type=int, default=1024, help="queries and keys (default %(default)s)")
    parser.add_argument("--d", type=int, default=64, help="head dimension (default %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="heads (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="per competitor (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    from fusion.api.compare import compare
    from fusion.report.report import collect_reports

    results = {}
    for model in _models(arguments):
        with collect_reports() as reports:
            measured = model.run(compare, seconds=arguments.seconds)
        plans = tuple(plan for report in reports for site in report.sites for plan in site.plans)
        results[model.name] = replace(measured, plans=plans)
        if not arguments.json:
            print(f"{model.name}\n{results[model.name]}\n")
    if arguments.json:
        print(json.dumps({name: comparison.data for name, comparison in results.items()}, indent=2))
    return int(any(comparison["fusion"].wrong for comparison in results.values()))


def _models(arguments: argparse.Namespace) -> Iterator[models.Target]:
    if arguments.target is not None:
        yield models.load(arguments)
        return
    for name in ("N", "d", "heads", "batch"):
        if getattr(arguments, name) < 1:
            raise ProblemError(f"--{name} {getattr(arguments, name)}: there is nothing to run; give a positive size")
    dtype, shape = getattr(torch, arguments.dtype), (arguments.batch, arguments.heads, arguments.N, arguments.d)
    qkv = tuple(torch.randn(shape, dtype=torch.float32, device=arguments.device).to(dtype) for _ in range(3))
    size, chosen = "x".join(map(str, shape)), models.options(arguments)
    for variant in arguments.variant or VARIANTS:
        name = f"{variant} {size} {arguments.dtype}"
        yield models.Target(name=name, function=VARIANTS[variant], args=qkv, kwargs={}, options=chosen)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention."""
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, change: Callable = lambda s, i, j: s, reach: float = math.inf) -> Tensor:
    """Key j is live for query i where j <= i, and no farther back than `reach`."""
    j = torch.arange(q.shape[-2], device=q.device)
    i = j[:, None]
    scores = change(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), i, j)
    dead = j > i if reach == math.inf else (j > i) | (i - j >= reach)
    return torch.softmax(scores.masked_fill(dead, -math.inf), -1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, and no farther back than 256 keys."""
    return causal(q, k, v, reach=256)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, with a penalty per head that grows with the distance."""
    heads = torch.arange(1, q.shape[1] + 1, device=q.device)
    slope = torch.exp2(-8 * heads / q.shape[1]).to(q.dtype)[:, None, None]
    return causal(q, k, v, lambda scores, i, j: scores - slope * (i - j))


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, scores kept within 30 by tanh."""
    return causal(q, k, v, lambda scores, i, j: torch.tanh(scores / 30) * 30)


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    function.__name__: function for function in (full, causal, window, alibi, softcap)
}
