"""The house rule for numbers, used by all tests: as exact as eager.

The rule itself is `fusion.exactness`, which the product uses too.

    assert_as_exact_as_eager(actual, eager, reference)   the rule
    assert_as_exact_over_draws(draw)                     the rule, where one draw of few elements may be luck
    assert_runs_as_exact_as_eager(run, eager, *inputs)   the rule, for a function or module and its inputs
    assert_same(actual, expected)                        bit for bit, where the same operations run twice
    assert_same_in_float64(actual, expected)             formulas, both evaluated in float64
    assert_within(error, bound)                          a bound that is proved or certified; never for rounding

Other tests compare no numbers with tolerances; tests/test_tolerances.py looks.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fusion.exactness import Errors, errors, norms, special

ROUNDING = 2.0**-36
"""Of a computation in float64, relative to its largest number."""
DRAWS = 8
"""How many draws count together, where one is beyond the rule."""
_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def leaves(value: Any, path: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, mappings, dataclasses (ModelOutput among them) and key-value caches."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif type(value).__module__ == "transformers.cache_utils":
        for name, inner in vars(value).items():
            if name in ("layers", "self_attention_cache", "cross_attention_cache", "keys", "values"):
                yield from leaves(inner, f"{path}.{name}")


def _describe(path: str, actual, eager, reference, bound: float) -> str:
    wide = torch.complex128 if reference.is_complex() else torch.float64
    difference = (actual.to(wide) - reference.to(wide)).abs().nan_to_num(0.0, posinf=0.0)
    worst = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    beyond = int((difference > bound).sum())
    return (
        f"{path}{list(worst)} of {list(actual.shape)}: actual {actual[worst].item():.9g}, "
        f"eager {eager[worst].item():.9g}, float64 {reference[worst].item():.9g}; "
        f"{beyond} of {actual.numel()} elements beyond the bound"
    )


def assert_same_kind(path: str, actual: torch.Tensor, eager: torch.Tensor, *, dtype: bool, strides: bool) -> None:
    """Assert that shapes agree, and dtypes and strides where these are asked for. path: where the tensors stand."""
    assert actual.shape == eager.shape, f"{path}: shape {list(actual.shape)}, eager has {list(eager.shape)}"
    assert not dtype or actual.dtype == eager.dtype, f"{path}: {actual.dtype}, eager has {eager.dtype}"
    if strides and actual.numel() > 0:
        meaningful = [i for i, size in enumerate(actual.shape) if size > 1]
        ours, theirs = ([t.stride(i) for i in meaningful] for t in (actual, eager))
        assert ours == theirs, f"{path}: strides {actual.stride()}, eager has {eager.stride()}"


def _assert_same_specials(path: str, actual: torch.Tensor, eager: torch.Tensor) -> None:
    ours, theirs = special(actual), special(eager)
    for number, name in enumerate(("NaN", "+inf", "-inf"), 1):
        if (differ := (ours == number) != (theirs == number)).any():
            first = differ.nonzero()[0].tolist()
            raise AssertionError(
                f"{path}: {name} at {int((ours == number).sum())} elements, eager at {int((theirs == number).sum())}; "
                f"first difference at {first}: {actual[tuple(first)].item()} against {eager[tuple(first)].item()}"
            )


def assert_as_exact_as_eager(
    actual: Any,
    eager: Any,
    reference64: Any,
    dtype: torch.dtype | None = None,
    *,
    name: str = "output",
    check_dtype: bool = True,
    check_strides: bool = False,
) -> list[Errors]:
    """Assert the house rule (see the module) for every tensor of nested outputs; returns the comparisons.

    `reference64` is the same nesting computed in float64. `dtype` is the dtype that the computation ran in, where a
    model converts its results (bfloat16 inside, float32 out); by default each tensor's own counts. Integers and
    booleans must be equal to eager's. Strides of dimensions of size 1 mean nothing and are not compared.
    """
    ours, theirs, exact = (dict(leaves(value, name)) for value in (actual, eager, reference64))
    assert ours.keys() == theirs.keys(), f"outputs {sorted(ours)}, eager has {sorted(theirs)}"
    assert theirs.keys() == exact.keys(), f"the reference has outputs {sorted(exact)}, eager {sorted(theirs)}"
    assert theirs, "no tensors to compare"
    compared = []
    for path, want in theirs.items():
        got, reference = ours[path].detach().cpu(), exact[path].detach().cpu()
        want = want.detach().cpu()
        assert_same_kind(path, ours[path], theirs[path], dtype=check_dtype, strides=check_strides)
        assert reference.shape == want.shape, f"{path}: the reference has shape {list(reference.shape)}"
        if want.dtype in _EXACT:
            assert torch.equal(got, want), f"{path}: {int((got != want).sum())} integers differ from eager's"
            continue
        _assert_same_specials(path, got, want)
        result = errors(got, want, reference, dtype)
        compared.append(result)
        for norm, error, bound in (
            ("largest", result.max_error, result.max_bound),
            ("root mean square", result.rms_error, result.rms_bound),
        ):
            if not error <= bound:
                where = _describe(path, got, want, reference, result.max_bound)
                raise AssertionError(f"{path}: {norm} error {error:.3e} exceeds {bound:.3e} (2x eager's). {where}")
    return compared


def assert_as_exact_over_draws(
    draw: Callable[[], tuple[Any, Any, Any]], dtype: torch.dtype | None = None, **how
) -> list[Errors]:
    """The rule for what `draw` returns (actual, eager, reference64); where that is beyond it, for several draws
    together: how far eager's few elements are off in one draw is luck. how: as in `assert_as_exact_as_eager`."""
    drawn = [draw()]
    try:
        return assert_as_exact_as_eager(*drawn[0], dtype, **how)
    except AssertionError:
        drawn += [draw() for _ in range(DRAWS - 1)]
        together = (tree_map(lambda *tensors: torch.stack(tensors), *values) for values in zip(*drawn, strict=True))
        return assert_as_exact_as_eager(*together, dtype, **how)


