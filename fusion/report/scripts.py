"""Python scripts that run by themselves: one attention with its inputs and the house rule, or a whole graph.

python repro.py     compares fusion with eager and float64; exit code 1 where fusion is wrong
"""

from __future__ import annotations

import base64
import io
import json
import platform
import re
import textwrap
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusion.exactness import is_float
from fusion.passes import nodes
from fusion.passes.recognize.find import Site
from fusion.passes.region import CutOut
from fusion.torch_private import tensors

_FLOATS = re.compile(r"\btorch\.(float16|bfloat16|float32)\b")
FEW = 16
"""A float tensor of at most so many different values is a mask, or a bias like one: random numbers would be another."""


def function_text(cut: CutOut) -> str:
    """Imports, and `attention(...)` with the region's operations; dtypes are keywords: it can run in float64."""
    code = cut.module.graph.python_code("self")
    body = re.sub(r";  (\w+ = )+None.*$", "", code.src.strip(), flags=re.M)
    keywords = "".join(f", {name}=torch.{name}" for name in sorted(set(_FLOATS.findall(body))))
    body = _FLOATS.sub(r"\1", body)
    body = re.sub(r"^def forward\(self, ?(.*)\):", rf"def attention(\1{keywords}):", body, count=1, flags=re.M)
    used = set(re.findall(r"\w+", body)) - {"torch"}
    imports = [_import(name, value) for name, value in code.globals.items() if name in used]
    return "\n".join([*sorted(imports, key=lambda line: "import" not in line), "", "", body, ""])


def dtype_arguments(text: str) -> tuple[str, ...]:
    """The dtypes that are arguments of such a function."""
    return tuple(re.findall(r"(\w+)=torch\.\1\b", text))


def script(
    cut: CutOut,
    about: str,
    *,
    values: Sequence[Any] | None = None,
    random: bool = False,
    gradients: Sequence[bool] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The script of one attention.

    about: one line on where it stands.
    values: of the region's inputs; None makes random ones by what the trace knows of them.
    random: random numbers in the place of the floats among them.
    gradients: which of the inputs to compare the gradients of.
    options: of the backend.
    """
    text = function_text(cut)
    names = [node.name for node in cut.module.graph.find_nodes(op="placeholder")]
    rows, stored = ([example(node) for node in cut.inputs], []) if values is None else _rows(values, random)
    lines = [f"        {row},  # {name}" for row, name in zip(rows, names, strict=True)]
    wants = [name for name, wanted in zip(names, gradients, strict=False) if wanted]
    torch.save(stored, file := io.BytesIO())
    data = "\n".join(textwrap.wrap(base64.b64encode(zlib.compress(file.getvalue(), 9)).decode(), 120))
    return _SCRIPT.format(
        about=about.replace("\\", "/").replace('"""', "'''"),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}",
        imports="import base64\nimport io\nimport sys\nimport zlib\n" if stored else "import sys\n",
        function=text.strip(),
        data=f'DATA = """\n{data}\n"""\n\n\n' if stored else "",
        load=_LOAD if stored else "",
        rows="\n".join(lines),
        arguments=f"floats={dtype_arguments(text)!r}, gradients={wants!r}, options={dict(options or {})!r}",
    )


_LOAD = "    stored = torch.load(io.BytesIO(zlib.decompress(base64.b64decode(DATA))), weights_only=True)\n"

_SCRIPT = '''"""{about}

Compares fusion with eager by its rule, error <= 2 * (eager's error + rounding), both against float64. The exit code is
1 where fusion is wrong. Written with {versions}.
"""

{imports}
import torch
{function}



{data}def inputs():
    torch.manual_seed(0)
{load}    return [
{rows}
    ]


if __name__ == "__main__":
    from fusion.api.check import main

    sys.exit(main(attention, inputs(), {arguments}))
'''


def _rows(values: Sequence[Any], random: bool) -> tuple[list[str], list[Any]]:
    """(an expression per value, the tensors that these find in `stored`)."""
    rows, stored = [], []
    for value in values:
        if random and is_float(value) and value.unique().numel() > FEW:
            finite = value.detach().double()[value.isfinite()]  # random numbers of its mean and deviation
            rows.append(f"{_empty(value)}.normal_({float(finite.mean()):.3g}, {float(finite.std()):.3g})")
        elif isinstance(value, Tensor):
            rows.append(f"stored[{len(stored)}]")
            stored.append(value.detach())
        else:
            rows.append(repr(value))
    return rows, stored


