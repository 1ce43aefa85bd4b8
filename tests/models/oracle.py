"""An independent look at Dynamo's graphs: how many attention sites there are, and what kinds of them.

It knows nothing of the compiler's own passes: a site is a softmax (or a fused attention call) whose result reaches a
matrix product through nodes that keep its size, and its kinds are read off the nodes between the products by name.
It is a witness for tests ("were all sites found, and is every kind of the field's table met?"), not a matcher: it
proves nothing about a site.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import torch
from torch import fx

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "__matmul__", "mm", "addmm", "tensordot", "_grouped_mm"}
FUSED_CALLS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
# The rows of the field's table, as this module names them.
KINDS = (
    "scale_mul scale_div scale_before_product scale_tensor additive_mask scale_and_mask learned_bias "
    "several_additive_terms activation_bias masked_fill where soft_cap sinks row_maximum clamp "
    "several_products gather relative_shift cosine baddbmm in_place slice_after masked_fill_after "
    "multiply_after several_readers float32_softmax rope qk_norm grouped_heads dv_differs nq_differs einsum bmm_3d "
    "five_d fused_call bare"
).split()


def op(node: fx.Node) -> str:
    """`add`, `masked_fill_`, ...: the operation's name, however it was called."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return getattr(node.target, "__name__", str(node.target))
    return node.op


def shape(node: object) -> tuple[int, ...] | None:
    """The sizes of a node's tensor, symbolic ones by their hint."""
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(int(s) if isinstance(s, int) else int(s.node.hint or 0) for s in value.shape)


def _size(node: object) -> int:
    sizes = shape(node)
    return 0 if sizes is None else math.prod(sizes)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if shape(n) is not None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One attention: the node that normalises, where it stands in the model's source, and what it does."""

    node: str
    location: str
    kinds: frozenset[str]


def sites(graph: fx.Graph) -> list[Site]:
    """Attention sites of a graph that Dynamo handed to a backend, but for those whose result nothing reads."""
    found, read = [], _read(graph)
    for node in filter(read.__contains__, graph.nodes):
        name = op(node)
        if name in FUSED_CALLS:
            found.append(Site(node=node.name, location=location(node), kinds=frozenset({"fused_call"})))
        elif name in ("softmax", "_softmax", "_safe_softmax") and (after := _consumers(node)) is not None:
            chain, products = _main_chain(node)
            if products:  # else weights of another origin, or queries and keys beyond a graph break
                kinds = frozenset(_kinds(node, chain, products, after))
                found.append(Site(node=node.name, location=location(node), kinds=kinds))
    return found


