"""Dropout in GPU kernels: the mask is that of every other emitter, and the backward's is the forward's."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="kernels need triton")

import fusion
from benchmarks.offline.facts import facts_of
from fusion.codegen import reference
from fusion.codegen.triton.differentiable import Differentiable
from fusion.ir.primitives import hashed
from fusion.planning.choice import Tile
from tests.numerics import assert_as_exact_as_eager

B, H, N_Q, N_K = 2, 3, 40, 50


def plain(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1), 0.3) @ v


def inputs(dtype, d=16):
    return [torch.randn(B, H, n, d, dtype=dtype) for n in (N_Q, N_K, N_K)]


def spec_and_sizes(dtype, d=16):
    torch._dynamo.reset()
    site = fusion.explain(plain, *inputs(dtype, d)).sites[0]
    assert site.fused
    return site.spec, list(site.sizes[0].values())


def kept_by_the_reference(spec, operands, sizes):
    """Which weights the reference keeps, [B, H, N_q, N_k]: its outputs where the values are unit vectors."""
    q, k, v, seed = operands
    units = torch.eye(N_K, dtype=torch.float64).split(v.shape[-1], dim=1)
    units = [torch.nn.functional.pad(u, (0, v.shape[-1] - u.shape[1])).expand(B, H, -1, -1) for u in units]
    weights = [reference.run(spec, [q.double(), k.double(), u, seed], sizes) for u in units]
    return torch.cat(weights, -1)[..., :N_K] != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_under_the_mask_of_the_reference(dtype):
    spec, sizes = spec_and_sizes(dtype)
    seed = torch.tensor([(1 << 40) + 0x9E3779B9])
    operands = [*inputs(dtype), seed]
    needs = (True, True, True, False)
    run = Differentiable(spec, Tile(rows=32, keys=32, warps=4, stages=1))
    out, statistics = run.outputs(operands, sizes)
    grad = torch.randn(out.shape).to(dtype)
    got = run.backward(grad, out, statistics, operands, sizes, needs)
    kept = kept_by_the_reference(spec, operands, sizes)

    def explicit(dtype):
        q, k, v = (x.to(dtype).requires_grad_() for x in operands[:3])
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) * kept / 0.7
        result = weights.to(dtype) @ v
        return [result.detach(), *torch.autograd.grad(result, (q, k, v), grad.to(dtype))]

    assert_as_exact_as_eager([out, *got], explicit(dtype), explicit(torch.float64), check_dtype=False)


def test_the_hash_is_the_same_integer():
    """Also where 32-bit words run over."""
    import triton
    import triton.language as tl

    from fusion.codegen.triton import interpret, module
    from fusion.codegen.triton.mathematics import HELPERS

    text = f"""import triton
import triton.language as tl
{HELPERS["hashed"]}

@triton.jit
def kernel(key_ptr, counter_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, hashed(tl.load(key_ptr + at), tl.load(counter_ptr + at)))
"""
    assert triton and tl
    generator = torch.Generator().manual_seed(0)
    key, counter = (torch.randint(-(2**62), 2**62, (256,), generator=generator) for _ in "kc")
    out = torch.empty(256, dtype=torch.int64)
    with interpret.decorating():
        loaded = module.load(text)
    with interpret.running():
        loaded.kernel[(1,)](key, counter, out, N=256)
    assert torch.equal(out, hashed(key, counter))


@pytest.mark.parametrize(("target", "d"), [("sm_90", 64), ("sm_90", 128), ("gfx942", 64)])
def test_kernels_with_dropout_compile(target, d):
    facts = facts_of(spec_and_sizes(torch.bfloat16, d)[0], target, training=True)
    for fact in facts:
        assert fact.fits and not fact.lost and not fact.warnings, fact
        assert not fact.spilled or target != "sm_90", fact