def wide(value: Any) -> Any:
    """Nested inputs with their floating-point tensors in float64."""
    if isinstance(value, torch.Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: wide(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(wide(inner) for inner in value)
    return value


def assert_runs_as_exact_as_eager(
    run: Callable, eager: Callable, *inputs: Any, dtype: torch.dtype | None = None
) -> list[Errors]:
    """Assert the house rule for `run(*inputs)`. eager: the function or module itself, also the reference in float64."""
    exact = copy.deepcopy(eager).double() if isinstance(eager, torch.nn.Module) else eager
    return assert_as_exact_as_eager(run(*inputs), eager(*inputs), exact(*wide(inputs)), dtype)


def assert_same(actual: Any, expected: Any, name: str = "output") -> None:
    """Assert that every tensor of nested outputs has the expected one's dtype, shape and values; NaN where it has
    NaN."""
    ours, theirs = (dict(leaves(value, name)) for value in (actual, expected))
    assert ours.keys() == theirs.keys() and theirs, f"outputs {sorted(ours)}, expected {sorted(theirs)}"
    for path, want in theirs.items():
        got, want = ours[path].detach().cpu(), want.detach().cpu()
        assert_same_kind(path, got, want, dtype=True, strides=False)
        differ = (got != want) & ~((got != got) & (want != want))
        assert not differ.any(), f"{path}: {int(differ.sum())} of {got.numel()} elements differ"


def assert_same_in_float64(actual: Any, expected: Any, terms: Any = 0, name: str = "output") -> None:
    """Assert that two computations of the same numbers in float64, in different orders, differ by roundings: by less
    than `ROUNDING` of the largest number, thousands of roundings and far below what a wrong formula differs by.

    Takes tensors, arrays and numbers. terms: what the numbers are sums of, where these may cancel.
    """
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (actual, expected))
    assert_same_kind(name, ours, theirs, dtype=True, strides=False)
    _assert_same_specials(name, ours, theirs)
    finite = theirs.isfinite()
    error, size = norms(ours[finite] - theirs[finite])[0], norms(theirs[finite])[0]
    size = max(size, float(torch.as_tensor(terms).abs().max()))
    assert error <= ROUNDING * size, f"{name}: float64 computations differ by {error:.3e}, the largest is {size:.3e}"


def allowance(eager: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest error that the house rule allows, for a test that adds a certified error to it."""
    return errors(eager, eager, reference).max_bound


def assert_within(error: torch.Tensor | float, bound: torch.Tensor | float) -> None:
    """Assert that errors stay within a bound that is proved or certified (of a polynomial, of rounding a term to
    bfloat16): `bound` is computed from it, not chosen. Rounding of a kernel is the house rule's business."""
    error, bound = torch.as_tensor(error, dtype=torch.float64), torch.as_tensor(bound, dtype=torch.float64)
    assert (error <= bound).all(), (
        f"error {float(error.max()):.3e} exceeds the bound {float((error / bound).max()):.3g}x"
    )
