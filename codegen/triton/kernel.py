"""Common parts of all kernels of an attention: coordinates by name, a head's number among all, parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion.ir.expr import Expr, coordinates, loads, walk
from fusion.ir.spec import AttentionSpec

from . import source
from .descriptors import Box
from .expressions import Writer
from .stages import Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelText:
    """Functions of a module: their text, the helpers that they use, the kernel's name and run-time parameters in order.
    boxes: the tensors that are read by tensor descriptors."""

    name: str
    text: str
    helpers: frozenset[str]
    parameters: tuple[str, ...]
    boxes: tuple[Box, ...]


class WrittenKernel:
    """A kernel, whose docstring is the first line of its class's. known: names of coordinates, beside those of the
    batch. outer, inner: see `Writer`. boxes: the tensors that it reads by tensor descriptors."""

    name = ""
    outer, inner = "i", "j"
    reads_rows = False  # whether it sums up rows of the output and its gradient
    boxes: Mapping[str, Box] = {}

    def __init__(self, spec: AttentionSpec, known: Mapping[Expr, str]):
        self.spec = spec
        self.known: dict[Expr, str] = {axis: axis.name for axis in spec.axes} | {**known}
        self.writer = Writer(spec=spec, known=dict(self.known), outer=self.outer, inner=self.inner)
        self.n_q, self.n_k = self.writer.value(spec.n_q), self.writer.value(spec.n_k)

    def text(self) -> KernelText:
        functions, body = self.body()
        doc = (self.__doc__ or "").strip().splitlines()[0]
        parameters, constants = _signature(source.free_names(body), self.spec)
        # Numbers of keys, tiles and parts change with each token of a generation; that they are one, or multiples of
        # 16, is worth no variant.
        keys = {str(part.attr) for part in walk(self.spec.n_k) if part.op == "size"}
        varying = [p for p in parameters if p in {*keys, "section", "splits", "programs"} or p.endswith("_tiles")]
        if self.spec.reproducible:
            streamed = self._streamed()
            varying = [p for p in parameters if p[-4:] != "_ptr" and p.partition("_stride_")[0] not in streamed]
        given = [*parameters, *(f"{constant}: tl.constexpr" for constant in constants)]
        text = "\n\n".join(
            [*(function.text for function in functions), source.definition(self.name, given, doc, body, varying)]
        )
        helpers, boxes = frozenset(self.writer.helpers), tuple(self.boxes.values())
        return KernelText(name=self.name, text=text, helpers=helpers, parameters=parameters, boxes=boxes)

    def body(self) -> tuple[list[Visit], str]:
        """(functions of the module that the kernel calls, its body)."""
        raise NotImplementedError

    def _streamed(self) -> set[str]:
        """Tensors that nothing reads but products, and results: how they are read does not change the layout in which
        scores are summed up, as strides of others may."""
        loaded = {part.operand for part in loads(*self.spec.expressions())}
        read = {self.writer.operand(number) for number in {0, 1, 2} - loaded}
        return read if self.reads_rows else {*read, "out", "dout"}

    @property
    def listed(self) -> bool:
        """Whether the tiles to visit are listed (see `tile_lists`)."""
        return self.spec.mask is not None and self.spec.mask.tile_live is not None

    @property
    def heads(self) -> str:
        """The number of batch elements."""
        return " * ".join(self.writer.factor(extent) for extent in self.spec.batch) or "1"

    def place(self, axes: Sequence[int] | None = None) -> str:
        """Number of a batch element, counted with the last coordinate fastest, or of some of its coordinates."""
        place = "0"
        for axis in range(len(self.spec.batch)) if axes is None else axes:
            before = f"{_factor(place)} * {self.writer.factor(self.spec.batch[axis])} + "
            place = f"{'' if place == '0' else before}b{axis}"
        return place

    def place_factor(self, listed: bool = False) -> str:
        """`place` as a factor; listed: of the lists of live tiles for the current batch coordinates."""
        return _factor(self.place(axes_of(self.spec) if listed else None))


def _factor(place: str) -> str:
    return f"({place})" if " " in place else place


def axes_of(spec: AttentionSpec) -> list[int]:
    """Batch coordinates with separate lists of live tiles (see `tile_lists`)."""
    mask = spec.mask
    assert mask is not None
    facts = (mask.key_lo, mask.key_hi, mask.full_lo, mask.full_hi, mask.tile_live, mask.tile_mixed)
    names = {name for fact in facts if fact is not None for name in coordinates(fact)}
    return sorted(int(name[1:]) for name in names if name.startswith("b"))


def _signature(names: Sequence[str], spec: AttentionSpec) -> tuple[tuple[str, ...], list[str]]:
    """(run-time parameters: pointers, sizes, strides, others; constants) among the free names of a kernel."""
    pointers = sorted(n for n in names if n.endswith("_ptr"))
    sizes = [n for n in spec.sizes if n in names]
    strides = sorted(n for n in names if "_stride_" in n and n not in spec.sizes)
    others = [n for n in ("section", "splits") if n in names]
    others += sorted(n for n in names if n.endswith("_tiles"))
    constants = [n for n in ("ROWS", "KEYS", "ROTATED", "PRECISION", "UNIT_TANH") if n in names]
    return (*pointers, *sizes, *strides, *others), constants
