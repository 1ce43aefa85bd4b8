"""Operator `fusion::linear`, and the pass that replaces products of a graph below autograd by `fusion::linear` where
that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fusion.linear import activations, products, speeds
from fusion.passes import nodes
from fusion.torch_private import devices
from fusion.torch_private.dynamo import counters
from fusion.torch_private.inductor import CustomGraphPass, is_packaging
from fusion.torch_private.operators import register_fake


def linear(x: Tensor, w: Tensor, bias: Tensor | None, gelu: str, chosen: bool, frozen: bool = False) -> Tensor:
    """`torch.ops.fusion.linear`, in graphs whose gradients are traced: `x: [m, k]` times `w: [n, k]`, transposed, plus
    `bias: [n]`, and GELU of that where `gelu` is the `approximate` of one. chosen: oneDNN was chosen when the graph was
    compiled, as all sizes were known; otherwise the sizes of the call decide. frozen: w is a constant of the graph."""
    if x.dtype is torch.float32:
        chosen = not products.stays(x.shape[0]) and (chosen or _pays(x, w))
    if devices.onednn_may_run() and chosen:
        return products.product(x, w, bias, gelu, frozen)
    out = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
    return F.gelu(out, approximate=gelu) if gelu else out


def _pays(x: Tensor, w: Tensor) -> bool:
    return speeds.onednn_pays(*x.shape, w.shape[0], products.copied(x, w), torch.get_num_threads())


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, gelu: str, chosen: bool, frozen: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


VERSION = 6
"""To be raised with every change of what the op computes or of the pass: Inductor's caches are keyed by it."""

_library = torch.library.Library("fusion", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor w, Tensor? bias, str gelu, bool chosen, bool frozen=False) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)
_library.impl("linear", linear, "CPU")
register_fake(_library, "fusion::linear", _fake, __file__)


aten = torch.ops.aten
GELU = 3
"""Position of that argument of `fusion::linear`."""
DTYPES = (torch.float32, torch.bfloat16)
COUNTED, INSIDE = "fusion_products_by_onednn", "fusion_gelu_inside"
"""Names of Inductor's counters."""
MANY = 1024
"""Rows, or terms, that are assumed of a size that is not known: where oneDNN is not faster then, nothing changes."""


