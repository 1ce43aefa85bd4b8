"""Weights in the order in which a library reads them fastest, packed at the first product, and again once they change.

A change is seen by the version of the tensor, which every operation of torch that writes raises, and by its address.
A write that passes torch's versions by (`parameter.data`, a NumPy array on the same memory) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage
from torch.utils.weak import WeakTensorKeyDictionary

from fusion.linear import products
from fusion.torch_private import devices, tensors

CONSTANT, ROWS, COLUMNS = "constant", "rows", "columns"
"""Kinds of weights that may be packed: a constant of the graph, `[n, k]`; a parameter, `[n, k]` or `[k, n]`."""
MANY = 256
"""Rows above which oneDNN is faster, with several threads, if weights were packed for one row. AMX, two threads,
bfloat16, k x n = 3072 x 768 (benchmarks/results/2026-11-30-packed-weights.md): 512 rows take 1.9 ms with the weight as
it is, 3.1 packed for 128 rows and 1.8 packed for one; 128 rows 0.80, 0.59 and 0.62."""
MOST = 2
"""Numbers of rows for which MKL's form of a weight is kept: it serves no other."""

Name = tuple[str, bool, int]
"""Name of a packed form: the library, whether the weight is packed as it is (one weight may be read both ways), and the
width of parts or the number of rows."""


@dataclass(slots=True)
class _Packed:
    """Packed forms of a weight, each by what packed it and a size. storage: held, so that no other weight gets its
    address."""

    version: int
    address: int
    storage: UntypedStorage
    forms: dict[Name, list[Tensor]] = field(default_factory=dict)


packed: MutableMapping[Tensor, _Packed] = WeakTensorKeyDictionary()


def may_be_packed(weight: Tensor, stored: str) -> bool:
    """Whether this is a tensor that lives on after the call, and that shows when it changes. Tensors that were made in
    inference mode have no version. The libraries pack no tensor without an element."""
    lives_on = stored == CONSTANT or (isinstance(weight, torch.nn.Parameter) and not weight.is_inference())
    return lives_on and weight.numel() > 0


def for_onednn(weight: Tensor, w: Tensor, x: Tensor, width: int) -> list[Tensor]:
    """Parts of `w: [n, k]`, `width` terms each, packed for their products with `x: [m, k]`. weight: what w is a view
    of."""
    rows = 1 if x.shape[0] > MANY and torch.get_num_threads() > 1 else MANY // 2

    def pack() -> list[Tensor]:
        return [devices.onednn_packed(part.contiguous(), rows) for part in w.to(x.dtype).split(width, 1)]

    return _form(weight, (f"onednn {x.dtype} {rows}", w is weight, width), pack)


def for_mkl(weight: Tensor, w: Tensor, rows: int) -> Tensor | None:
    """`w: [n, k]`, packed for products of so many rows; None where MKL reads w as it is: where it adds few rows up in
    another way, and where w is packed for other numbers of rows already."""
    forms, name = _forms(weight), ("mkl", w is weight, rows)
    if rows < products.FEW or (name not in forms and sum(other[:2] == name[:2] for other in forms) == MOST):
        return None
    (form,) = _form(weight, name, lambda: [devices.mkl_packed(w.contiguous(), rows)])
    return form


def _form(weight: Tensor, name: Name, pack: Callable[[], list[Tensor]]) -> list[Tensor]:
    forms = _forms(weight)
    if name not in forms:
        forms[name] = pack()
    return forms[name]


def _forms(weight: Tensor) -> dict[Name, list[Tensor]]:
    """Packed forms of a weight as it is now."""
    version = 0 if weight.is_inference() else tensors.version(weight)
    kept = packed.get(weight)
    if kept is None or (kept.version, kept.address) != (version, weight.data_ptr()):
        kept = packed[weight] = _Packed(version, weight.data_ptr(), weight.untyped_storage())
    return kept.forms
