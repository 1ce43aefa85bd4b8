"""Gradients of fused attentions: against eager in float64, and through everything that autograd can do with them."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion  # noqa: F401  (registers the backend)
from fusion.ir import AttentionSpec, Normalizer, Operand, Output
from fusion.ir.expr import SCORE, C, E, I, J, const, coord, size
from fusion.ir.integers import integer
from fusion.ir.ops import apply
from fusion.runtime import op  # noqa: F401
from fusion.runtime.guards import failures_raised
from tests.numerics import assert_as_exact_as_eager, assert_runs_as_exact_as_eager, assert_same


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def plain(q, k, v):
    return torch.softmax(scores(q, k), -1) @ v


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def biased(q, k, v, bias):
    return torch.softmax(scores(q, k) + bias, -1) @ v


def scaled_after(q, k, v, bias):
    """The factor stands outside of everything: kernels apply it within the exponential."""
    return torch.softmax((q @ k.transpose(-1, -2) + bias) * 0.4, -1) @ v


def scaled_slopes(q, k, v, slope):
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    return torch.softmax((q @ k.transpose(-1, -2) + slope[:, None, None] * distance) / 3, -1) @ v


def table(q, k, v, weights):
    """A relative position bias read from a table [buckets, H]."""
    n, m = q.shape[-2], k.shape[-2]
    distance = (torch.arange(n)[:, None] - torch.arange(m)).clamp(-8, 8) + 8
    return torch.softmax(scores(q, k) + weights[distance].permute(2, 0, 1), -1) @ v


def slopes(q, k, v, slope):
    """ALiBi with slopes that are trained."""
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    return torch.softmax(scores(q, k) + slope[:, None, None] * distance, -1) @ v


def capped(q, k, v, cap):
    return torch.softmax(cap * torch.tanh(scores(q, k) / cap), -1) @ v


def tempered(q, k, v, temperature):
    return torch.softmax(scores(q, k) * temperature.exp()[:, None, None], -1) @ v


def sunk(q, k, v, sink):
    s = scores(q, k)
    column = sink.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
    return torch.softmax(torch.cat([s, column], -1), -1)[..., :-1] @ v


def sunk_slopes(q, k, v, both):
    """Slopes and sinks: the weights of the keys do not add up to one."""
    slope, sink = both.unbind(0)
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    s = scores(q, k) + slope[:, None, None] * distance
    return torch.softmax(torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1), -1)[..., :-1] @ v


def weighted(q, k, v, factor):
    """A trained mask multiplied into the weights."""
    return (torch.softmax(scores(q, k), -1) * factor) @ v


def gated(q, k, v, bias):
    return torch.sigmoid(scores(q, k) + bias) @ v


def doubled(q, k, v, bias):
    """One captured tensor used twice."""
    return torch.softmax(scores(q, k) * bias + bias, -1) @ v


def detached(q, k, v, bias):
    """A gradient that ends inside of the region."""
    return torch.softmax(scores(q, k) + bias + 2 * bias.detach() * bias, -1) @ v


def by_hand(q, k, v, bias):
    s = scores(q, k) + bias
    e = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True) @ v


@pytest.fixture(autouse=True)
def _no_silent_fallback():
    """A kernel that fails is left for the reference interpreter, whose numbers would pass."""
    with failures_raised():
        yield


B, H, N, M, D = 2, 4, 19, 23, 8
CASES = [
    (plain, None), (causal, None), (grouped, None), (biased, (1, H, N, M)), (biased, (B, 1, 1, M)),
    (scaled_after, (1, H, N, M)), (scaled_after, (H, 1, M)), (scaled_slopes, (H,)), (table, (17, H)), (slopes, (H,)),
    (capped, ()), (tempered, (H,)), (sunk, (H,)), (weighted, (H, N, M)), (gated, (H, 1, 1)), (doubled, (1, H, N, M)),
    (detached, (H, N, M)), (by_hand, (H, N, M)),
]  # fmt: skip
NAMES = [f"{function.__name__}{'' if shape is None else list(shape)}" for function, shape in CASES]


def inputs(shape, dtype=torch.float32, n=N, m=M):
    """Q, K, V (Q as a layer makes it, [B, N, H, d] transposed) and what is captured."""
    q = torch.randn(B, n, H, D, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(B, H, m, D, dtype=dtype), torch.randn(B, H, m, D + 4, dtype=dtype)
    extra = [] if shape is None else [torch.rand(shape, dtype=dtype) + 0.5]
    return [t.requires_grad_() for t in (q, k, v, *extra)]


def compiled(function, inner="eager", emitter="auto", **more):
    options = {"inner": inner, "emitter": emitter, "strict": True}
    return torch.compile(function, backend="fusion", options=options, fullgraph=True, **more)


def gradients(function, tensors, upstream):
    out = function(*tensors)
    wanted = [t for t in tensors if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype).expand_as(out))]


FEW, DRAWS = 16, 8
"""Of gradients of few elements, eager's error is one draw: as many upstream gradients are compared together."""


