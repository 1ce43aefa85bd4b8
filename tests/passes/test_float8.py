"""Caches of keys and values in float8: the widening, and the scales, become part of the attention."""

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.ir.expr import ONE, coordinates
from fusion.runtime import kernels
from tests.float8 import FORMATS
from tests.numerics import assert_as_exact_as_eager

aten = torch.ops.aten
E4M3, E5M2 = FORMATS


def widened(q, k, v, k_scale, v_scale):
    return torch.softmax(q @ k.to(q.dtype).mT * 0.25, -1) @ v.to(q.dtype)


def by_name_of_the_dtype(q, k, v, k_scale, v_scale):
    return F.scaled_dot_product_attention(q, k.type_as(q), v.to(dtype=q.dtype, copy=True))


def scaled(q, k, v, k_scale, v_scale):
    k, v = k.to(q.dtype) * k_scale, v_scale * v.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scaled_in_float32(q, k, v, k_scale, v_scale):
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (k.to(wide) / k_scale.to(wide)).to(q.dtype), (v.to(wide) * v_scale.to(wide)).to(q.dtype)
    return torch.softmax(q @ k.mT, -1) @ v


def scaled_by_numbers(q, k, v, k_scale, v_scale):
    return torch.softmax((q * 0.3) @ (k.to(q.dtype) * 0.4).mT, -1) @ (v.to(q.dtype) / 3)


def scaled_in_place(q, k, v, k_scale, v_scale):
    return torch.softmax(q @ k.to(q.dtype).mul_(k_scale).mT, -1) @ v.to(q.dtype).mul_(v_scale)


def grouped_heads(q, k, v, k_scale, v_scale):
    k, v = (x[:, ::2].to(q.dtype) * s[:, ::2] for x, s in ((k, k_scale), (v, v_scale)))
    k = k[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape[0], 4, -1, 16)
    return F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, 1))


def part_of_a_cache(q, k, v, k_scale, v_scale):
    return torch.softmax(q @ k[:, :, 2:17].to(q.dtype).mT, -1) @ v[:, :, 2:17].to(q.dtype)


def two_caches(q, k, v, k_scale, v_scale):
    k, v = (torch.cat([x.view(torch.uint8), x.view(torch.uint8)], 2).view(x.dtype) for x in (k, v))
    return torch.softmax(q @ k.to(q.dtype).mT, -1) @ v.to(q.dtype)


def sigmoid_weights(q, k, v, k_scale, v_scale):
    return torch.sigmoid(q @ (k.to(q.dtype) * k_scale).mT) @ (v.to(q.dtype) * v_scale)


SPELLINGS = (widened, by_name_of_the_dtype, scaled, scaled_in_float32, scaled_by_numbers, scaled_in_place,
             grouped_heads, part_of_a_cache, two_caches, sigmoid_weights)  # fmt: skip


def inputs(dtype=torch.bfloat16, formats=FORMATS, scale=(1, 4, 1, 1), n=21):
    """q, k and v with strides that are not those of contiguous tensors, and scales of k and v."""
    q = torch.randn(2, 9, 4, 16).transpose(1, 2).to(dtype)
    k, v = (torch.randn(2, n, 4, 16).to(format_).transpose(1, 2) for format_ in formats)
    return [q, k, v, *(torch.rand(scale, dtype=torch.float64).add(0.5).to(dtype) for _ in range(2))]


def run(function, given, **options):
    """(the result, the sites, the graph after)"""
    torch._dynamo.reset()
    with fusion.collect_reports() as reports:
        result = torch.compile(function, backend="fusion", options={"inner": "eager", **options})(*given)
    (report,) = reports
    return result, report.sites, report.graph_after


def widenings(graph) -> int:
    """Conversions from float8 that are left."""
    casts = [n for n in graph.graph.nodes if n.target in (aten.to.dtype, aten._to_copy.default, aten.type_as.default)]
    return sum(n.args[0].meta["val"].dtype in FORMATS for n in casts)


def dtypes(site) -> list[str]:
    return [operand.dtype for operand in site.spec.operands[:3]]


@torch.no_grad()
@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_the_cache_itself_is_read(function):
    given = inputs()
    actual, (site,), graph = run(function, given, emitter="reference")
    assert dtypes(site) == ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
    assert site.spec.dtype == "bfloat16" and not widenings(graph)
    exact = function(*(x.double() if x.dtype not in FORMATS else x for x in given))
    assert_as_exact_as_eager(actual, function(*given), exact)


