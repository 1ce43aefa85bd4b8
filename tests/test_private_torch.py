"""Parts of torch that are not public are named in fusion/torch_private alone, where each has a contract test."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "fusion" / "torch_private"
PRIVATE = re.compile(r"_(?!_).+")
NOT_PROMISED = ("torch.fx.experimental", "torch.utils._sympy")
"""Modules without an underscore that promise nothing, too."""
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OF_OBJECTS = {"allow_non_fake_inputs", "fake_mode", "item_memo", "real_obj", "shape_env", "tensor_tracker"}
"""Attributes of torch's private objects that have no underscore."""
EXCEPTIONS = {
    ("codegen/triton/interpret.py", "_get_np_dtype"): "Triton's interpreter, not torch",
    ("codegen/triton/interpret.py", "_patch_lang_tensor"): "Triton's interpreter, not torch",
    ("fusion/integrations/transformers.py", "_global_mapping"): "transformers, not torch",
}
ADVICE = "move it to fusion/torch_private, with a contract test in tests/fusion/torch_private"


def sources() -> list[Path]:
    """Every file of the package but those of the room. (passes and codegen are links within fusion.)"""
    every = (path for folder in ("fusion", "passes", "codegen") for path in (ROOT / folder).rglob("*.py"))
    return sorted({path.resolve() for path in every if ROOM not in path.parents})


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names with an underscore that the package itself gives to something."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return defined | stored | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def is_private(dotted: str) -> bool:
    return dotted.startswith(NOT_PROMISED) or any(map(PRIVATE.fullmatch, dotted.split(".")))


def dotted_name(node: ast.expr) -> str:
    """Names and attributes as they are written; "?" for what they are attributes of, where that has no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a file names of torch that is private; of attributes the last name, which may be another library's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch.") and is_private(a.name))
        elif isinstance(node, ast.ImportFrom):
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in dotted if name.startswith("torch.") and is_private(name))
        elif isinstance(node, ast.Attribute):
            whole = dotted_name(node)
            if whole.startswith(("torch.ops.", "aten.")):  # operators, as graphs have them
                continue
            of_torch = whole.startswith("torch.") and is_private(whole)
            foreign = PRIVATE.fullmatch(node.attr) and node.attr not in own | OF_NAMED_TUPLES
            if of_torch or foreign or node.attr in OF_OBJECTS:
                yield node.attr
        elif isinstance(node, ast.Call) and dotted_name(node.func) in ("getattr", "hasattr", "setattr"):
            name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
            if name in OF_OBJECTS or PRIVATE.fullmatch(name) and name not in own:
                yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"torch\.[\w.]+", node.value) and is_private(node.value):
                yield node.value


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sources()}


@functools.cache
def own() -> set[str]:
    return own_names(list(trees().values()))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_part_of_torch_is_named(path: Path) -> None:
    file = str(path.relative_to(ROOT))
    found = {name for name in private_names(trees()[path], own()) if (file, name) not in EXCEPTIONS}
    assert not found, ADVICE


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=" ".join)
def test_each_exception_is_one(exception: tuple[str, str]) -> None:
    file, name = exception
    assert name in private_names(trees()[ROOT / file], own())


def test_the_room_knows_nobody() -> None:
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            outside = [n for n in names if n.startswith("fusion") and not n.startswith("fusion.torch_private")]
            assert not outside, f"{path.name} imports {outside}"


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo.utils", "from torch._inductor import config", "from torch.overrides import _pop_mode",
        "torch._C._set_grad_enabled(True)", "x = tensor._base", "mode = fake.fake_mode", "name = 'torch._C._functorch'",
        "from torch.fx.experimental.proxy_tensor import make_fx", "torch.cuda._sleep(1)",
        "hasattr(x, 'fake_mode')", "getattr(x, '_base')",
    ],
)  # fmt: skip
def test_private_names_are_recognised(line: str) -> None:
    assert list(private_names(ast.parse(line), set()))


@pytest.mark.parametrize("line", ["self._held", "torch.ops.aten._softmax", "a.__dict__", "t._replace(a=1)"])
def test_other_names_are_not(line: str) -> None:
    assert not list(private_names(ast.parse(line), {"_held"}))
