"""Process groups are found by the name that they have."""

import torch.distributed as dist

from fusion.torch_private.devices import group_of


def test_a_group_is_found_by_its_name(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert group_of(dist.group.WORLD.group_name) is dist.group.WORLD
    finally:
        dist.destroy_process_group()
