"""How exact attention is on plain inputs: errors of fusion and of `scaled_dot_product_attention` as shares of what the
numerics rule allows, 2 (error of eager mode + eps max|reference|), over many draws.

    python -m benchmarks.cpu.accuracy [--draws 150] [--dtype float32] [--training]

Operands are normal. The reference is eager mode in float64. Prints, for each size and each result, the median and the
largest share, and how many draws were beyond the rule.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import fusion  # noqa: F401
from benchmarks.common.results import parser
from benchmarks.common.rows import full
from fusion.exactness import errors

SIZES = ((1, 512, 64), (1, 4096, 64), (256, 256, 64), (512, 512, 32), (512, 512, 64), (512, 512, 128), (1024, 1024, 64))
HEADS = 4


def results(call: Callable[..., Tensor], operands: list[Tensor], arriving: Tensor | None) -> dict[str, Tensor]:
    """The output, and the gradients where one arrives."""
    operands = [x.detach().clone().requires_grad_(arriving is not None) for x in operands]
    out = call(*operands)
    if arriving is None:
        return {"o": out}
    out.backward(arriving.to(out.dtype))
    return {"o": out.detach()} | {
        f"d{name}": x.grad for name, x in zip("qkv", operands, strict=True) if x.grad is not None
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--draws", type=int, default=150)
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments.add_argument("--training", action="store_true", help="gradients too")
    options = arguments.parse_args()
    dtype = getattr(torch, options.dtype)
    calls = {
        "fusion": torch.compile(full, backend="fusion", dynamic=True),
        "SDPA": torch.nn.functional.scaled_dot_product_attention,
    }
    print(f"{HEADS} heads, {options.dtype}; shares of the allowed error: median, largest; draws beyond it\n")
    print("| queries, keys, d | result | fusion | SDPA |\n| --- | --- | ---: | ---: |")
    for n_q, n_k, d in SIZES:
        shares: dict[tuple[str, str], list[float]] = {}
        for seed in range(options.draws):
            torch.manual_seed(seed)
            operands = [torch.randn(1, HEADS, n, d).to(dtype) for n in (n_q, n_k, n_k)]
            arriving = torch.randn(1, HEADS, n_q, d).to(dtype) if options.training else None
            eager = results(full, operands, arriving)
            exact = results(full, [x.double() for x in operands], arriving)
            for name, call in calls.items():
                for kind, value in results(call, operands, arriving).items():
                    shares.setdefault((kind, name), []).append(errors(value, eager[kind], exact[kind]).share)
        for kind in eager:
            found = [shares[kind, name] for name in calls]
            cells = [f"{statistics.median(x):.2f}, {max(x):.2f}; {sum(s > 1 for s in x)}" for x in found]
            print(f"| {n_q}, {n_k}, {d} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
