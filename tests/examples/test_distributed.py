"""examples/distributed.py: two gloo processes arrive at the losses of one eager process, with attention fused."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no distributed with gloo"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("distributed", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    # The processes that are started find their function by its module's name, on the same path.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "distributed", module)
        patch.syspath_prepend(str(EXAMPLE.parent))
        patch.setenv("OMP_NUM_THREADS", "1")
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def expected(example):
    model = example.initial()
    return example.train(model, list(model.parameters()), slice(None))


@pytest.mark.parametrize("way", ["data", "sharded", "heads"])
def test_losses_are_those_of_one_eager_process(example, expected, way):
    losses, fused = example.run(way, {"inner": "eager", "strict": True})
    assert fused >= 1
    torch.testing.assert_close(losses, expected, rtol=0, atol=example.TOLERANCE)
    assert expected.std() > 10 * example.TOLERANCE, "losses that do not move would agree whatever the gradients are"


def test_a_model_of_distributed_parameters_is_left_to_the_inner_compiler(example, tmp_path):
    """Compiled as a whole, a model with split heads runs as without fusion, and the report says why."""
    example.dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model, ids = example.initial(), torch.arange(32).view(2, 16) % example.TOKENS
        expected = model(ids)
        mesh = example.init_device_mesh("cpu", (1,))
        for block in model.blocks:
            plan = {"query": example.ColwiseParallel(), "out": example.RowwiseParallel()}
            example.parallelize_module(block, mesh, plan)
        with example.fusion.collect_reports() as reports:
            found = torch.compile(model, backend="fusion", options={"inner": "eager"})(ids)
    finally:
        example.dist.destroy_process_group()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert any("is a DTensor" in note for report in reports for note in report.notes)
