"""`torch.ops.fusion.linear`: a product whose library is chosen at run time.

It occurs in graphs whose gradients are traced. `chosen` says that oneDNN was chosen when the graph was compiled, as all
sizes were known; otherwise the sizes of the call decide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.linear import products, speeds
from fusion.torch_private import onednn
from fusion.torch_private.operators import register_fake


def linear(x: Tensor, w: Tensor, bias: Tensor | None, chosen: bool) -> Tensor:
    """`x: [m, k]` times `w: [n, k]`, transposed, plus `bias: [n]`."""
    if x.shape[0] not in products.FEW and onednn.may_run() and (chosen or _pays(x, w)):
        return products.product(x, w, bias)
    return torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())


def _pays(x: Tensor, w: Tensor) -> bool:
    return speeds.onednn_pays(*x.shape, w.shape[0], products.copied(x, w), torch.get_num_threads())


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, chosen: bool) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


VERSION = 1
"""To be raised with every change of what the op computes or of the pass: Inductor's caches are keyed by it."""

_library = torch.library.Library("fusion", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor w, Tensor? bias, bool chosen) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)
_library.impl("linear", linear, "CPU")
register_fake(_library, "fusion::linear", _fake, __file__)
