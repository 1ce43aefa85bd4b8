"""Calling a kernel: the output, the kernel's arguments from tensors and sizes, and the grid."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from fusion.codegen.triton import interpret, module
from fusion.codegen.triton.expressions import SIZE_LIMIT, Writer
from fusion.codegen.triton.forward import Forward, KernelText
from fusion.codegen.triton.tiles import Tile, tile_for
from fusion.errors import FusionError
from fusion.ir.expr import Expr
from fusion.ir.spec import AttentionSpec

SECTION_BYTES = 24 << 20  # keys and values of heads that run side by side: half of the L2 cache of an H100


class UnsupportedSizeError(FusionError, ValueError):
    """A size at run time is beyond what the kernels' integer arithmetic holds."""


def size_function(exprs: Sequence[Expr], names: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Size expressions as one Python function of the run-time sizes, compiled once."""
    return eval(f"lambda s: ({', '.join(_python(expr, list(names)) for expr in exprs)},)")


def _python(expr: Expr, names: list[str]) -> str:
    if expr.op == "const":
        return str(int(expr.attr))  # type: ignore[arg-type]
    if expr.op == "size":
        return f"s[{names.index(str(expr.attr))}]"
    args = [_python(arg, names) for arg in expr.args]
    if expr.op in ("imin", "imax"):
        return f"{expr.op[1:]}({', '.join(args)})"
    return "(" + {"add": " + ", "mul": " * ", "floordiv": " // ", "mod": " % "}[expr.op].join(args) + ")"


def argument_function(parameters: Sequence[str], spec: AttentionSpec) -> Callable[..., tuple]:
    """(operands, sizes, results, others) -> the kernel's run-time arguments in order, as one compiled expression.

    results: tensors by name; others: integers by name.
    """
    writer = Writer(spec=spec)
    operand = {writer.operand(n): n for n in range(len(spec.operands))}
    position = {name: place for place, name in enumerate(spec.output.dims)}

    def text(name: str) -> str:
        if name in spec.sizes:
            return f"s[{spec.sizes.index(name)}]"
        stem, _, dim = name.rpartition("_stride_")
        if stem:
            return f"t[{operand[stem]}].stride({dim})" if stem in operand else f"r[{stem!r}].stride({position[dim]})"
        stem = name.removesuffix("_ptr")
        if stem != name:
            return f"t[{operand[stem]}]" if stem in operand else f"r[{stem!r}]"
        return f"o[{name!r}]"

    return eval(f"lambda t, s, r, o: ({', '.join(map(text, parameters))},)")


class Variant:
    """The module for given d and d_v."""

    def __init__(self, spec: AttentionSpec, d: int, d_v: int, interpreted: bool):
        self.kernel: KernelText = Forward(spec, d, d_v).text()
        self.source = module.module_text(spec, [self.kernel], d, d_v)
        if interpreted:
            with interpret.decorating():
                self.module: ModuleType = module.load(self.source)
        else:
            self.module = module.load(self.source)
        self.function = getattr(self.module, self.kernel.name)
        self.arguments = argument_function(self.kernel.parameters, spec)


class Kernel:
    """A spec's kernel: call it with the operand tensors and the values of `spec.sizes`; returns the output tensor.

    CPU tensors are run by Triton's interpreter.
    """

    def __init__(self, spec: AttentionSpec, tile: Tile | None = None):
        self.spec, self.tile = spec, tile
        self._extents = size_function((*spec.batch, spec.n_q, spec.n_k, spec.d, spec.d_v), spec.sizes)
        self._variants: dict[tuple[int, int, bool], Variant] = {}
        self._lock = threading.Lock()
        names = [*(f"b{axis}" for axis in range(len(spec.batch))), "i", "e"]
        self._order = [names.index(name) for name in spec.output.order]
        self._dims = [spec.output.order.index(name) for name in spec.output.dims]
        self._out_dtype: torch.dtype = getattr(torch, spec.out_dtype)

    @property
    def source(self) -> str:
        """The module's text; of the first variant, where d is known only at a call; empty before it."""
        if not self._variants and self.spec.d.op == "const" and self.spec.d_v.op == "const":
            return module.module_text(
                self.spec, [Forward(self.spec, *self._constant_dims()).text()], *self._constant_dims()
            )
        return next((variant.source for variant in self._variants.values()), "")

    def _constant_dims(self) -> tuple[int, int]:
        return int(self.spec.d.attr), int(self.spec.d_v.attr)  # type: ignore[arg-type]

    def variant(self, d: int, d_v: int, interpreted: bool) -> Variant:
        """The module for these sizes, made at first use."""
        key = (d, d_v, interpreted)
        if (found := self._variants.get(key)) is None:
            with self._lock:
                if (found := self._variants.get(key)) is None:
                    found = self._variants[key] = Variant(self.spec, d, d_v, interpreted)
        return found

    def __call__(self, operands: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        *batch, n_q, n_k, d, d_v = self._extents(sizes)
        device = operands[0].device
        extents = [*batch, n_q, d_v]
        out = torch.empty([extents[axis] for axis in self._order], dtype=self._out_dtype, device=device).permute(
            self._dims
        )
        if out.numel() == 0:
            return out
        if n_k == 0 or d == 0:  # nothing worth a kernel
            from fusion.codegen.reference import run

            return run(self.spec, operands, sizes)
        if max(extents) >= SIZE_LIMIT or n_k >= SIZE_LIMIT:
            raise UnsupportedSizeError(
                f"a size of {max(*extents, n_k)} was met; GPU kernels take sizes below {SIZE_LIMIT}"
            )
        self._launch(operands, sizes, out, batch, (n_q, n_k, d, d_v))
        return out

    def _launch(self, operands, sizes, out, batch, extents) -> None:
        n_q, n_k, d, d_v = extents
        interpreted = operands[0].device.type == "cpu"
        variant = self.variant(d, d_v, interpreted)
        tile = self.tile or tile_for(self.spec, d, d_v, n_q, n_k, 0 if interpreted else _capability(out.device))
        heads = 1
        for extent in batch:
            heads *= extent
        per_head = n_k * (d + d_v) * operands[1].element_size()
        section = max(1, min(heads, SECTION_BYTES // max(1, per_head)))
        arguments = variant.arguments(operands, sizes, {"out": out}, {"section": section})
        grid = (heads * -(-n_q // tile.rows),)
        constants = {"ROWS": tile.rows, "KEYS": tile.keys, "PRECISION": _precision(self.spec.dtype)}
        if interpreted:
            with interpret.running():
                variant.function[grid](*arguments, **constants)
            return
        with torch.cuda.device(out.device):
            variant.function[grid](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)


def _precision(dtype: str) -> str:
    """Of products: as torch's own setting says for float32."""
    return "tf32" if dtype == "float32" and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _capability(device: torch.device) -> int:
    """10 * major + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
