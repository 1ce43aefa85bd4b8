"""The user's operation between a product of queries and keys and its use that the analysis cannot follow."""

from __future__ import annotations

from torch.fx import Node

from .. import nodes
from ..pullback.contractions import is_contraction, products_above
from ..pullback.pointwise import is_pointwise
from ..pullback.reductions import is_reduction
from ..pullback.views import is_view


def blocking_op(node: Node, products: set[Node]) -> Node | None:
    """First operation from products down to a node, that included, which reads more than one element. An operation
    without any rule is preferred to softmaxes and sums over keys, which may have been followed."""

    def parents(here: Node) -> list[Node]:
        inputs = [] if is_contraction(here) else here.all_input_nodes
        return [parent for parent in inputs if products & products_above(parent)]

    way = nodes.walk_up([node], parents)
    taken = [here for here in way if not (is_pointwise(here) or is_view(here) or is_contraction(here))]
    return min(taken, key=lambda here: (is_reduction(here), here), default=None)