def check(function, tensors, emitter="auto", inner="eager", run=None):
    """Output and gradients are as exact as eager's."""
    run = compiled(function, inner, emitter) if run is None else run
    shape = function(*tensors).shape
    few = min(t.numel() for t in tensors if t.requires_grad) < FEW
    upstreams = [torch.randn(shape) for _ in range(DRAWS if few else 1)]

    def results(function, tensors):
        found = zip(*(gradients(function, tensors, upstream) for upstream in upstreams), strict=True)
        return [torch.stack(draws) for draws in found]

    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    assert_as_exact_as_eager(results(run, tensors), results(function, tensors), results(function, exact))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("function", "shape"), CASES, ids=NAMES)
@pytest.mark.parametrize("emitter", ["reference", "auto"])
def test_gradients_are_as_exact_as_eagers(request, function, shape, emitter):
    if function is capped and emitter == "auto":
        reason = (
            "the gradient of one number that every score reads, a sum of tanh(u) - u (1 - tanh(u)^2), is less exact"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    check(function, inputs(shape), emitter)


def test_slopes_beside_sinks():
    check(sunk_slopes, inputs((2, H)))


def test_rows_without_a_live_key_have_no_part_in_slopes():
    """Their weights are NaN, but the gradient ends at the mask."""

    def padded(q, k, v, slope):
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
        live = (distance <= 0) & (torch.arange(k.shape[-2]) >= 3)
        return torch.softmax((scores(q, k) + slope[:, None, None] * distance).masked_fill(~live, -math.inf), -1) @ v

    *frozen, slope = inputs((H,))
    check(padded, [*(t.detach() for t in frozen), slope])


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_a_factor_of_a_fill_in_tiles_that_a_second_mask_hides(fill):
    """Of -inf its gradient is 0 times that, NaN, in all but the first column."""

    def windowed(q, k, v, factor):
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
        s = scores(q, k).masked_fill(distance > 0, fill) * factor[:, None]
        return torch.softmax(s.masked_fill((distance > 0) | (distance < -2), fill), -1) @ v

    tensors = inputs((H, 150), n=150, m=150)
    check(windowed, tensors)
    nan = gradients(compiled(windowed), tensors, torch.ones(()))[-1].isnan()
    assert int(nan.sum()) == (H * 149 if fill == -math.inf else 0)


@pytest.mark.parametrize(("n", "m"), [(30, 40_000), (40_000, 30), (1_100, 4_400), (40, 2048), (40, 2000)])
def test_sums_over_long_sequences(n, m):
    check(plain, inputs(None, n=n, m=m))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        pytest.param(*case, id=name, marks=[] if case[0] in (plain, causal, table, sunk, gated) else [pytest.mark.long])
        for case, name in zip(CASES, NAMES, strict=True)
    ],
)
def test_bfloat16_gradients(function, shape):
    tensors = [t.detach().bfloat16().requires_grad_() for t in inputs(shape)]
    check(function, tensors)


@pytest.mark.parametrize("m", [1, 33])
def test_bfloat16_gradients_of_rows_that_attend_to_one_key(m):
    """The weight is 1, and no score changes it: a delta of rounded outputs would leave a hundredth of dO there."""
    q, k, v = (torch.randn(2, 2, n, 16, dtype=torch.bfloat16).requires_grad_() for n in (19, m, m))
    keep = torch.arange(m) == m // 2

    def function(q, k, v):
        return torch.softmax((q @ k.transpose(-1, -2) * 0.1).masked_fill(~keep, -torch.inf), -1) @ v

    compiled = torch.compile(function, backend="fusion", options={"inner": "eager", "strict": True})
    found = torch.autograd.grad(compiled(q, k, v).sum(), (q, k))
    assert all(torch.count_nonzero(gradient) == 0 for gradient in found)