@torch.no_grad()
@pytest.mark.parametrize("scale", [(), (1, 4, 1, 1), (2, 4, 21, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_places_of_scales(dtype, scale):
    """Of the whole cache, of heads, of keys; those of keys multiply weights, which float16 holds badly if small: there
    they are part of the element of V."""
    given = inputs(dtype, scale=scale)
    actual, (site,), graph = run(scaled, given, emitter="auto" if dtype is torch.bfloat16 else "reference")
    of_keys = len(scale) == 4 and scale[2] > 1
    assert dtypes(site)[1] == "float8_e4m3fn"
    assert dtypes(site)[2] == "float8_e5m2"
    assert (site.spec.v_value is not None) is (of_keys and dtype is torch.float16)
    if of_keys:
        assert "j" in coordinates(site.spec.weight) or dtype is torch.float16
    else:
        assert site.spec.weight is ONE and site.spec.row_scale is not None
    exact = scaled(*(x.double() if x.dtype not in FORMATS else x for x in given))
    assert_as_exact_as_eager(actual, scaled(*given), exact)


def test_small_scales_in_float16():
    """Weights that were multiplied by them before the product would be subnormal."""
    given = inputs(torch.float16)
    given[4] = torch.full((1, 4, 1, 1), 1e-6, dtype=torch.float16)
    with torch.no_grad():
        actual, (site,), _ = run(scaled, given, emitter="reference")
        exact = scaled(*(x.double() if x.dtype not in FORMATS else x for x in given))
        assert dtypes(site)[2] == "float8_e5m2"
        assert_as_exact_as_eager(actual, scaled(*given), exact)


# --- what is left as it was -------------------------------------------------------------------------------------------


def scaled_columns(q, k, v, k_scale, v_scale):
    return torch.softmax(q @ (k.to(q.dtype) * k_scale[..., :1, :].expand(1, 4, 1, 16)).mT, -1) @ v.to(q.dtype)


def in_float64(q, k, v, k_scale, v_scale):
    return torch.softmax(q.double() @ k.double().mT, -1) @ v.double()


def added_to(q, k, v, k_scale, v_scale):
    return torch.softmax(q @ (k.to(q.dtype) + k_scale).mT, -1) @ v.to(q.dtype)


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "expected"),
    [(scaled_columns, "float8_e4m3fn"), (in_float64, "float64"), (added_to, "float8_e4m3fn")],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_no_scale_of_a_row(function, expected):
    """Is part of the element; float64 keeps its copy."""
    given = inputs(scale=(1, 4, 1, 16) if function is scaled_columns else (1, 4, 1, 1))
    actual, (site,), _ = run(function, given, emitter="reference")
    assert site.fused and dtypes(site)[1] == expected
    assert (site.spec.k_value is None) is (function is in_float64)
    exact = function(*(x.double() if x.dtype not in FORMATS else x for x in given))
    assert_as_exact_as_eager(actual, function(*given), exact, torch.bfloat16)


@torch.no_grad()
def test_a_device_without_conversions_gets_widened_copies(monkeypatch):
    monkeypatch.setattr(kernels, "reads", lambda dtype, device, request: dtype is E5M2)
    given = inputs()
    actual, (site,), graph = run(scaled, given, emitter="reference")
    assert dtypes(site) == ["bfloat16", "bfloat16", "float8_e5m2"] and widenings(graph) == 1
    exact = scaled(*(x.double() if x.dtype not in FORMATS else x for x in given))
    assert_as_exact_as_eager(actual, scaled(*given), exact)


def written_between(q, k, v, k_scale, v_scale):
    wide = k.to(q.dtype)
    k.copy_(v)
    return torch.softmax(q @ wide.mT, -1) @ v.to(q.dtype)


def scaled_query_written_between(q, k, v, k_scale, v_scale):
    scores = (q * 2) @ k.to(q.dtype).mT
    q.add_(1)
    return torch.softmax(scores, -1) @ v.to(q.dtype)


def written_before_and_after(q, k, v, k_scale, v_scale):
    k[:, :, :3] = v[:, :, :3]
    out = torch.softmax(q @ k.to(q.dtype).mT, -1) @ v.to(q.dtype)
    k.copy_(v)
    return out


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "expected"),
    [(written_between, "bfloat16"), (scaled_query_written_between, "float8_e4m3fn"),
     (written_before_and_after, "float8_e4m3fn")],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_tensors_that_change(function, expected):
    """What was made of a tensor before it changed is read itself."""
    given = inputs(formats=(E4M3, E4M3))
    ours, theirs, wide = ([x.clone() for x in given] for _ in range(3))
    wide = [x.double() if x.dtype not in FORMATS else x for x in wide]
    actual, (site,), _ = run(function, ours, emitter="reference")
    assert site.fused and dtypes(site)[1:] == [expected, "float8_e4m3fn"]
    assert_as_exact_as_eager(actual, function(*theirs), function(*wide))
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(ours, theirs, strict=True))


# --- other ways to run ------------------------------------------------------------------------------------------------


def test_gradients_of_the_query_and_of_scales():
    given, upstream = inputs(), torch.randn(2, 4, 9, 16)

    def gradients(function, wide):
        held = [x if x.dtype in FORMATS else x.detach().to(wide).requires_grad_() for x in given]
        out = function(*held)
        trained = [x for x in held if x.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, trained, upstream.bfloat16().to(wide))]

    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="fusion", options={"inner": "eager", "strict": True})
    with fusion.collect_reports() as reports:
        actual = gradients(compiled, torch.bfloat16)
    assert dtypes(reports[0].sites[0])[1:] == ["float8_e4m3fn", "float8_e5m2"]
    assert_as_exact_as_eager(actual, gradients(scaled, torch.bfloat16), gradients(scaled, torch.float64))


@torch.no_grad()
def test_one_kernel_for_a_cache_that_grows():
    def step(q, cache, length):
        k, v = cache[0, :, :, :length].to(q.dtype), cache[1, :, :, :length].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    torch._dynamo.reset()
    q, cache = torch.randn(2, 4, 1, 16, dtype=torch.bfloat16), torch.randn(2, 2, 2, 64, 16).to(E4M3)
    with fusion.collect_reports() as reports:
        compiled = torch.compile(step, backend="fusion", dynamic=True, options={"strict": True, "inner": "eager"})
        for length in (33, 41):
            eager, exact = step(q, cache, length), step(q.double(), cache, length)
            assert_as_exact_as_eager(compiled(q, cache, length), eager, exact)
    (report,) = reports
    assert dtypes(report.sites[0]) == ["bfloat16", "float8_e4m3fn", "float8_e4m3fn"]
    assert "reads    k in float8_e4m3fn, v in float8_e4m3fn" in str(report)
