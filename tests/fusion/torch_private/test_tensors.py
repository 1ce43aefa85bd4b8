"""What torch promises to nobody of tensors' memory and of nested tensors, as fusion.torch_private.tensors uses it."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fusion.torch_private import tensors


@pytest.mark.parametrize("make", [tensors.empty_strided_cpu, tensors.public_empty_strided])
def test_empty_strided_makes_a_tensor_of_that_form(make) -> None:
    made = make((3, 2), (1, 3), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((3, 2), (1, 3), torch.bfloat16, "cpu")
    assert make((0,), (1,), torch.int64).numel() == 0


def test_the_version_counts_changes_in_place() -> None:
    x = torch.zeros(3)
    before = tensors.version(x)
    assert tensors.version(x) == before and tensors.version(x + 1) == 0
    x[0].add_(1)
    assert tensors.version(x) == before + 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_is_told_apart(device: str) -> None:
    x, y = torch.empty(2, 3, device=device), torch.empty(2, 3, device=device)
    assert tensors.shares_storage(x, x.mT[1:]) and not tensors.shares_storage(x, y)
    assert not tensors.shares_storage(x, x.clone()) and tensors.shares_storage(x, x.detach())
    assert not tensors.shares_storage(torch.empty(0, device=device), torch.empty(0, device=device))


def test_want_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert tensors.is_out_of_memory(raised.value)
    assert tensors.is_out_of_memory(MemoryError()) and tensors.is_out_of_memory(torch.OutOfMemoryError())
    assert not tensors.is_out_of_memory(RuntimeError("shape '[3]' is invalid for input of size 4"))


class _Nested(NamedTuple):
    values: Tensor
    offsets: Tensor
    whole: Tensor


@pytest.fixture
def jagged() -> _Nested:
    values, offsets = torch.randn(5, 2, 3), torch.tensor([0, 2, 5])
    return _Nested(values, offsets, torch.nested.nested_tensor_from_jagged(values, offsets))


def test_nested_tensors_hold_values_and_offsets(jagged: _Nested) -> None:
    values, offsets = tensors.nested_parts(jagged.whole)
    assert values is jagged.values or torch.equal(values, jagged.values)
    assert torch.equal(offsets, jagged.offsets)


def test_nested_tensors_have_a_ragged_dimension(jagged: _Nested) -> None:
    assert tensors.ragged_dim(jagged.whole) == 1 and tensors.ragged_dim(jagged.whole.transpose(1, 2)) == 2
    size = tensors.nested_size(jagged.whole)
    assert (size[0], *size[2:]) == (2, 2, 3) and isinstance(size[1], torch.SymInt)
    other = torch.nested.nested_tensor_from_jagged(jagged.values, jagged.offsets.clone())
    assert size[1] == tensors.nested_size(jagged.whole * 2)[1]
    assert tensors.nested_size(other)[1] != size[1]  # sequences of their own, though as long


def test_a_nested_tensor_has_the_sequences_of_another(jagged: _Nested) -> None:
    made = tensors.nested_like(jagged.values * 2, jagged.whole)
    assert all(map(torch.equal, made.unbind(), (jagged.whole * 2).unbind()))
    assert tensors.nested_size(made)[1] == tensors.nested_size(jagged.whole)[1]
    (made + jagged.whole).values()  # raises where their lengths are not known to be the same


def test_tensors_that_hold_others_are_told_apart(jagged: _Nested) -> None:
    assert tensors.is_traceable_wrapper_subclass(jagged.whole)
    assert not any(map(tensors.is_traceable_wrapper_subclass, (torch.ones(2), torch.nn.Parameter(torch.ones(2)), 3)))


def test_a_dispatch_mode_sees_operations_and_may_change_them():
    class Doubled(tensors.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert isinstance(function._schema.is_mutable, bool)
            return function(*args, **(kwargs or {})) * 2

    with Doubled():
        made = torch.ones(3)
    assert torch.equal(made, torch.full((3,), 2.0))