@pytest.mark.parametrize(("function", "shape"), CASES, ids=NAMES)
def test_gradcheck_in_float64(function, shape):
    tensors = inputs(shape, torch.float64, 5, 6)
    if function in (biased, scaled_after, weighted, doubled, detached, by_hand) and shape[-2] > 1:
        tensors[3] = torch.rand(*shape[:-2], 5, 6, dtype=torch.float64, requires_grad=True)
    elif shape and shape[-1] == M:
        tensors[3] = torch.rand(*shape[:-1], 6, dtype=torch.float64, requires_grad=True)
    if function is detached:  # numerical differences do not know of detach
        pytest.skip("the function differentiated numerically is another one")
    assert torch.autograd.gradcheck(compiled(function, "eager", "reference"), tensors, nondet_tol=1e-12, fast_mode=True)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (1, 2), (0, 3)])
def test_gradients_of_some_inputs_only(needed):
    tensors = [t.detach().requires_grad_(number in needed) for number, t in enumerate(inputs((1, H, N, M)))]
    check(biased, tensors)


KINKS = {
    "relu": torch.relu, "leaky": lambda s: F.leaky_relu(s, 0.2), "clamp": lambda s: s.clamp(-1, 2),
    "clamp_min": lambda s: s.clamp(min=1), "clamp_reversed": lambda s: s.clamp(2, -1), "relu6": F.relu6,
    "hardtanh": lambda s: F.hardtanh(s, -1, 2), "hardsigmoid": lambda s: F.hardsigmoid(3 * s), "abs": torch.abs,
    "maximum": lambda s: torch.maximum(s, torch.ones_like(s)), "elu": F.elu, "threshold_where":
    lambda s: torch.where(s > 0, s, torch.zeros_like(s)),
}  # fmt: skip


def every_kink(s):
    """All of them in one kernel, in shares that do not make up for each other."""
    return sum(kink(s) / (number + 2) for number, kink in enumerate(KINKS.values()))


@pytest.mark.parametrize(
    ("kink", "emitter"),
    [*((kink, "reference") for kink in KINKS.values()), (every_kink, "auto")],
    ids=[*KINKS, "all"],
)
def test_gradients_at_kinks_are_torchs_choice(kink, emitter):
    """Scores are small integers, so that many of them stand exactly where a function has two slopes."""

    def function(q, k, v):
        return torch.softmax(kink(q @ k.transpose(-1, -2)), -1) @ v

    tensors = [torch.randint(-1, 2, (1, 2, n, 4)).float().requires_grad_() for n in (9, 11)] + [
        torch.randn(1, 2, 11, 8)
    ]
    check(function, tensors, emitter)


def test_no_gradient_keeps_nothing():
    function = compiled(plain)
    tensors = [t.detach() for t in inputs(None)]
    assert not function(*tensors).requires_grad
    assert_runs_as_exact_as_eager(function, plain, *tensors)
    with torch.no_grad():
        assert not function(*inputs(None)).requires_grad


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_every_inner_compiler(inner):
    check(biased, inputs((1, H, N, M)), inner=inner)


def test_further_calls_with_other_shapes():
    function = compiled(plain, dynamic=True)
    for n, m in ((19, 23), (40, 17), (7, 64)):
        check(plain, inputs(None, n=n, m=m), run=function)


def test_retained_graph_and_accumulation():
    tensors = inputs(None)
    out = compiled(plain)(*tensors)
    out.sum().backward(retain_graph=True)
    once = [t.grad.clone() for t in tensors]
    out.sum().backward()
    assert_same([t.grad for t in tensors], [2 * first for first in once])


def test_activation_checkpointing():
    tensors = inputs((1, H, N, M))

    def wrapped(*args):
        return checkpoint(biased, *args, use_reentrant=False)

    for function in (
        compiled(biased, "aot_eager"),
        torch.compile(wrapped, backend="fusion", options={"inner": "aot_eager"}),
    ):
        check(biased, tensors, run=functools.partial(checkpoint, function, use_reentrant=False))


