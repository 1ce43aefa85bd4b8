"""examples/distributed.py: two gloo processes, attention fused, have the losses and gradients of one eager process."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import processes

LONG = functools.partial(pytest.param, marks=pytest.mark.long)

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
        patch.setattr(torch.multiprocessing, "spawn", processes.run)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def expected(example):
    model = example.initial()
    return example.train(model, list(model.parameters()), slice(None))


@pytest.fixture(scope="module")
def found(example, request):
    """Of the ways that are tested, one after the other in the same processes."""
    tested = [item.callspec.params["way"] for item in request.session.items if item.path == request.path]
    return example.run(tested, {"inner": "eager", "strict": True})


@pytest.mark.parametrize("way", ["data", LONG("sharded"), "heads", LONG("dtensors"), "sequence"])
def test_losses_and_gradients_are_those_of_one_eager_process(found, example, expected, way):
    losses, gradients, fused = found[way]
    assert fused == (1 if way == "sharded" else 2), "sharded blocks share what is compiled"
    torch.testing.assert_close(losses, expected[0], rtol=0, atol=example.TOLERANCE)
    assert example.largest_difference(gradients, expected[1]) <= example.TOLERANCE
    assert expected[0].std() > 10 * example.TOLERANCE, "losses that do not move would agree whatever the gradients are"
