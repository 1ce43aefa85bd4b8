"""How work is dealt to threads."""

import pytest

from fusion.codegen.mlir.launch import CHUNKS_PER_THREAD, FEW_BLOCKS, chunks_of


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [1, 2, FEW_BLOCKS, FEW_BLOCKS + 1, 64])
@pytest.mark.parametrize("count", [1, 2, 7, 12, 13, 96])
def test_every_thread_has_work_and_short_heads_stay_whole(count: int, blocks: int, threads: int) -> None:
    threads = min(threads, count * blocks)
    chunks = chunks_of(count, blocks, threads)
    assert threads <= chunks <= max(1, min(count * blocks, CHUNKS_PER_THREAD * threads))
    edges = [count * blocks * k // chunks for k in range(chunks + 1)]
    assert all(low < high for low, high in zip(edges, edges[1:], strict=False))
    divisors = [n for n in range(threads, CHUNKS_PER_THREAD * threads + 1) if count % n == 0]
    if blocks <= FEW_BLOCKS and divisors and threads > 1:
        assert all(edge % blocks == 0 for edge in edges)