def test_functional_gradient():
    """Compiled together with the transform."""
    tensors = inputs(None)

    def loss(q, k, v):
        return plain(q, k, v).square().sum()

    eager = torch.func.grad(loss, argnums=(0, 1, 2))
    inside = torch.compile(eager, backend="fusion", options={"inner": "aot_eager"})
    assert_runs_as_exact_as_eager(inside, eager, *tensors)


def test_compiled_together_with_its_gradient():
    """AOTAutograd allows a second derivative of what is inside, and none of the compiled function itself."""
    tensors = inputs(None)

    def penalty(q, k, v):
        return sum(g.square().sum() for g in torch.func.grad(lambda *x: plain(*x).sin().sum(), argnums=(0, 1))(q, k, v))

    options = {"inner": "aot_eager", "strict": True, "transforms": "always"}
    check(penalty, tensors, run=torch.compile(penalty, backend="fusion", options=options, fullgraph=True))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(causal(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_model_trains_as_in_eager(inner):
    torch.manual_seed(1)
    eager = torch.nn.Sequential(Block(), Block())
    fused, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"inner": inner, "strict": True}
    function = torch.compile(fused, backend="fusion", options=options, fullgraph=True)
    batches = [torch.randn(2, 24, 32) for _ in range(4)]

    def trained(model, function):
        """The parameters after a step per batch."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches:
            x = x.to(model[0].out.weight.dtype)
            loss = (function(x) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return dict(model.named_parameters())

    assert_as_exact_as_eager(trained(fused, function), trained(eager, eager), trained(exact, exact))


def simple_spec(dims):
    """softmax(0.3 s) without a mask, written out."""

    def access(row, column):
        return coord("b0"), coord("b1"), row, column

    spec = AttentionSpec(
        sizes=("B0", "B1", "Nq", "Nk"), batch=(size("B0"), size("B1")), n_q=size("Nq"), n_k=size("Nk"),
        d=integer(D), d_v=integer(D + 4),
        operands=tuple(Operand(dtype="float32", rank=4, name=name) for name in "qkv"),
        q=access(I, C), k=access(J, C), v=access(J, E), score=apply("fmul", SCORE, const(0.3)),
        normalizer=Normalizer.SOFTMAX,
        dtype="float32", out_dtype="float32", output=Output(dims=("b0", "b1", "i", "e"), order=dims),
    )  # fmt: skip
    return spec.to_json()


@pytest.mark.parametrize("dims", [("b0", "b1", "i", "e"), ("b0", "i", "b1", "e")])
def test_operators_obey_their_contracts(dims):
    spec = simple_spec(dims)
    tensors = [t.detach().contiguous().requires_grad_() for t in inputs(None)]
    sizes = [B, H, N, M]
    plain = [t.detach() for t in tensors]
    for emitter in ("reference", "auto"):
        torch.library.opcheck(torch.ops.fusion.attention.default, (tensors, sizes, spec, emitter))
        torch.library.opcheck(torch.ops.fusion.attention_below_autograd.default, (plain, sizes, spec, emitter))
    torch.library.opcheck(torch.ops.fusion.attention_forward.default, (tensors, sizes, spec, emitter))
    out, statistics = torch.ops.fusion.attention_forward(plain, sizes, spec, "auto")
    arguments = (torch.randn_like(out), out, statistics, plain, sizes, spec, "auto", [True, False, True])
    torch.library.opcheck(torch.ops.fusion.attention_backward.default, arguments)
    for steps, given in (("tangents 101", [plain[0], plain[2]]), ("gradients 110 1; tangents 0001", [out, out])):
        arguments = ([*tensors, *given], sizes, spec, "auto", steps)
        torch.library.opcheck(torch.ops.fusion.attention_derivative.default, arguments)


def test_a_gradient_of_its_own_is_kept():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def function(q, k, v):
        return plain(Twice.apply(q), k, v)

    ours = torch.compile(function, backend="fusion", options={"inner": "aot_eager"})
    check(function, inputs(None), run=ours)
