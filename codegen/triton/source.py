"""Assembly of a kernel's text: parameters found from the names that the text uses, and a readable layout."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence

from fusion.errors import KernelTextError

WIDTH = 120


def free_names(body: str) -> list[str]:
    """Names that a function body reads before it has bound them anywhere, in the order of their first use."""
    tree = parse(body)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return [name for name in _reads(tree) if name not in bound]


def _reads(tree: ast.AST) -> list[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.id for node in found))


def loads_first(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """(loads and what they need, the others) of statements `name = text` that are computed from the score `s`, whose
    loads are among the others. Loads stand before the product: Triton chooses a tile's layout by the last of the two,
    and reductions over scores in the layout of a load take many shuffles (seen with a table)."""
    reads = [set(_reads(parse(line))) for line in lines]
    names = [line.split(" = ")[0] for line in lines]
    behind, wanted = {"s"}, set()
    for name, read in zip(names, reads, strict=True):
        behind |= {name} if read & behind else set()
    for line, name, read in reversed(list(zip(lines, names, reads, strict=True))):
        if name not in behind and ("tl.load(" in line or name in wanted):
            wanted |= {name, *read}
    first = [line for line, name in zip(lines, names, strict=True) if name in wanted and name not in behind]
    return first, [line for line in lines if line not in first]


def with_used(lines: Sequence[str], later: str) -> str:
    """`later`, after those of the statements `name = text` whose names are used by later ones or in `later`."""
    chosen, used = [later], set(_reads(parse(later)))
    for line in reversed(lines):
        name = line.split(" = ")[0]
        if not name.isidentifier() or name in used:
            chosen.append(line)
            used |= set(_reads(parse(line)))
    return block(*chosen[::-1])


def parse(text: str) -> ast.Module:
    """The text's syntax tree. Raises KernelTextError with the numbered lines around the fault."""
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError as error:
        lines = text.splitlines()
        centre = error.lineno or 1
        low, high = max(0, centre - 6), min(len(lines), centre + 5)
        shown = "\n".join(f"{n + 1:5d}  {lines[n]}" for n in range(low, high))
        raise KernelTextError(f"generated text is not Python: {error.msg}, line {centre}:\n{shown}") from error


def definition(name: str, parameters: Iterable[str], doc: str, body: str, varying: Sequence[str] = ()) -> str:
    """A function under triton.jit. varying: parameters for whose values Triton should compile no variants."""
    inner = textwrap.indent(f'"""{doc}"""\n{body.rstrip()}\n', "    ", lambda line: bool(line.strip()))
    shown = ", ".join(f'"{parameter}"' for parameter in varying)
    decorator = f"@triton.jit(do_not_specialize=[{shown}])" if varying else "@triton.jit"
    return f"{decorator}\ndef {name}({', '.join(parameters)}):\n{inner}"


def _filled(pieces: Iterable[str], width: int) -> str:
    """Pieces one after the other, on lines no longer than `width` where possible."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str) -> str:
    """Lines that are longer than WIDTH, broken: definitions, their decorators, and calls of functions of the module,
    between parameters; other assignments and calls after commas and before signs, in brackets."""
    return "\n".join(line if len(line) <= WIDTH else _wrapped_line(line) for line in text.splitlines())


def _wrapped_line(line: str) -> str:
    indent, text = len(line) - len(line.lstrip()), line.strip()
    defined = re.fullmatch(r"(def \w+\(|@triton\.jit\(do_not_specialize=\[)(.*)(\):|\]\))", text)
    called = re.fullmatch(r"((?:[\w, ]+ = )?\w+\()(.*)(\))", text)
    if defined or called and _arguments(called[2]):
        head, listed, tail = (defined or called).groups()  # type: ignore[union-attr]
        pieces = [f"{item}, " for item in (listed.split(", ") if defined else _arguments(listed))]
    else:
        assigned = re.match(r"\w+ [-+]?= ", text)
        target = assigned[0] if assigned else ""
        head, pieces, tail = f"{target}(", re.split(r"(?<=, )|(?= [+&|] )", text.removeprefix(target)), ")"
    inner = "\n".join(part.strip() for part in _filled(pieces, WIDTH - indent - 5).splitlines())
    return textwrap.indent(f"{head}\n{textwrap.indent(inner, '    ')}\n{tail}", " " * indent)


def _arguments(text: str) -> list[str]:
    """Positional arguments between the brackets of a call; none where there are keywords, too."""
    call = ast.parse(f"f({text})", mode="eval").body
    alone = isinstance(call, ast.Call) and not call.keywords
    return [text[part.col_offset - 2 : (part.end_col_offset or 0) - 2] for part in call.args] if alone else []


def spread(value: str, shape: str) -> str:
    """A value of fewer dimensions, or a number, in a shape."""
    number = re.fullmatch(r'-?[\d.]+(e[-+]?\d+)?|float\(".*"\)', value)
    return f"tl.full({shape}, {value}, tl.float32)" if number else f"tl.broadcast_to({value}, {shape})"


def block(*statements: str) -> str:
    """Statements under each other; empty ones are left out."""
    return "\n".join(statement for statement in statements if statement)


def by_mask(masked: str, full: str | None = None) -> str:
    """Statements by MASKED; no branch where they are the same."""
    if full is None or masked == full:
        return masked
    if not masked:
        return block("if not MASKED:", indented(full))
    return block("if MASKED:", indented(masked), *(("else:", indented(full)) if full else ()))


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")
