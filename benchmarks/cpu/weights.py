"""Attention whose weights, or statistics of them, are needed too, on a CPU: time against Inductor, against the
attention without them, and against what writing N x N weights takes by itself.

    python -m benchmarks.cpu.weights [--length 1024] [--heads 12] [--dtype float32] [--cases weights entropy]
    python -m benchmarks.cpu.weights --train

All run in turns within one process. "alone" is the same attention, fused, without the auxiliary output; "writing" fills
a fresh tensor of the weights' size, as every call that returns weights must. --train: a step, of which the loss is the
mean square of the output plus that of the auxiliary output, and which ends with the gradients of q, k and v.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._inductor.config

from benchmarks.common.measuring import Entry, interleave
from fusion.machine import machine as find_machine

torch._inductor.config.compile_threads = 1
WIDTH = 64
Result = tuple[torch.Tensor, ...]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[1, H, N, N]."""
    return q @ k.transpose(-1, -2) / WIDTH**0.5


def alone(q, k, v) -> Result:
    return (torch.softmax(scores(q, k), -1) @ v,)


def weights(q, k, v) -> Result:
    w = torch.softmax(scores(q, k), -1)
    return w @ v, w


def mean_of_heads(q, k, v) -> Result:
    w = torch.softmax(scores(q, k), -1)
    return w @ v, w.mean(1)


def entropy(q, k, v) -> Result:
    w = torch.softmax(scores(q, k), -1)
    return w @ v, -(w * torch.log(w + 1e-9)).sum(-1)


def key_sums(q, k, v) -> Result:
    w = torch.softmax(scores(q, k), -1)
    return w @ v, w.sum(-2)


def largest_logit(q, k, v) -> Result:
    s = scores(q, k)
    return torch.softmax(s, -1) @ v, s.amax(-1)


def log_sum(q, k, v) -> Result:
    s = scores(q, k)
    return torch.softmax(s, -1) @ v, s.logsumexp(-1)


CASES: dict[str, Callable[..., Result]] = {
    function.__name__: function for function in (weights, mean_of_heads, entropy, key_sums, largest_logit, log_sum)
}
TRAINED = ("weights", "mean_of_heads", "entropy", "key_sums", "log_sum")
"""Those whose gradients are computed in kernels."""


def loss_of(function: Callable[..., Result]) -> Callable[..., torch.Tensor]:
    """The mean squares of the results."""
    return lambda *tensors: sum(result.square().mean() for result in function(*tensors))  # type: ignore[return-value]


def contestants(case: str, tensors: list[torch.Tensor], train: bool) -> list[Entry]:
    """What is timed for one case, each run once."""
    q = tensors[0]
    shape = (*q.shape[:3], q.shape[2])
    calls: dict[str, Callable[[], object]] = {}
    for name, function, backend in (
        ("fusion", CASES[case], "fusion"), ("alone", alone, "fusion"), ("inductor", CASES[case], "inductor"),
    ):  # fmt: skip
        run = torch.compile(loss_of(function) if train else function, backend=backend)
        if train:
            calls[name] = lambda run=run: torch.autograd.grad(run(*tensors), tensors)
        else:
            calls[name] = lambda run=run: run(*tensors)
    if not train:
        calls["writing"] = lambda: torch.empty(shape, dtype=q.dtype).fill_(1.0)
    for call in calls.values():
        call()
    return [Entry(name=name, call=call) for name, call in calls.items()]


def compared(ms: dict[str, float], train: bool) -> dict[str, str]:
    """The columns of a row of the table."""
    columns = {name: f"{ms[name]:.1f}" for name in ("fusion", "alone", *(["writing"] if not train else []), "inductor")}
    columns["fusion / alone"] = f"{ms['fusion'] / ms['alone']:.2f}"
    if not train:
        columns["(fusion - alone) / writing"] = f"{(ms['fusion'] - ms['alone']) / ms['writing']:.2f}"
    return columns | {"Inductor / fusion": f"{ms['inductor'] / ms['fusion']:.2f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--train", action="store_true", help="a training step")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    shape = (1, chosen.length, chosen.heads, WIDTH)
    tensors = [torch.randn(shape, dtype=getattr(torch, chosen.dtype)).transpose(1, 2) for _ in range(3)]
    tensors = [tensor.requires_grad_(chosen.train) for tensor in tensors]
    print(f"{find_machine('cpu').name}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"N = {chosen.length}, {chosen.heads} heads of {WIDTH}, {chosen.dtype}; medians in ms\n")
    for number, case in enumerate(chosen.cases or [case for case in CASES if not chosen.train or case in TRAINED]):
        torch._dynamo.reset()
        with torch.set_grad_enabled(chosen.train):
            entries = contestants(case, tensors, chosen.train)
            interleave(entries, seconds=chosen.seconds)
        columns = compared({entry.name: 1e3 * (entry.median or 0.0) for entry in entries}, chosen.train)
        if not number:
            print(f"| case | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        print(f"| {case} | {' | '.join(columns.values())} |", flush=True)


if __name__ == "__main__":
    main()