class ProductsPass(CustomGraphPass):
    """Sends float32 products on CPUs to the faster library, and lets GELU be computed in products where that is faster,
    or else in fewer operations. always: to oneDNN, and in products, whatever is faster. dtypes: those of the products.

    Packages of AOTInductor stay unchanged: they would need our operator where they run.
    """

    def __init__(self, always: bool, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
        self.always, self.threads = always, torch.get_num_threads()
        self.dtypes = tuple(filter(devices.onednn_has, dtypes))

    def __call__(self, graph: Graph) -> None:
        if is_packaging() or not devices.onednn_may_run():
            return
        for node in graph.nodes:
            if (product := _product(node)) is None:
                continue
            call = node
            if self._goes(product, node):
                call = _replace(graph, node, product, self.always or product.is_chosen)
                counters["inductor"][COUNTED] += 1
                if (gelu := self._gelu(product, call)) is not None:
                    call.update_arg(GELU, gelu.approximate)
                    gelu.remove()
                    counters["inductor"][INSIDE] += 1
            if (gelu := activations.gelu_of(call)) is not None:
                gelu.shorten()

    def uuid(self) -> str:
        """Key of everything but the graph that results depend on."""
        chosen = [] if self.always else [speeds.of_threads(self.threads, dtype) for dtype in self.dtypes]
        return f"fusion, products {VERSION}, {self.threads} threads, {self.dtypes}: {chosen or 'always'}"

    def _goes(self, product: _Product, node: Node) -> bool:
        (m, k), n, dtype = product.x.shape, product.w.shape[0], product.x.dtype
        if dtype not in self.dtypes or k == 0:
            return False
        if dtype is torch.bfloat16:  # oneDNN's anyway
            return self._gelu(product, node) is not None
        if self.always:
            return True
        if product.is_frozen and products.stays(product.x.shape[0]):
            return False
        copied = products.copied(product.x, product.w) if product.is_static and not product.is_frozen else 0
        m, k, n = (size if isinstance(size, int) else MANY for size in (m, k, n))
        return speeds.onednn_pays(m, k, n, copied, self.threads)

    def _gelu(self, product: _Product, node: Node) -> activations.Gelu | None:
        """GELU that is to be computed in the product of a node. One that is computed in parts cannot have it."""
        k, dtype = product.x.shape[1], product.x.dtype
        if isinstance(k, int) and products.width(k, dtype) < k or node.target is aten.bmm.default:
            return None
        if (gelu := activations.gelu_of(node)) is None or self.always:
            return gelu
        measured = speeds.of_threads(self.threads, dtype)
        return gelu if measured.gelu_pays(gelu.approximate, gelu.is_read_elementwise, product.turned) else None


def is_large(value: Any) -> bool:
    """Whether a value is a matrix that is not small, or a batch of them, in one of our dtypes on a CPU."""
    return (
        _is_ours(value)
        and value.dim() >= 2
        and all(not isinstance(size, int) or size >= speeds.LEAST for size in value.shape[-2:])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """x: [m, k] and w: [n, k], as fake tensors; left: [.., m, k], right: [.., k, n] and the added tensor, as nodes.
    is_frozen: w is a constant, and right is of its shape."""

    x: Tensor
    w: Tensor
    left: Node
    right: Node
    added: Node | None
    is_frozen: bool = False

    @property
    def bias(self) -> Node | None:
        """The added tensor where it is one row that is known to be as wide as the product."""
        value, n = nodes.fake(self.added), self.w.shape[0]
        if value is None or value.dim() != 1 or not isinstance(n, int) or not isinstance(value.shape[0], int):
            return None
        return self.added if value.shape[0] == n else None

    @property
    def is_chosen(self) -> bool:
        """Whether no choice is left for run time."""
        return self.is_static or self.x.dtype is torch.bfloat16

    @property
    def is_static(self) -> bool:
        """Whether all sizes are known."""
        return _are_known(*self.x.shape, *self.w.shape, *self.x.stride(), *self.w.stride())

    @property
    def turned(self) -> float:
        """Elements of a weight that is known not to be in rows, for each element of the result."""
        m, k = self.x.shape
        if self.is_frozen or not _are_known(*self.w.shape, *self.w.stride()) or self.w.is_contiguous():
            return 0.0
        return k / (max(m, 1) if isinstance(m, int) else MANY)


def _are_known(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _product(node: Node) -> _Product | None:
    """Product of a node that oneDNN can compute, else None."""
    if devices.is_mkl_product(node):
        return _frozen(node)
    if node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
        return None
    if len(node.args) != (3 if node.target is aten.addmm.default else 2) or "val" not in node.meta:
        return None
    arguments: list[Any] = list(node.args)
    *added, left, right = arguments
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    x, w = nodes.fake(left), nodes.fake(right)
    if not _is_ours(x) or not _is_ours(w):
        return None
    if x.dim() == 3:
        if not isinstance(x.shape[0], int) or x.shape[0] != 1:
            return None
        x, w = x[0], w[0]
    return _Product(x=x, w=w.mT, left=left, right=right, added=added[0] if added else None)


def _frozen(node: Node) -> _Product | None:
    """Product of a weight that Inductor has frozen and packed for MKL. Without readers the packed weight is dropped."""
    arguments: list[Any] = list(node.args)
    x, _, w, bias, _ = arguments
    value = nodes.fake(x)
    if not isinstance(w, Node) or w.op != "get_attr" or not _is_ours(value) or "val" not in node.meta:
        return None
    weight: Any = getattr(node.graph.owning_module, str(w.target), None)
    if not _is_ours(weight) or value.dim() != 2:
        return None
    return _Product(x=value, w=weight, left=x, right=w, added=bias, is_frozen=True)


def _is_ours(value: Any) -> bool:
    """Whether this is a tensor with strides in one of our dtypes on a CPU."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype in DTYPES and value.device.type == "cpu" and value.layout is torch.strided


def _replace(graph: Graph, node: Node, product: _Product, chosen: bool) -> Node:
    """Replace a product by `fusion::linear`, which is returned. An added tensor that is no bias is added to its result,
    where Inductor fuses it with the operations that follow."""

    def call(value: Any, target: Any, *arguments: Any) -> Node:
        result = graph.call_function(target, arguments)
        result.meta = node.meta | {"val": value}
        return result

    left, right, bias, value = product.left, product.right, product.bias, node.meta["val"]
    further = product.added if bias is None else None
    batched = node.target is aten.bmm.default
    with graph.inserting_before(node):
        if batched:
            left, right = call(product.x, aten.select.int, left, 0, 0), call(product.w.mT, aten.select.int, right, 0, 0)
        turned = right if product.is_frozen else call(product.w, aten.permute.default, right, [1, 0])
        arguments = left, turned, bias, "", chosen, product.is_frozen
        result = linear = call(value[0] if batched else value, torch.ops.fusion.linear.default, *arguments)
        if batched:
            result = call(value, aten.unsqueeze.default, result, 0)
        if further is not None:
            result = call(value, aten.add.Tensor, result, further)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return linear
