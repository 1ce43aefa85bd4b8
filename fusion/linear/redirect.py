"""Operator `fusion::linear`, and the pass that replaces products of a graph below autograd by `fusion::linear` where
that pays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fusion.linear import activations, packing, products, speeds
from fusion.passes import nodes
from fusion.torch_private import devices, inductor
from fusion.torch_private.dynamo import counters
from fusion.torch_private.inductor import CustomGraphPass, is_packaging
from fusion.torch_private.operators import register_fake
from fusion.torch_private.tracing import is_watched


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str, chosen: bool, packed: str = "") -> Tensor:
    """`torch.ops.fusion.linear`, in graphs whose gradients are traced: `x: [m, k]` times `w: [n, k]`, transposed, plus
    `bias: [n]`, and GELU of that where `gelu` is the `approximate` of one. chosen: oneDNN was chosen when the graph was
    compiled, as all sizes were known; otherwise the sizes of the call decide. packed: w may be packed, and this is how
    the weight is stored; it may be transposed, and in another dtype."""
    w = _stored_in_rows(weight, packed)
    if x.dtype is torch.float32:
        chosen = not products.stays(x.shape[0]) and (chosen or _pays(x, w))
    may_be_packed = bool(packed) and packing.may_be_packed(weight, packed)
    if devices.onednn_may_run() and chosen:
        pack = functools.partial(packing.for_onednn, weight, w, x) if may_be_packed else None
        return products.product(x, w if pack else w.to(x.dtype), bias, gelu, pack)
    w = w.to(x.dtype)
    if may_be_packed and x.dtype is torch.float32 and (form := packing.for_mkl(weight, w, x.shape[0])) is not None:
        out = devices.mkl_product(x, form, w, bias)
    else:
        out = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
    return F.gelu(out, approximate=gelu) if gelu else out


def _stored_in_rows(weight: Tensor, packed: str) -> Tensor:
    return weight.t() if packed == packing.COLUMNS else weight


def _pays(x: Tensor, w: Tensor) -> bool:
    return speeds.onednn_pays(*x.shape, w.shape[0], products.copied(x, w), torch.get_num_threads())


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str, chosen: bool, packed: str = "") -> Tensor:
    return x.new_empty((x.shape[0], _stored_in_rows(weight, packed).shape[0]))


VERSION = 7
"""To be raised with every change of what the op computes or of the pass: Inductor's caches are keyed by it."""

_library = torch.library.Library("fusion", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str gelu, bool chosen, str packed='') -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)
_library.impl("linear", linear, "CPU")
register_fake(_library, "fusion::linear", _fake, __file__)


def called(*arguments: Any) -> Tensor:
    """Call that Inductor's Python code makes: of the operator where somebody watches operators, else of its function,
    which saves some 9 microseconds."""
    return torch.ops.fusion.linear(*arguments) if is_watched() else linear(*arguments)


def register_inductor_codegen() -> None:
    """Let Inductor's Python code call the function; versions of torch without the hook call the operator."""
    inductor.write_with("torch.ops.fusion.linear.default", _code)


def _code(node: Any, wrapper: Any) -> str:
    wrapper.add_import_once("from fusion.linear.redirect import called as fusion_linear")
    return f"fusion_linear({', '.join(node.codegen_args())})"


aten, prims = torch.ops.aten, torch.ops.prims
GELU = 3
"""Position of that argument of `fusion::linear`."""
DTYPES = (torch.float32, torch.bfloat16)
INSIDE = "fusion_gelu_inside"
"""Name of Inductor's counter of products with GELU inside."""
MANY = 1024
"""Rows, or terms, that are assumed of a size that is not known: where oneDNN is not faster then, nothing changes."""


def counter(by_onednn: bool, packed: bool) -> str:
    """Name of Inductor's counter of products."""
    return f"fusion_{'packed_' * packed}products_by_{'onednn' if by_onednn else 'mkl'}"


