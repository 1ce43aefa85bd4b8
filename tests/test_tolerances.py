"""Numbers are compared by tests/numerics.py alone: no other test has a tolerance of its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SMALL = 0.01
"""A comparison with a literal up to this is one with a tolerance."""
COMPARE = {"allclose", "assert_close", "assert_allclose", "assert_almost_equal", "isclose", "approx"}
RULE = ("numerics.py", "test_numerics.py", "test_tolerances.py")

MOVES = "a share of moves among instructions, not a number that was computed"
EXCEPTIONS = {
    "codegen/triton/test_offline.py::test_loops_do_not_spill_on_hopper": MOVES,
    "codegen/triton/test_offline.py::test_latent_attention_on_hopper": MOVES,
    "codegen/triton/test_offline.py::test_matrices_of_scores_serialise_nothing": MOVES,
    "codegen/triton/test_offline.py::test_heads_of_every_width_on_hopper": MOVES,
    "codegen/triton/test_offline.py::test_gradients_of_wide_heads_on_hopper": MOVES,
    "codegen/triton/test_key_sets.py::test_kernels_do_not_spill": MOVES,
    "codegen/triton/test_offline.py::test_loops_do_not_spill_where_tiles_are_listed": MOVES,
    "examples/test_distributed.py::test_losses_and_gradients_are_those_of_one_eager_process": (
        "the example's own tolerance for sums that two processes make in another order"
    ),
    "fusion/approximate/test_certified.py::test_equal_keys_have_no_bound_and_shifted_keys_a_small_one": (
        "a bound that is rounding and margins alone"
    ),
    "fuzz/specs_run.py::_without_factors_of_fills": "says which gradients are a fill times rounding",
    "fuzz/check.py::_without_unstable": "says which elements are unstable, not how far off a result may be",
    "examples/test_bounds.py::test_small_cache_beats_flash_by_root_m_over_d": "a derived optimum is asymptotic",
    "examples/test_traffic.py::test_standard_attention_moves_forty_gigabytes": "figures that a paper measured",
    "examples/test_traffic.py::test_flash_attention_moves_four_gigabytes": "a figure that a paper measured",
    "examples/test_traffic.py::test_the_nine_times_of_the_paper": "a figure that a paper rounds",
}
"""What compares with a tolerance for a reason: none of it is the result of an attention."""


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every statement of a file, and the name of the function or class at the top that it stands in."""
    for node in tree.body:
        yield getattr(node, "name", "module"), node


def small(node: ast.AST, constants: set[str]) -> bool:
    """Whether an expression has a small literal in it, or the name of one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, float) and 0 < abs(part.value) <= SMALL:
            return True
        if isinstance(part, ast.Name) and part.id in constants:
            return True
        if isinstance(part, ast.Attribute) and part.attr == "eps":
            return True
    return False


def tolerances(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(function, line) of every comparison with a tolerance."""
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and small(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name, body in functions(tree):
        for node in ast.walk(body):
            named = (
                isinstance(node, (ast.Attribute, ast.Name))
                and getattr(node, "attr", getattr(node, "id", "")) in COMPARE
            )
            keyword = isinstance(node, ast.keyword) and node.arg in ("atol", "rtol")
            ordered = isinstance(node, ast.Compare) and any(
                isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops
            )
            if named or keyword or (ordered and small(node, constants)):
                yield name, node.lineno if not keyword else node.value.lineno


def test_no_test_has_a_tolerance_of_its_own():
    found, used = [], set()
    for file in sorted(TESTS.rglob("*.py")):
        place = file.relative_to(TESTS).as_posix()
        if place in RULE:
            continue
        for name, line in tolerances(ast.parse(file.read_text())):
            if (key := f"{place}::{name}") in EXCEPTIONS:
                used.add(key)
            else:
                found.append(f"{place}:{line} in {name}")
    assert not found, "use tests/numerics.py:\n" + "\n".join(found)
    assert used == set(EXCEPTIONS), f"no longer needed: {sorted(set(EXCEPTIONS) - used)}"


def test_tolerances_are_seen():
    for text in (
        "def f(a, b): assert (a - b).abs().max() < 1e-4",
        "EXACT = 1e-9\ndef f(a, b): assert abs(a - b) <= EXACT * 3",
        "def f(a, b): torch.testing.assert_close(a, b)",
        "def f(a, b): assert a == pytest.approx(b)",
        "def f(a, b): assert run(a, b, atol=1)",
        "def f(a, b): assert abs(a - b) <= 4 * torch.finfo(a.dtype).eps",
    ):
        assert list(tolerances(ast.parse(text))), text
    assert not list(tolerances(ast.parse("def f(a, b): assert a < b and a == 1e-3 and torch.equal(a, b)")))
