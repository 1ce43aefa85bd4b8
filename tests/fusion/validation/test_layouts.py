"""Where an element of a view comes from: the index map gives the element that torch gives."""

import pytest
import torch

from fusion.validation import replay

VIEWS = {
    "itself": lambda x: x.view(2, 3, 4, 6),
    "transposed": lambda x: x.transpose(1, 2),
    "heads split": lambda x: x.transpose(1, 2).unflatten(-1, (2, 3)),
    "heads joined": lambda x: x.flatten(2),
    "joined across": lambda x: x.view(6, 24),
    "cut anew": lambda x: x.view(4, 36),
    "rows of another length": lambda x: x.view(2, 8, 9),
    "a slice with steps": lambda x: x[:, 1:, 1::2, 3:],
    "one of a dimension": lambda x: x[:, 2, :, 5],
    "broadcast": lambda x: x.unsqueeze(2).expand(2, 3, 5, 4, 6),
    "windows": lambda x: x.unfold(3, 4, 1),
    "a diagonal": lambda x: x.diagonal(1, 2, 3),
    "shifted lines": lambda x: x.flatten()[: 2 * 3 * 23].view(2, 3, 23)[:, :, 5:],
    "a part, split": lambda x: x.flatten()[24:].view(5, 2, 12),
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_element_of_a_view(name) -> None:
    shape = (2, 3, 4, 6)
    numbers = torch.arange(144).view(shape)
    expected = VIEWS[name](numbers)
    grid = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
    moved = replay.of_view(VIEWS[name], shape, None)
    assert moved is not None
    index = moved(grid)
    for at, extent in zip(index, shape, strict=True):
        assert 0 <= int(at.min()) and int(at.max()) < extent
    assert torch.equal(numbers[index].expand_as(expected), expected)


def test_a_dimension_that_a_view_moves_keeps_its_index() -> None:
    moved = replay.of_view(lambda x: x[:, :, None].expand(2, 3, 4, 5).transpose(1, 3), (2, 3, 5), None)
    assert moved is not None
    batch, column, copy, row = (torch.zeros(1, dtype=torch.int64) for _ in range(4))
    assert [id(entry) for entry in moved((batch, column, copy, row))] == [id(batch), id(row), id(column)]


def test_what_copies_has_no_map() -> None:
    assert replay.of_view(lambda x: x.mT.reshape(6), (2, 3), None) is None
