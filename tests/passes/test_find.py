"""Every spelling of attention is found and exact; everything else is left alone, exact, and says why."""

import pytest
import torch

import fusion
from fusion.caching import BoundedCache
from fusion.validation import sites
from tests.numerics import assert_as_exact_as_eager, assert_same
from tests.passes import spellings


def _inputs(dtype: torch.dtype = torch.float32, n: int = 21, m: int | None = None) -> list[torch.Tensor]:
    """q, k, v with strides that are not those of a contiguous [B, H, N, d]."""
    packed = torch.randn(2, n, 3, 4, 16)
    q, k, v = (packed[:, :, part].transpose(1, 2).to(dtype) for part in range(3))
    return [q, k, v] if m is None else [q, *(torch.randn(2, 4, m, 16).to(dtype) for _ in range(2))]


def _compile(function, inputs, **options):
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(function, backend="fusion", options={"inner": "eager", **options})(*inputs)
        eager = function(*inputs)
        exact = function(*(x.double() for x in inputs))
    return actual, eager, exact, [site for report in reports for site in report.sites]


@pytest.mark.parametrize("function", spellings.FUSED, ids=lambda f: f.__name__)
def test_is_fused_and_as_exact_as_eager(function):
    actual, eager, exact, sites = _compile(function, _inputs())
    assert [site.reason for site in sites] == [None]
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)
    assert actual.stride() == eager.stride()


def _some(step: int, first: int) -> list:
    """Every so many of the spellings; the others are run in the long set."""
    marks = lambda k: [] if k % step == first else [pytest.mark.long]
    return [pytest.param(function, marks=marks(k)) for k, function in enumerate(spellings.FUSED)]


@pytest.mark.parametrize("function", _some(3, 1), ids=lambda f: f.__name__)
def test_with_other_numbers_of_queries_and_keys(function):
    inputs = _inputs(n=7, m=19)
    try:
        function(*inputs)
    except RuntimeError:
        pytest.skip("the spelling is for as many queries as keys")
    actual, eager, exact, sites = _compile(function, inputs)
    assert all(site.fused for site in sites)
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function",
    [spellings.operators_and_mt, spellings.softmax_in_float32, spellings.softmax_in_the_dtype_of_the_values,
     spellings.masked_fill_in_place, spellings.alibi,
     spellings.soft_capped, spellings.differential, spellings.sink_last, spellings.sigmoid_attention],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_in_half_precision(function, dtype):
    actual, eager, exact, sites = _compile(function, _inputs(dtype))
    assert all(site.fused for site in sites)
    assert_as_exact_as_eager(actual, eager, exact, dtype)


@pytest.mark.parametrize("function", _some(6, 0), ids=lambda f: f.__name__)
def test_with_dynamic_sizes_one_graph_serves_other_lengths(function, monkeypatch):
    """Nor does validation, which is not to know the spec, make a size static."""
    monkeypatch.setattr(sites, "_verdicts", BoundedCache())
    with torch.no_grad(), fusion.collect_reports() as reports:
        compiled = torch.compile(function, backend="fusion", dynamic=True, options={"inner": "eager"})
        for n in (21, 34, 50):
            inputs = _inputs(n=n)
            exact = function(*(x.double() for x in inputs))
            assert_as_exact_as_eager(compiled(*inputs), function(*inputs), exact, torch.float32)
    assert [site.reason for report in reports for site in report.sites] == [None]


@pytest.mark.parametrize("function", spellings.LEFT, ids=lambda f: f.__name__)
def test_is_left_alone_with_a_reason(function):
    actual, eager, _, sites = _compile(function, _inputs())
    assert not any(site.fused for site in sites)
    assert all(spellings.LEFT[function] in site.reason for site in sites)
    assert_same(actual, eager)


def test_two_equal_layers_have_one_spec():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return x + spellings.masked_fill_infinity(q, k, v).transpose(1, 2).flatten(2)

    report = fusion.explain(torch.nn.Sequential(Layer(), Layer()).eval().requires_grad_(False), torch.randn(2, 9, 32))
    assert report.fused == 2
    assert report.sites[0].specs == report.sites[1].specs
    assert report.sites[0].spec.to_json() == report.sites[1].spec.to_json()


def test_modules_of_torch():
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True).eval()
    attention = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.attention = encoder, attention

        def forward(self, x, padding):
            x = self.encoder(x, src_key_padding_mask=padding)
            return self.attention(x, x, x, need_weights=False)[0]

    model, x = Both().eval(), torch.randn(2, 11, 32)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 7:] = True
    with torch.no_grad(), fusion.collect_reports() as reports:
        actual = torch.compile(model, backend="fusion", options={"inner": "eager"})(x, padding)
        eager, exact = model(x, padding), model.double()(x.double(), padding)
    assert [site.reason for report in reports for site in report.sites] == [None, None]
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)


def test_a_table_of_distances_is_read_in_place():
    """Not gathered to a bias of every row and key first."""
    *_, sites = _compile(spellings.table_bias, _inputs())
    assert [operand.rank for operand in sites[0].spec.operands[3:]] == [2]


def test_values_that_met_a_gate_are_not_taken_for_weights():
    """YOLO: V is first in the product, and comes from an earlier attention by a gate and a convolution."""

    def attention(x, weight):
        q, k, v = torch.conv2d(x, weight).flatten(2).split(32, 1)
        return (v @ (q.mT @ k).softmax(-1).mT).view(x.shape)

    def twice(x, weight):
        return attention(torch.nn.functional.silu(attention(x, weight)), weight)

    actual, eager, exact, sites = _compile(twice, [torch.randn(2, 32, 4, 5), 0.3 * torch.randn(96, 32, 1, 1)])
    assert [site.reason for site in sites] == [None, None]
    assert_as_exact_as_eager(actual, eager, exact, torch.float32)
