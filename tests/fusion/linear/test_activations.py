"""GELU inside a product: every spelling, what is refused, and values at the ends of the range."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.linear import products
from fusion.linear.activations import Gelu, gelu_of
from fusion.torch_private import devices
from tests.fusion.linear.graphs import redirected
from tests.numerics import assert_as_exact_as_eager, assert_as_exact_over_draws, assert_runs_as_exact_as_eager

pytestmark = pytest.mark.skipif(bool(products.lacks()), reason=products.lacks() or "it is there")

ROOT = math.sqrt(2 / math.pi)
SPELLINGS = {
    "erf": (F.gelu, "none"),
    "tanh": (lambda y: F.gelu(y, approximate="tanh"), "tanh"),
    "erf of a quotient": (lambda y: y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0))), "none"),
    "tanh with a power": (lambda y: 0.5 * y * (1.0 + torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0)))), "tanh"),
    "tanh, factored": (lambda y: 0.5 * y * (1.0 + torch.tanh(y * 0.7978845608 * (1.0 + 0.044715 * y * y))), "tanh"),
    "of a batch": (lambda y: F.gelu(y.unflatten(0, (2, -1))), "none"),
}
OTHERS = {
    "another constant": lambda y: 0.5 * y * (1 + torch.erf(y * 0.7)),
    "another cube": lambda y: 0.5 * y * (1 + torch.tanh(ROOT * (y + 0.0447 * y**3))),
    "half of it": lambda y: 0.25 * y * (1 + torch.erf(y * 0.5**0.5)),
    "y is read": lambda y: F.gelu(y) + y,
    "erf is read": lambda y: (F.gelu(y), torch.erf(y * 0.5**0.5).exp()),
    "terms that cancel": lambda y: F.gelu(y) + (y**3 - y * y * y),
    "a tensor for a constant": lambda y: y * torch.full_like(y, 0.5) * (1 + torch.erf(y * 0.5**0.5)),
    "less exact on the way": lambda y: F.gelu(y.half()).float(),
    "high powers": lambda y: ((((y**3) ** 3) ** 3) ** 3) ** 3,
    "SiLU": F.silu,
    "ReLU": F.relu,
}


class Layer(torch.nn.Module):
    def __init__(self, activation, k: int = 96, n: int = 48) -> None:
        super().__init__()
        self.linear, self.activation = torch.nn.Linear(k, n), activation

    def forward(self, x):
        return self.activation(self.linear(x))


def gelus(module: torch.nn.Module, x: torch.Tensor, training: bool = False) -> list[str]:
    """The last argument but one of all products of a compiled module."""
    passed = []
    real = products.product

    def product(x, w, bias, gelu="", pack=None):
        passed.append(gelu)
        return real(x, w, bias, gelu)

    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(training):
        patch.setattr(products, "product", product)
        torch.compile(module, backend=redirected)(x)
    return passed


DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if devices.onednn_has(dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_gelu_is_inside(spelling: str, dtype: torch.dtype) -> None:
    activation, approximate = SPELLINGS[spelling]
    module = Layer(activation).to(dtype)
    exact = Layer(activation).double()
    exact.load_state_dict(module.state_dict())
    assert gelus(module, torch.randn(products.FEW, 96, dtype=dtype)) == [approximate]
    run = torch.compile(module, backend=redirected)

    def drawn():
        x = 3 * torch.randn(products.FEW, 96, dtype=dtype)
        return run(x), module(x), exact(x.double())

    with torch.no_grad():
        assert_as_exact_over_draws(drawn, check_strides=True)


@pytest.mark.parametrize("other", OTHERS)
def test_others_are_not(other: str) -> None:
    module, x = Layer(OTHERS[other]), torch.randn(products.FEW, 96)
    assert gelus(module, x) == [""]
    torch._dynamo.reset()
    with torch.no_grad():
        assert_runs_as_exact_as_eager(torch.compile(module, backend=redirected), module, x)


def test_in_training_the_backward_reads_the_product() -> None:
    module = Layer(F.gelu)
    assert gelus(module, torch.randn(products.FEW, 96), training=True) == [""]


def test_deep_sums_have_it_after_their_parts() -> None:
    module, x = Layer(F.gelu, k=3000), torch.randn(products.FEW, 3000)
    assert gelus(module, x) == [""]


ENDS = [0.0, -0.0, 1e-30, 20.0, -5.0, -104.0, 1e13, -1e13, 3e38, -3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", [name for name, (_, approximate) in SPELLINGS.items() if approximate == "tanh"])
def test_after_a_product_a_sigmoid_takes_the_place_of_tanh(spelling: str, dtype: torch.dtype) -> None:
    activation, aten = SPELLINGS[spelling][0], torch.ops.aten
    x, w = torch.tensor([*ENDS, *torch.linspace(-9, 9, 999)], dtype=dtype)[:, None], torch.ones(1, 1, dtype=dtype)
    trace = make_fx(lambda x, w: activation(x @ w), select_decomp_table(), tracing_mode="fake")
    module = trace(x, w)
    gelu = gelu_of(next(iter(module.graph.find_nodes(op="call_function", target=aten.mm.default))))
    assert gelu is not None
    gelu.shorten()
    module.graph.lint()
    module.recompile()
    assert {aten.tanh.default, aten.sigmoid.default} & {node.target for node in module.graph.nodes} == {
        aten.sigmoid.default
    }
    parts, result = [*range(len(ENDS)), slice(len(ENDS), None)], module(x, w)
    for part in parts:
        y = x[part].double()  # 1 + tanh is 0 in float64 where the result is -1e-28
        exact = y * torch.sigmoid(2 * ROOT * (y + 0.044715 * y**3))
        assert_as_exact_as_eager(result[part], activation(x[part]), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_ends_of_the_range(approximate: str, dtype: torch.dtype) -> None:
    """NaN and infinities come out as eager has them, and so do numbers whose cubes overflow."""
    x, w = torch.tensor(ENDS, dtype=dtype)[:, None], torch.ones(64, 1, dtype=dtype)
    result = torch.ops.fusion.linear(x, w, None, approximate, True)
    for actual, value in zip(result, x @ w.t(), strict=True):
        exact = F.gelu(value.double(), approximate=approximate)
        assert_as_exact_as_eager(actual, F.gelu(value, approximate=approximate), exact)


def test_readers_of_the_result() -> None:
    def graph_of(function) -> Gelu | None:
        graph = torch.fx.symbolic_trace(function).graph
        for node in graph.nodes:
            node.meta["val"] = torch.empty(6, 6)
        return gelu_of(next(iter(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))))

    aten = torch.ops.aten

    def gelu(x, w):
        y = aten.mm.default(x, w)
        erf = aten.add.Tensor(aten.erf.default(aten.mul.Tensor(y, 0.5**0.5)), 1)
        return aten.mul.Tensor(aten.mul.Tensor(y, 0.5), erf)

    to_product = graph_of(lambda x, w: aten.mm.default(aten.reshape.default(gelu(x, w), [6, 6]), w))
    to_gate = graph_of(lambda x, w: aten.mul.Tensor(gelu(x, w), x))
    assert to_product is not None and not to_product.is_read_elementwise
    assert to_gate is not None and to_gate.is_read_elementwise
