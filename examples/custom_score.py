"""Attention that nobody has a kernel for, written as a plain PyTorch function and compiled as it stands.

Cosine similarity with a learned temperature per head, a Gaussian preference for nearby keys with a learned width per
head, a soft cap, and a causal mask. Prints what was recognised, how exact the result is, and the times side by side.

    python examples/custom_score.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
import sidebyside

B, H, N, D = 1, 8, 2048, 64


def attention(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, width: Tensor) -> Tensor:
    """`q, k, v: [B, H, N, d]`, `temperature, width: [H]`."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = q @ k.transpose(-2, -1) * temperature.exp()[:, None, None]
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None, :]
    scores = scores - ((i - j) / width[:, None, None]) ** 2
    scores = 30.0 * torch.tanh(scores / 30.0)
    return scores.masked_fill(j > i, -math.inf).softmax(dim=-1) @ v


@torch.no_grad()
def main() -> int:
    """Compile, compare with float64, time; 1 if the compiled function is less exact than the project promises."""
    torch.manual_seed(0)
    operands = [torch.randn(B, H, N, D) for _ in range(3)] + [torch.randn(H), torch.linspace(64, 1024, H)]
    exact = attention(*(x.double() for x in operands))
    versions = {
        "eager": attention,
        "inductor": torch.compile(attention, backend="inductor"),
        "fusion": torch.compile(attention, backend="fusion"),
    }
    results = {name: version(*operands) for name, version in versions.items()}
    errors = {name: (x.double() - exact).abs().max().item() for name, x in results.items()}
    print(fusion.explain(attention, *operands))
    calls = {name: lambda version=version: version(*operands) for name, version in versions.items()}
    columns = {"error against float64": {name: f"{error:.1e}" for name, error in errors.items()}}
    sidebyside.show(f"custom score, [{B}, {H}, {N}, {D}]", sidebyside.medians(calls), columns)
    allowed = 2 * (errors["eager"] + torch.finfo(torch.float32).eps * exact.abs().max().item())
    return 0 if errors["fusion"] <= allowed else 1


if __name__ == "__main__":
    raise SystemExit(main())
