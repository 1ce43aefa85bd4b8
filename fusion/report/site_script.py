"""One attention as a Python script that runs by itself: what the model computes there, inputs, and the house rule.

python repro.py     compares fusion with eager and float64; exit code 1 where fusion is wrong
"""

from __future__ import annotations

import base64
import io
import platform
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.exactness import is_float
from fusion.passes import nodes
from fusion.passes.cut_out import CutOut
from fusion.passes.recognize.find import Site
from fusion.report.script_parts import example, import_line

_FLOATS = re.compile(r"\btorch\.(float16|bfloat16|float32)\b")
FEW = 16
"""A float tensor of at most so many different values is a mask, or a bias like one: random numbers would be another."""


def function_text(cut: CutOut) -> str:
    """Imports, and `attention(...)` with the region's operations; dtypes are keywords: it can run in float64."""
    code = cut.module.graph.python_code("self")
    body = re.sub(r";  (\w+ = )+None.*$", "", code.src.strip(), flags=re.M)
    named = sorted(set(_FLOATS.findall(body)))
    body = _FLOATS.sub(r"\1", body)
    keywords = "".join(f", {name}=torch.{name}" for name in named)
    body = re.sub(r"^def forward\(self, ?(.*)\):", rf"def attention(\1{keywords}):", body, count=1, flags=re.M)
    used = set(re.findall(r"\w+", body)) - {"torch"}
    imports = [import_line(name, held) for name, held in code.globals.items() if name in used]
    return "\n".join([*sorted(imports, key=lambda line: "import" not in line), "", "", body, ""])


def widened(text: str) -> tuple[str, ...]:
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
    if values is None:
        rows, held = [example(node) for node in cut.inputs], []
    else:
        rows, held = _rows(values, random)
    lines = [f"        {row},  # {name}" for row, name in zip(rows, names, strict=True)]
    wants = [name for name, wanted in zip(names, gradients, strict=False) if wanted]
    return _SCRIPT.format(
        about=about.replace("\\", "/").replace('"""', "'''"),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}",
        imports="import base64\nimport io\nimport sys\nimport zlib\n" if held else "import sys\n",
        function=text.strip(),
        data=f'DATA = """\n{_encoded(held)}\n"""\n\n\n' if held else "",
        held=_LOAD if held else "",
        rows="\n".join(lines),
        arguments=f"floats={widened(text)!r}, gradients={wants!r}, options={dict(options or {})!r}",
    )


_LOAD = "    held = torch.load(io.BytesIO(zlib.decompress(base64.b64decode(DATA))), weights_only=True)\n"

_SCRIPT = '''"""{about}

Compares fusion with eager by its rule, error <= 2 * (eager's error + rounding), both against float64. The exit code is
1 where fusion is wrong. Written with {versions}.
"""

{imports}
import torch
{function}



{data}def inputs():
    torch.manual_seed(0)
{held}    return [
{rows}
    ]


if __name__ == "__main__":
    from fusion.api.check import main

    sys.exit(main(attention, inputs(), {arguments}))
'''


def _rows(values: Sequence[Any], random: bool) -> tuple[list[str], list[Any]]:
    """(an expression per value, what these find in `held`)."""
    rows, held = [], []
    for value in values:
        if random and is_float(value) and value.unique().numel() > FEW:
            rows.append(_like(value))
        elif isinstance(value, Tensor):
            rows.append(f"held[{len(held)}]")
            held.append(value.detach())
        else:
            rows.append(repr(value))
    return rows, held


def _like(value: Tensor) -> str:
    finite = value.detach().double()[value.isfinite()]
    mean, deviation = (f"{float(x):.3g}" for x in (finite.mean(), finite.std()))
    made = f"torch.empty_strided({list(value.shape)}, {list(value.stride())}, dtype={value.dtype}"
    return f"{made}, device={str(value.device)!r}).normal_({mean}, {deviation})"


def _encoded(held: Sequence[Any]) -> str:
    file = io.BytesIO()
    torch.save(list(held), file)
    return "\n".join(textwrap.wrap(base64.b64encode(zlib.compress(file.getvalue(), 9)).decode(), 120))


def place(site: Site) -> str:
    """Where an attention stands in the user's code: the line of its product with V, and the module."""
    line, module = nodes.source_line(site.anchor), nodes.module_path(site.anchor)
    return "; module ".join(part for part in (line, module) if part) or site.anchor.name