def place(site: Site) -> str:
    """The place of an attention in the user's code: the line of its product with V, and the module."""
    line, module = nodes.source_line(site.anchor), nodes.module_path(site.anchor)
    return "; module ".join(part for part in (line, module) if part) or site.anchor.name


def graph_program(module: GraphModule, weights: str, attributes: Mapping[str, Any]) -> str:
    """A graph as a Python program: a module, inputs of the right shapes, and a call. weights: the file next to it that
    holds the tensors and modules which the graph has as attributes, if any."""
    code = module.graph.python_code("self")
    inputs = module.graph.find_nodes(op="placeholder")
    return _GRAPH.format(
        count=len(module.graph.nodes),
        imports="".join(f"{_import(name, value)}\n" for name, value in code.globals.items() if name != "torch"),
        state=_STATE.format(weights=weights) if attributes else "",
        code=textwrap.indent(code.src.strip(), "    "),
        rows="\n".join(f"        {example(node)},  # {node.name}" for node in inputs),
    )


_GRAPH = '''"""{count} nodes; run me."""

import torch

import fusion.runtime.op  # the ops
{imports}

class Graph(torch.nn.Module):
{state}{code}


def inputs():
    torch.manual_seed(0)
    return [
{rows}
    ]


if __name__ == "__main__":
    for result in Graph()(*inputs()):
        print(result)
'''

_STATE = """    def __init__(self):
        super().__init__()
        for path, value in torch.load(__file__.rpartition("/")[0] + "/{weights}", weights_only=False).items():
            *parents, name = path.split(".")
            owner = self
            for parent in parents:
                if not hasattr(owner, parent):
                    setattr(owner, parent, torch.nn.Module())
                owner = getattr(owner, parent)
            setattr(owner, name, value)

"""


def _import(name: str, value: Any) -> str:
    """The line that makes a global of generated code."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if value is type(None):
        return f"{name} = type(None)"
    if isinstance(value, float):  # inf and nan
        return f'{name} = float("{value}")'
    outer, dot, rest = getattr(value, "__qualname__", name).partition(".")
    if dot:
        return f"from {value.__module__} import {outer}; {name} = {outer}.{rest}"
    return f"from {getattr(value, '__module__', 'torch')} import {outer} as {name}"


def example(node: Node) -> str:
    """An expression that makes an input like the one the graph was traced with."""
    fake = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(fake, (torch.SymInt, torch.SymFloat)):
        hint = fake.node.hint
        return repr(hint if isinstance(hint, (int, float)) else None)  # the length of a nested tensor is no number
    if not isinstance(fake, Tensor):
        return repr(fake)
    if not fake.is_nested:
        return _random(fake)
    (values, _), dim = tensors.nested_parts(fake), tensors.ragged_dim(fake)
    rows, sequences = (_hint(n) for n in (values.shape[dim - 1], fake.shape[0]))
    offsets = f"torch.tensor([0] + [{rows}] * {sequences})"  # all rows in the first sequence
    return f"torch.nested.nested_tensor_from_jagged({_random(values)}, {offsets}, jagged_dim={dim})"


def _random(fake: Tensor) -> str:
    if fake.is_floating_point():
        return f"{_empty(fake)}.normal_()"
    # small indices are in range wherever there are at least two entries
    return f"{_empty(fake)}.fill_(1)" if fake.is_complex() else f"{_empty(fake)}.random_(0, 2)"


def _empty(tensor: Tensor) -> str:
    size, stride = (json.dumps([_hint(n) for n in extents]) for extents in (tensor.shape, tensor.stride()))
    return f"torch.empty_strided({size}, {stride}, dtype={tensor.dtype}, device={str(tensor.device)!r})"


def _hint(extent: int | torch.SymInt) -> int:
    return int(extent.node.hint) if isinstance(extent, torch.SymInt) else extent
