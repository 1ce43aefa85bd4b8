"""What a new user does with an installed fusion, outside of a checkout: compile, train, ask, compare. Fails if not.

    python .ci/smoke.py     with the interpreter of the environment to be tried; it reads nothing of the checkout

Needs torch and fusion alone. The rest of the model runs in eager mode, so that no C++ compiler is asked for.
"""

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

MODEL = """
import torch

class Model(torch.nn.Module):
    '''Causal attention with soft-capped scores, written out.'''

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        scores = torch.tanh(q @ k.mT / 4 / 30) * 30
        dead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return (scores.masked_fill(dead, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(2)

def inputs():
    return (torch.randn(2, 67, 64),)
"""


def main() -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.py").write_text(MODEL)
        sys.path.insert(0, folder)
        compiled_and_right()
        told = commands(folder)
    for name, text in versions().items():
        print(f"{name:16} {text}")
    print(f"{told}\nright, in {time.perf_counter() - started:.0f} s")
    return 0


def compiled_and_right() -> None:
    """The backend by its name alone, forward and backward, by the numerics rule; and from the installed package."""
    import torch
    from model import Model, inputs  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    eager, (x,) = Model(), inputs()
    exact = Model().double()
    exact.load_state_dict(eager.state_dict())
    ours = Model()
    ours.load_state_dict(eager.state_dict())
    before = "fusion" in sys.modules
    compiled = torch.compile(ours, backend="fusion", options={"inner": "eager", "strict": True})
    results = [model(given) for model, given in ((compiled, x), (eager, x), (exact, x.double()))]
    for result in results:
        result.square().sum().backward()
    grads = [model.project.weight.grad for model in (ours, eager, exact)]

    from torch._dynamo.utils import counters

    import fusion
    from fusion.exactness import errors

    assert not before, "torch found the backend by its entry point"
    assert Path(fusion.__file__).is_relative_to(sysconfig.get_path("purelib")), f"not the package: {fusion.__file__}"
    assert counters["fusion"]["fused"] == 1, dict(counters["fusion"])
    for found in (results, grads):
        compared = errors(*(tensor.detach() for tensor in found))
        assert compared.share <= 1, compared


def commands(folder: str) -> str:
    """What the command line says of the model."""
    program = str(Path(sysconfig.get_path("scripts"), "fusion"))
    told = ""
    for line in ("doctor --json", "explain model.py:Model --strict", "repro model.py:Model --json"):
        done = subprocess.run([program, *line.split()], capture_output=True, text=True, cwd=folder)
        if line.startswith("doctor"):  # it fails where a part that is not needed here is broken
            (cpu,) = [entry for entry in json.loads(done.stdout) if entry["name"] == "target cpu"]
            assert cpu["state"] == "ok", cpu
            continue
        assert done.returncode == 0, f"fusion {line}: {done.stdout}{done.stderr}"
        told = told or done.stdout.splitlines()[0]
    script = subprocess.run([sys.executable, "repro.py"], capture_output=True, text=True, cwd=folder)
    assert script.returncode == 0, script.stdout + script.stderr
    return told


def versions() -> dict[str, str]:
    """Of what was tried."""
    found = {"python": sys.version.split()[0]}
    for name in ("fusion-attention", "torch", "triton", "torch-mlir", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())
