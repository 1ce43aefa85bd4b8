"""Process groups are found by the name that they have, and torch tells where its context parallel is on."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from fusion.torch_private.devices import group_of, in_context_parallel


def test_a_group_is_found_by_its_name(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert group_of(dist.group.WORLD.group_name) is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_context_parallel_is_known_by_what_handles_dtensors(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh, buffer = init_device_mesh("cpu", (1,)), torch.zeros(1, 1, 4, 2)
        assert not in_context_parallel()
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]):
            assert in_context_parallel()
        assert not in_context_parallel()
    finally:
        dist.destroy_process_group()