def _read(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the outputs of a graph, or what it writes in place, are made of."""
    in_place = re.compile(r"setitem|\w*[^_]_")
    read, todo = set[fx.Node](), [n for n in graph.nodes if n.op == "output" or in_place.fullmatch(op(n))]
    while todo:
        if (node := todo.pop()) not in read:
            read.add(node)
            todo += node.all_input_nodes
    return read


def location(node: fx.Node) -> str:
    """`modeling_bert.py:130` of the innermost frame in a model's source."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    if not frames:
        return ""
    file, line = frames[-1].split('"')[1], frames[-1].split("line ")[1].split(",")[0]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


_PASSING = set(
    """to type type_as float half bfloat16 dropout contiguous clone view reshape permute transpose unsqueeze squeeze
    flatten unflatten expand mul mul_ imul __mul__ masked_fill masked_fill_ where nan_to_num getitem narrow split pad
    chunk unbind div truediv sub add iadd cat softmax swapaxes movedim select index_select sigmoid""".split()
)


def _consumers(softmax: fx.Node) -> list[fx.Node] | None:
    """Nodes from the softmax to the products that read its weights, or None where it reaches none."""
    if len(shape(softmax) or ()) < 3:
        return None
    size, seen, reached, queue = _size(softmax), {softmax}, [], [softmax]
    path = []
    while queue:
        node = queue.pop()
        for user in node.users:
            name = op(user)
            if name in PRODUCTS:
                reached.append(user)
            elif user not in seen and name in _PASSING and (shape(user) is None or size / 4 <= _size(user) <= 2 * size):
                seen.add(user)
                path.append(user)
                queue.append(user)
    return path + reached if reached else None


def _upstream(node: fx.Node, limit: int, *, stop: set[str] = frozenset()) -> Iterator[fx.Node]:
    """Nodes above `node`, at most `limit`, breadth first, not beyond nodes named in `stop`."""
    queue, seen = [node], {node}
    while queue and len(seen) < limit:
        for source in queue.pop(0).all_input_nodes:
            if source not in seen:
                seen.add(source)
                yield source
                if op(source) not in stop:
                    queue.append(source)


# Scores do not come through these.
_ELSEWHERE = {"placeholder", "get_attr", "linear", "layer_norm", "rms_norm", "conv1d", "conv2d", "embedding", "softmax"}


def _main_chain(softmax: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """(nodes with the scores' size between products and softmax, the products)."""
    size, chain, products, queue = _size(softmax), [], [], list(softmax.all_input_nodes)
    seen = set(queue)
    while queue:
        node = queue.pop(0)
        if op(node) in PRODUCTS:
            products.append(node)
            continue
        if op(node) in _ELSEWHERE or (shape(node) is not None and _size(node) < size / 8):
            continue
        chain.append(node)
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                queue.append(source)
    # Masks of the scores' own size are not part of the way from a product.
    below = set(products)
    for node in reversed(chain):
        if any(source in below for source in node.all_input_nodes):
            below.add(node)
    return [n for n in chain if n in below], products


_LAYOUT = {"view", "reshape", "permute", "transpose", "contiguous", "unsqueeze", "expand", "flatten", "swapaxes", "to"}


def _side_kinds(chain: list[fx.Node]) -> Iterator[str]:
    """Kinds of what is added to the scores."""
    on_chain, terms = set(chain), 0
    for node in chain:
        if op(node) not in ("add", "add_", "iadd", "__add__", "sub", "isub"):
            continue
        for side in _tensors(node):
            if side in on_chain or op(side) in PRODUCTS:
                continue
            terms += 1
            names = {op(n) for n in _upstream(side, 40, stop=PRODUCTS)} | {op(side)}
            sources = {n.target for n in _upstream(side, 40) if n.op in ("placeholder", "get_attr")}
            if op(side) in ("amax", "max", "logsumexp") or "amax" in {op(n) for n in side.all_input_nodes}:
                yield "row_maximum"
            elif "embedding" in names or any("bias_table" in str(t) or "relative" in str(t) for t in sources):
                yield "learned_bias"
            elif names & (PRODUCTS | {"linear", "layer_norm"}):
                yield "activation_bias"
            else:
                yield "additive_mask"
    if terms > 1:
        yield "several_additive_terms"


_CHAIN_KINDS = {
    "tanh": "soft_cap",
    "masked_fill": "masked_fill",
    "masked_fill_": "masked_fill",
    "where": "where",
    "clamp": "clamp",
    "clamp_": "clamp",
    "min": "clamp",
    "minimum": "clamp",
    "gather": "gather",
    "amax": "row_maximum",
    "max": "row_maximum",
    "logsumexp": "sinks",
}


def _chain_kinds(softmax: fx.Node, chain: list[fx.Node], products: list[fx.Node]) -> Iterator[str]:
    names = [op(n) for n in chain]
    yield from (_CHAIN_KINDS[name] for name in names if name in _CHAIN_KINDS)
    yield from _side_kinds(chain)
    for node in chain:
        name = op(node)
        if name in ("mul", "imul", "mul_", "div", "truediv", "div_", "itruediv"):
            kind = "scale_mul" if "mul" in name else "scale_div"
            scalars = [n for n in _tensors(node) if _size(n) == 1]
            yield "scale_tensor" if scalars else kind if len(_tensors(node)) == 1 else "cosine"
        if name == "cat":
            yield "sinks" if any(op(u) == "getitem" for u in softmax.users) or _sliced(softmax) else "relative_shift"
        if name.endswith("_") and not name.startswith("__") or name in ("iadd", "imul", "itruediv", "isub"):
            yield "in_place"
        if name in ("pad", "as_strided", "index_select", "roll", "diagonal"):
            yield "relative_shift"
        if name == "getitem" and _size(node) < _size(node.all_input_nodes[0]):
            yield "relative_shift"
    if {"scale_mul", "additive_mask"} <= {"scale_mul" if "mul" in n else "" for n in names} | set(_side_kinds(chain)):
        yield "scale_and_mask"
    if len(products) > 1:
        yield "several_products"
    dtype = softmax.kwargs.get("dtype")
    if dtype is torch.float32 or {"float", "to", "type"} & set(names):
        yield "float32_softmax"
    if set(names) <= _LAYOUT:
        yield "bare"


def _sliced(softmax: fx.Node) -> bool:
    return any(op(n) in ("getitem", "narrow") and _size(n) < _size(softmax) for n in _consumers(softmax) or [])


def _operand_kinds(products: list[fx.Node]) -> Iterator[str]:
    for product in products:
        name = op(product)
        yield from {"einsum": ["einsum"], "bmm": ["bmm_3d"], "baddbmm": ["baddbmm"]}.get(name, [])
        if len(shape(product) or ()) >= 5:
            yield "five_d"
        if len(shape(product) or ()) == 3 and name != "einsum":
            yield "bmm_3d"
        for operand in _tensors(product)[-2:]:
            for node in [operand, *_upstream(operand, 12, stop={"linear", "conv2d", *PRODUCTS})]:
                name = op(node)
                if name in ("mul", "truediv", "imul", "div"):
                    if any(_size(n) == 1 for n in _tensors(node)):
                        yield "scale_tensor"
                    elif len(_tensors(node)) == 1:
                        yield "scale_before_product"
                if name == "neg":
                    yield "rope"
                if name in ("rsqrt", "layer_norm", "rms_norm", "normalize"):
                    yield "qk_norm"
                if name == "repeat_interleave" or (name == "expand" and len(shape(node) or ()) == 5):
                    yield "grouped_heads"


def _after_kinds(softmax: fx.Node, after: list[fx.Node]) -> Iterator[str]:
    readers = [n for n in after if op(n) in PRODUCTS]
    if len(readers) > 1:
        yield "several_readers"
    if _sliced(softmax):
        yield "slice_after"
    for node in after:
        if op(node) in ("masked_fill", "masked_fill_"):
            yield "masked_fill_after"
        if op(node) in ("mul", "imul", "mul_", "__mul__"):
            yield "multiply_after"
        if op(node) == "truediv":
            yield "multiply_after"


def _shape_kinds(products: list[fx.Node], after: list[fx.Node]) -> Iterator[str]:
    scores = shape(products[0]) if products else None
    if scores and scores[-1] != scores[-2]:
        yield "nq_differs"
    readers = [n for n in after if op(n) in PRODUCTS]
    if products and readers and op(products[0]) != "einsum" and op(readers[0]) != "einsum":
        operands = [shape(t) for t in _tensors(products[0])]
        values = shape(_tensors(readers[0])[-1])
        if values and values[-1] not in {s for o in operands if o for s in o[-2:]}:
            yield "dv_differs"


def _kinds(softmax: fx.Node, chain: list[fx.Node], products: list[fx.Node], after: list[fx.Node]) -> Iterator[str]:
    yield from _chain_kinds(softmax, chain, products)
    yield from _operand_kinds(products)
    yield from _after_kinds(softmax, after)
    yield from _shape_kinds(products, after)
