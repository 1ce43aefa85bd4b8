"""Loaded generated modules, and launches of their kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch

from fusion.ir.spec import AttentionSpec
from fusion.planning.choice import Tile

from . import module
from .expressions import Writer
from .kernel import KernelText
from .key_loop import PLAIN, Order


def argument_function(parameters: Sequence[str], spec: AttentionSpec) -> Callable[..., tuple]:
    """Function (operands, sizes, results, others) -> the kernel's run-time arguments in order, as one compiled
    expression.
    results: tensors by name. others: integers and descriptors by name."""
    writer = Writer(spec=spec)
    operand = {writer.operand(n): n for n in range(len(spec.operands))}
    position = {name: place for place, name in enumerate(spec.output.dims)}

    def text(name: str) -> str:
        if name in spec.sizes:
            return f"s[{spec.sizes.index(name)}]"
        stem, _, dim = name.rpartition("_stride_")
        if stem:
            place = dim if dim.isdigit() else position[dim]
            return f"t[{operand[stem]}].stride({dim})" if stem in operand else f"r[{stem!r}].stride({place})"
        stem = name.removesuffix("_ptr")
        if stem != name:
            return f"t[{operand[stem]}]" if stem in operand else f"r[{stem!r}]"
        return f"o[{name!r}]"

    return eval(f"lambda t, s, r, o: ({', '.join(map(text, parameters))},)")


class Variant:
    """A loaded module: by the names of its kernels their functions and their argument functions, and the tensors that
    they read by descriptors."""

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Sequence[KernelText],
        d: int,
        d_v: int,
        interpreted: bool,
        order: Order = PLAIN,
    ):
        self.source = module.module_text(spec, kernels, d, d_v)
        self.module = module.load(self.source, interpreted)
        self.digest, self.order = hashlib.sha256(self.source.encode()).hexdigest(), order
        self.boxes = {kernel.name: kernel.boxes for kernel in kernels}
        self.reduced: dict[tuple[str, torch.device, Tile], Tile] = {}  # what runs in place of a tile that is too large
        self.kernels = {
            kernel.name: (getattr(self.module, kernel.name), argument_function(kernel.parameters, spec))
            for kernel in kernels
        }

    def launch(self, name: str, programs: int, tile: Tile, fixed: Mapping[str, object], arguments: tuple) -> None:
        """Run one kernel: arguments are those of `argument_function`; fixed: constants beside the tile's."""
        function, make = self.kernels[name]
        constants = {**tile.constants(), **fixed}
        constants = {key: value for key, value in constants.items() if key in function.arg_names}
        given, device = make(*arguments), arguments[0][0].device
        module.run(function, programs, device, given, constants, tile.options())