class ProductsPass(CustomGraphPass):
    """Sends float32 products on CPUs to the faster library, and lets GELU be computed in products where that is faster,
    or else in fewer operations. always: to oneDNN, and in products, whatever is faster. dtypes: those of the products.
    packed: parameters are packed for their products.

    Packages of AOTInductor stay unchanged: they would need our operator where they run.
    """

    def __init__(self, always: bool, dtypes: Sequence[torch.dtype] = DTYPES, packed: bool = False) -> None:
        self.always, self.threads, self.packed = always, torch.get_num_threads(), packed
        self.dtypes = tuple(filter(devices.onednn_has, dtypes))

    def __call__(self, graph: Graph) -> None:
        if is_packaging() or not devices.onednn_may_run():
            return
        for node in graph.nodes:
            if (product := _product(node, self.packed)) is None:
                continue
            call, by_onednn = node, self._goes(product, node)
            if by_onednn or self._packs(product):
                call = _replace(graph, node, product, by_onednn and (self.always or product.is_chosen))
                counters["inductor"][counter(by_onednn, bool(product.packed))] += 1
                if by_onednn and (gelu := self._gelu(product, call)) is not None:
                    call.update_arg(GELU, gelu.approximate)
                    gelu.remove()
                    counters["inductor"][INSIDE] += 1
            if (gelu := activations.gelu_of(call)) is not None:
                gelu.shorten()

    def uuid(self) -> str:
        """Key of everything but the graph that results depend on."""
        chosen = [] if self.always else [speeds.of_threads(self.threads, dtype) for dtype in self.dtypes]
        return f"fusion, products {VERSION}, {self.threads} threads, {self.dtypes}: {chosen or 'always'}" + (
            ", packed" if self.packed else ""
        )

    def _packs(self, product: _Product) -> bool:
        """Whether the weight of a product that stays with MKL is packed."""
        rows, is_parameter = product.x.shape[0], product.packed in (packing.ROWS, packing.COLUMNS)
        has_many = not isinstance(rows, int) or rows >= products.FEW
        return is_parameter and has_many and product.x.dtype is torch.float32

    def _goes(self, product: _Product, node: Node) -> bool:
        (m, k), n, dtype = product.x.shape, product.w.shape[0], product.x.dtype
        if dtype not in self.dtypes or k == 0:
            return False
        if dtype is torch.bfloat16:  # oneDNN's anyway
            return bool(product.packed) or self._gelu(product, node) is not None
        if self.always:
            return True
        if product.packed and products.stays(product.x.shape[0]):
            return False
        copied = products.copied(product.x, product.w) if product.is_static and not product.packed else 0
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
    packed: right is a weight that may be packed, stored in this way."""

    x: Tensor
    w: Tensor
    left: Node
    right: Node
    added: Node | None
    packed: str = ""

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
        if self.packed or not _are_known(*self.w.shape, *self.w.stride()) or self.w.is_contiguous():
            return 0.0
        return k / (max(m, 1) if isinstance(m, int) else MANY)


def _are_known(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _product(node: Node, packed: bool = False) -> _Product | None:
    """Product of a node that oneDNN can compute, else None. packed: with the parameter that may be packed."""
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
    weight, stored = _weight(right, x.dtype) if packed and node.target is not aten.bmm.default else (None, "")
    return _Product(x=x, w=w.mT, left=left, right=weight or right, added=added[0] if added else None, packed=stored)


def _weight(right: Node, dtype: torch.dtype) -> tuple[Node | None, str]:
    """Matrix that a graph reads, of which an operand `[k, n]` is the transpose or a cast to this dtype, and how it is
    stored."""
    turned = False
    while True:
        match right.target, right.args:
            case aten.permute.default, (Node() as of, [1, 0]):
                right, turned = of, not turned
            case prims.convert_element_type.default, (Node() as of, to) if to is dtype:
                right = of
            case _:
                break
    if right.op != "placeholder" or not _is_ours(nodes.fake(right)):
        return None, ""
    return right, packing.ROWS if turned else packing.COLUMNS


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
    return _Product(x=value, w=weight, left=x, right=w, added=bias, packed=packing.CONSTANT)


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
        weight = right if product.packed else call(product.w, aten.permute.default, right, [1, 0])
        arguments = left, weight, bias, "", chosen, product.packed
        result = linear = call(value[0] if batched else value, torch.ops.fusion.linear.default, *arguments)
        if batched:
            result = call(value, aten.unsqueeze.default, result, 0)
        if further is not None:
            result = call(value, aten.add.Tensor, result, further)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return linear
