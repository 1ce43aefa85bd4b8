"""Text generation by an unmodified transformers decoder in eager, by Inductor and by fusion, with several caches.

    python examples/generate.py [--prompts 128 2048] [--caches dynamic static] [--tokens 64] [--dtype float32]

The decoder is Llama-like: 4 layers, 8 heads of queries and 2 of keys, 512 wide, with random weights. A prompt is filled
into the cache, which grows (dynamic) or is as long as it will ever be (static); then one token after the other is
generated, each the most likely one. The versions take turns. Their tokens must be the same; the exit code says so.
"""

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import set_verbosity_error

import fusion  # noqa: F401  registers the backend

BACKENDS = {"eager": None, "inductor": "inductor", "fusion": "fusion"}
CONFIG: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def versions(dtype: torch.dtype) -> dict[str, LlamaForCausalLM]:
    """The same model three times. Its forward pass is all that is compiled: `generate` is transformers' own."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.to(dtype).eval()
    found = {name: copy.deepcopy(model) for name in BACKENDS}
    for name, backend in BACKENDS.items():
        if backend is not None:
            found[name].forward = torch.compile(found[name].forward, backend=backend)
    return found


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int, cache: str) -> torch.Tensor:
    """Token ids `[1, tokens]` that follow the prompt `[1, N]`."""
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    out = model.generate(
        prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, disable_compile=True,
        **options,
    )  # fmt: skip
    return out[:, prompt.shape[1] :]


def measure(cache: str, length: int, arguments: argparse.Namespace) -> tuple[Table, bool]:
    """A table of all versions with one cache and one length of the prompt; whether all tokens are the same."""
    torch._dynamo.reset()
    models = versions(getattr(torch, arguments.dtype))
    prompt = torch.randint(0, CONFIG["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
    found, first, graphs, seconds = {}, {}, {}, {name: [] for name in models}
    for name, model in models.items():
        before, start = counters["stats"]["unique_graphs"], time.perf_counter()
        found[name] = generate(model, prompt, arguments.tokens, cache)
        first[name], graphs[name] = time.perf_counter() - start, counters["stats"]["unique_graphs"] - before
    for _ in range(arguments.rounds):
        for name, model in models.items():
            start = time.perf_counter()
            assert torch.equal(generate(model, prompt, arguments.tokens, cache), found[name]), "a second run differs"
            seconds[name].append(time.perf_counter() - start)
    table = Table(title=f"{cache} cache, prompt of {length}, {arguments.dtype}", title_justify="left")
    for column in ("", "tokens/s", "of eager's", "first run, s", "graphs", "same tokens"):
        table.add_column(column, justify="right" if column else "left")
    median = {name: statistics.median(times) for name, times in seconds.items()}
    same = {name: torch.equal(tokens, found["eager"]) for name, tokens in found.items()}
    for name in models:
        cells = (f"{arguments.tokens / median[name]:.1f}", f"{median['eager'] / median[name]:.2f}x")
        table.add_row(name, *cells, f"{first[name]:.1f}", str(graphs[name]), "yes" if same[name] else "NO")
    return table, all(same.values())


@torch.no_grad()
def main() -> int:
    set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 2048], help="tokens of the prompt")
    parser.add_argument("--caches", nargs="+", choices=("dynamic", "static"), default=["dynamic", "static"])
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are generated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="turns that are timed, after a first run")
    arguments = parser.parse_args()
    all_same = True
    for cache in arguments.caches:
        for length in arguments.prompts:
            table, same = measure(cache, length, arguments)
            Console().print(table)
            all_same &= same
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
