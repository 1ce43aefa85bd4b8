"""Weights in the order in which a library reads them fastest, packed at the first product, and again once they change.

A change is seen by the version of the tensor, which every operation of torch that writes raises, by its address, and by
its first, middle and last bytes. So a write that torch does not count (to `parameter.data`, to a NumPy array on the
same memory) is seen if it reaches one of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusion.linear import products
from fusion.torch_private import devices, tensors

CONSTANT, ROWS, COLUMNS = "constant", "rows", "columns"
"""Kinds of weights that may be packed: a constant of the graph, `[n, k]`; a parameter, `[n, k]` or `[k, n]`."""
NARROW = 256
"""Most rows of a product whose weight is packed in narrow blocks. With more, and several threads, oneDNN is faster if
it was packed for one row: on AMX with two threads, in bfloat16, k x n = 3072 x 768, 512 rows take 1.9 ms with the
weight as it is, 3.1 packed for 128 rows and 1.8 packed for one; 128 rows 0.80, 0.59 and 0.62
(benchmarks/results/2026-11-30-packed-weights.md)."""
PROBE = 64
"""Bytes that are read in three places of a weight."""
MOST = 2
"""Numbers of rows for which MKL's form of a weight is kept: it serves no other."""

Name = tuple[str, bool, int]
"""Name of a packed form: the library, whether the weight is packed as it is (one weight may be read both ways), and the
width of parts or the number of rows."""


class _Packed:
    """Packed forms of a weight as it is now, each by its name. The storage is held, so that no other weight gets its
    address."""

    def __init__(self, weight: Tensor) -> None:
        self.forms: dict[Name, list[Tensor]] = {}
        self.version, self.address, self._storage = _version(weight), weight.data_ptr(), weight.untyped_storage()
        (rows, columns), (down, right) = weight.shape, weight.stride()
        end = ((rows - 1) * down + (columns - 1) * right + 1) * weight.element_size()
        view = ctypes.c_char * min(PROBE, end)
        last = end - ctypes.sizeof(view)
        self._views = [view.from_address(self.address + place) for place in (0, last // 2, last)]
        self._bytes = self._read()

    def is_of(self, weight: Tensor) -> bool:
        """Whether the weight has not changed, as far as is seen. Bytes are read where its memory is still the same."""
        unchanged = self.version == _version(weight) and self.address == weight.data_ptr()
        return unchanged and self._bytes == self._read()

    def _read(self) -> list[bytes]:
        return [view.raw for view in self._views]


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else tensors.version(weight)


packed: MutableMapping[Tensor, _Packed] = WeakTensorKeyDictionary()


def may_be_packed(weight: Tensor, stored: str) -> bool:
    """Whether this is a tensor that lives on after the call, and that shows when it changes. Tensors that were made in
    inference mode have no version. The libraries pack no tensor without an element."""
    lives_on = stored == CONSTANT or (isinstance(weight, torch.nn.Parameter) and not weight.is_inference())
    return lives_on and weight.numel() > 0 and weight.data_ptr() != 0


def for_onednn(weight: Tensor, w: Tensor, x: Tensor, width: int) -> list[Tensor]:
    """Parts of `w: [n, k]`, `width` terms each, packed for their products with `x: [m, k]`. weight: what w is a view
    of."""
    rows = 1 if x.shape[0] > NARROW and torch.get_num_threads() > 1 else NARROW // 2

    def pack() -> list[Tensor]:
        return [devices.onednn_packed(part.contiguous(), rows) for part in w.to(x.dtype).split(width, 1)]

    return _form(_forms(weight), (f"onednn {x.dtype} {rows}", w is weight, width), pack)


def for_mkl(weight: Tensor, w: Tensor, rows: int) -> Tensor | None:
    """`w: [n, k]`, packed for products of so many rows; None where MKL reads w as it is: where it adds few rows up in
    another way, and where w is packed for other numbers of rows already."""
    if rows < products.FEW:
        return None
    forms, name = _forms(weight), ("mkl", w is weight, rows)
    if name not in forms and sum(other[:2] == name[:2] for other in forms) == MOST:
        return None
    (form,) = _form(forms, name, lambda: [devices.mkl_packed(w.contiguous(), rows)])
    return form


def _form(forms: dict[Name, list[Tensor]], name: Name, pack: Callable[[], list[Tensor]]) -> list[Tensor]:
    if name not in forms:
        forms[name] = pack()
    return forms[name]


def _forms(weight: Tensor) -> dict[Name, list[Tensor]]:
    kept = packed.get(weight)
    if kept is None or not kept.is_of(weight):
        kept = packed[weight] = _Packed(weight)
    return kept.forms
