"""One attention variant, forward or with its gradient, run twice, for compute-sanitizer and ncu to look at.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m benchmarks.gpu.observed causal
ncu --kernel-name regex:attention_ --set full python -m benchmarks.gpu.observed causal --N 4096 --heads 16
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common.rows import GPU_ROWS, Problem
from benchmarks.gpu.check import draw, gradients
from benchmarks.gpu.device import Gpu, Rehearsal, running


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", choices=[*GPU_ROWS])
    parser.add_argument("--N", type=int, default=389)
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--forward", action="store_true", help="without the gradient")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    device = Rehearsal() if options.rehearse else Gpu()
    with running(device):
        problem = Problem(B=1, H=options.heads, N=options.N, d=options.d, dtype=torch.bfloat16)
        operands, grad = draw(options.row, problem, device)
        call = device.compiled(GPU_ROWS[options.row].plain, "fusion", options={"inner": "eager"})
        for _ in range(2):
            if options.forward:
                with torch.no_grad():
                    call(*operands)
            else:
                gradients(call, operands, grad)
        device.synchronize()


if __name__ == "__main__":
    main()
