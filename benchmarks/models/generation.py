"""How much faster a small decoder can generate at all: the one of `examples/generate.py`, compiled by Inductor, by
fusion, and by Inductor with its attention left out.

    python -m benchmarks.models.generation [--prompts 128 2048] [--tokens 48] [--rounds 5]

The last one attends to nothing, and writes other tokens; what it gains on Inductor no kernel can exceed. Float32, with
as many threads as torch has; the versions take turns. Medians.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import set_verbosity_error

import fusion  # noqa: F401  registers the backend in a checkout that is not installed
from benchmarks.common.measuring import load_example

LEFT_OUT = "attention left out"


def nothing(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """Queries in place of an attention's output."""
    return query.transpose(1, 2).contiguous(), None


def models(configuration: dict[str, Any]) -> dict[str, Any]:
    """The decoder in each version."""
    found: dict[str, Any] = {}
    for name, backend in (("inductor", "inductor"), ("fusion", "fusion"), (LEFT_OUT, "inductor")):
        torch.manual_seed(0)
        attention: dict[str, Any] = {"attn_implementation": "nothing"} if name == LEFT_OUT else {}
        model: Any = LlamaForCausalLM(LlamaConfig(**configuration, **attention)).eval()
        model.forward = torch.compile(model.forward, backend=backend)
        found[name] = model
    return found


@torch.no_grad()
def main() -> None:
    """Print a line for each cache and prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    set_verbosity_error()
    AttentionInterface.register("nothing", nothing)
    script = load_example("generate")
    for cache in ("static", "dynamic"):
        for length in options.prompts:
            torch._dynamo.reset()
            found = models(script.CONFIG)
            prompt = torch.randint(0, script.CONFIG["vocab_size"], (1, length))
            seconds: dict[str, list[float]] = {name: [] for name in found}
            for number in range(options.rounds + 1):
                for name, model in found.items():
                    start = time.perf_counter()
                    script.generate(model, prompt, options.tokens, cache)
                    seconds[name] += [time.perf_counter() - start] if number else []
            median = {name: statistics.median(times) for name, times in seconds.items()}
            rates = ", ".join(
                f"{name} {options.tokens / each:.1f} tokens/s ({median['inductor'] / each:.2f}x)"
                for name, each in median.items()
            )
            print(f"{cache} cache, prompt of {length}, {torch.get_num_threads()} threads: {rates}", flush=True)


if __name__ == "__main__":
    main()
