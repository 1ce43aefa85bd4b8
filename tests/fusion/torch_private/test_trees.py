"""Containers of tensors as fusion.torch_private.tensors walks them."""

import torch

from fusion.torch_private import tensors


def test_containers_are_taken_apart_and_put_together() -> None:
    given = {"a": [1, (2, None)], "b": torch.Size([3])}
    leaves, structure = tensors.tree_flatten(given)
    assert [x for x in leaves if x is not None][:2] == [1, 2]
    assert tensors.tree_unflatten(leaves, structure) == given and tensors.tree_leaves(given) == leaves
    assert hash(structure) == hash(tensors.tree_flatten(given)[1]) and structure == tensors.tree_flatten(given)[1]


def test_functions_are_mapped() -> None:
    assert tensors.tree_map(lambda x: x + 1, ([1, 2], {"a": 3})) == ([2, 3], {"a": 4})
    assert tensors.tree_map_only(int, lambda x: -x, [1, "a"]) == [-1, "a"]
