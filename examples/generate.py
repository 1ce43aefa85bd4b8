"""Text generation by an unmodified transformers decoder in eager, by Inductor and by fusion, with several caches.

    python examples/generate.py [--prompts 128 2048] [--caches dynamic static paged] [--tokens 64] [--dtype float32]

The decoder is Llama-like: 4 layers, 8 heads of queries and 2 of keys, 512 wide, with random weights. A prompt is filled
into the cache, which grows (dynamic), is as long as it will ever be (static), or that, in pages that a table finds
(paged); then one token after the other is generated, each the most likely one. The versions take turns. Their tokens
must be the same; the exit code says so.
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
from transformers.cache_utils import Cache, StaticLayer
from transformers.utils.logging import set_verbosity_error

import fusion  # noqa: F401  registers the backend

CACHES = ("dynamic", "static", "paged")
PAGE = 16  # keys
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


class PagedLayer(StaticLayer):
    """K and V of a layer in pages of a pool, `[pages, PAGE, H_kv, d]`: key n of sequence b is in page
    `table[b, n // PAGE]`. The table is `[batch, pages of a sequence]`, the same for all layers."""

    def __init__(self, table: torch.Tensor):
        super().__init__(max_cache_len=table.shape[1] * PAGE)
        self.table = table

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, pages = key_states.device, self.table.numel()
        self.keys, self.values = (x.new_zeros(pages, PAGE, x.shape[1], x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Writes what is new, `[B, H_kv, N, d]`, to its slots; returns K and V in order, with the room that is left."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pools: Any = self.keys, self.values
        positions = torch.arange(key_states.shape[2], device=self.device) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[2])
        for pool, new in zip(pools, (key_states, value_states), strict=True):
            pool[self.table[:, positions // PAGE], positions % PAGE] = new.transpose(1, 2)
        return tuple(pool[self.table].flatten(1, 2).transpose(1, 2) for pool in pools)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("beams would have to share pages")


def paged_cache(layers: int, length: int) -> Cache:
    """Room for a sequence of this length, in pages in any order."""
    pages = -(-length // PAGE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(pages))[None]
    return Cache([PagedLayer(table) for _ in range(layers)])


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
    options: dict[str, Any] = {}
    if cache == "static":
        options["cache_implementation"] = cache
    elif cache == "paged":
        options["past_key_values"] = paged_cache(CONFIG["num_hidden_layers"], prompt.shape[1] + tokens)
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
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
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
