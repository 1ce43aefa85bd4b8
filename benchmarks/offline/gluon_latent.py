"""Latent attention of 576 and 512 columns by hand in Gluon for Hopper: 64 rows share keys, whose first 512 are V.

`one_tile`: eight warps share the keys of a tile for the scores and the columns of V for the sums; weights go through
shared memory, and exponentials run beside the product with V of the tile before. `tile_each`: two groups of warps
compute the scores of a tile each, hand each other their maxima and weights, and sum 256 columns each (after FlashMLA),
while a warp loads. Weights lie where the last 64 columns of their keys were. See `gluon_loops`.
"""

# What Gluon's functions are given and return is known to its compiler alone.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from benchmarks.offline.gluon_loops import Constant, barriers, fetch, rescaled, shared_layout

VALUES, HALF, REST = Constant(512), Constant(256), Constant(64)
"""Columns of V, of what one group of warps sums, and of K beside V's."""


@gluon.jit
def ring_of(at, N, KEYS: Constant, STAGES: Constant, RELEASES: Constant, WIDTH: Constant):
    """Of the keys: (descriptors, places, barriers that open when a place is full, and when it is empty) for the columns
    in parts and for the rest. WIDTH: of a part."""
    WIDE: Constant = shared_layout(KEYS, WIDTH)
    NARROW: Constant = shared_layout(KEYS, REST)
    part = tma.make_tensor_descriptor(at, [N, 576], [576, 1], [KEYS, WIDTH], WIDE)
    rest = tma.make_tensor_descriptor(at, [N, 576], [576, 1], [KEYS, REST], NARROW)
    parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (VALUES // WIDTH), KEYS, WIDTH], WIDE)
    rests = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, REST], NARROW)
    return part, rest, parts, rests, barriers(STAGES, 1), barriers(STAGES, RELEASES)


@gluon.jit
def fetch_keys(ring, tile, place, more):
    part, rest, parts, rests, full, _ = ring
    WIDTH: Constant = part.block_shape[1]
    PARTS: Constant = VALUES // WIDTH
    mbarrier.expect(full.index(place), PARTS * part.block_type.nbytes + rest.block_type.nbytes, more)
    for i in gl.static_range(PARTS):
        to = parts.index(place * PARTS + i)
        tma.async_copy_global_to_shared(part, [tile * part.block_shape[0], i * WIDTH], full.index(place), to, more)
    first = [tile * part.block_shape[0], VALUES]
    tma.async_copy_global_to_shared(rest, first, full.index(place), rests.index(place), more)


@gluon.jit
def scores(q, ring, place, KEYS: Constant, layout: Constant):
    """Begins the products with a tile of the keys."""
    q_parts, q_rest = q
    _, _, parts, rests, _, _ = ring
    PARTS: Constant = q_parts.shape[0]
    zero = gl.full([q_rest.shape[0], KEYS], 0.0, gl.float32, layout)
    s = warpgroup_mma(q_rest, rests.index(place).permute([1, 0]), zero, use_acc=False, is_async=True)
    for i in gl.static_range(PARTS):
        s = warpgroup_mma(q_parts.index(i), parts.index(place * PARTS + i).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def queries(at, N, first_row, ROWS: Constant, WIDTH: Constant):
    """(parts, rest) and the barrier that opens when they are there."""
    PARTS: Constant = VALUES // WIDTH
    WIDE: Constant = shared_layout(ROWS, WIDTH)
    NARROW: Constant = shared_layout(ROWS, REST)
    part = tma.make_tensor_descriptor(at, [N, 576], [576, 1], [ROWS, WIDTH], WIDE)
    rest = tma.make_tensor_descriptor(at, [N, 576], [576, 1], [ROWS, REST], NARROW)
    q_parts = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, WIDTH], WIDE)
    q_rest = gl.allocate_shared_memory(gl.bfloat16, [ROWS, REST], NARROW)
    full = barriers(1 + PARTS, 1)
    fence_async_shared()
    fetch(rest, first_row, VALUES, full.index(0), q_rest, True)
    for i in gl.static_range(PARTS):
        fetch(part, first_row, i * WIDTH, full.index(1 + i), q_parts.index(i), True)
    return (q_parts, q_rest), full


@gluon.jit
def softmax_step(s, m, l, scale):
    """(weights, factor of sums, maximum, sum)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def write(acc, l, out_at, first_row, first_column, layout: Constant):
    rows = first_row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    l = gl.convert_layout(l, gl.SliceLayout(1, layout))
    at = out_at + gl.expand_dims(rows, 1) * 512 + gl.expand_dims(columns, 0)
    gl.store(at, (acc / gl.expand_dims(l, 1)).to(gl.bfloat16))


@gluon.jit
def traded(maxima, there, own, slot, phase, GROUP: Constant, layout: Constant):
    """The other group's number of each row, for one's own."""
    maxima.index(slot + GROUP).store(own)
    mbarrier.arrive(there.index(GROUP))
    mbarrier.wait(there.index(1 - GROUP), phase)
    return maxima.index(slot + 1 - GROUP).load(layout)


@gluon.jit
def group(q, q_full, ring, exchange, turns, scale, out_at, first_row, ROWS: Constant, KEYS: Constant, GROUP: Constant):
    """One of two groups of warps, whose tile is every other one; `exchange`: maxima, and barriers that open when a
    group's maxima, and its weights, are there."""
    S_LAYOUT: Constant = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: Constant = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: Constant = gl.SliceLayout(1, S_LAYOUT)
    maxima, maxima_there, weights_there = exchange
    _, _, parts, rests, full, empty = ring
    acc = gl.full([ROWS, HALF], 0.0, gl.float32, O_LAYOUT)
    m, l = gl.full([ROWS], float("-inf"), gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)
    for i in gl.static_range(3):
        mbarrier.wait(q_full.index(i), 0)
    for j in range(turns):
        phase = j & 1
        mbarrier.wait(full.index(GROUP), phase)
        s = warpgroup_mma_wait(0, deps=[scores(q, ring, GROUP, KEYS, S_LAYOUT)])
        own = gl.max(s, 1) * scale
        other = traded(maxima, maxima_there, own, phase * 2, phase, GROUP, ROW)
        m_new = gl.maximum(m, gl.maximum(own, other))
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
        l = l * alpha + gl.sum(p, 1)
        m = m_new
        rests.index(GROUP).store(p.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(weights_there.index(GROUP))
        acc = rescaled(acc, alpha, O_LAYOUT)
        p_factor = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, O_LAYOUT, 2))
        acc = warpgroup_mma(p_factor, parts.index(GROUP * 2 + GROUP), acc, is_async=True)
        mbarrier.wait(weights_there.index(1 - GROUP), phase)
        mbarrier.wait(full.index(1 - GROUP), phase)
        acc = warpgroup_mma(rests.index(1 - GROUP), parts.index((1 - GROUP) * 2 + GROUP), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(GROUP))
        mbarrier.arrive(empty.index(1 - GROUP))
    l += traded(maxima, maxima_there, l, 0, turns & 1, GROUP, ROW)
    write(acc, l, out_at, first_row, GROUP * HALF, O_LAYOUT)


@gluon.jit
def load(ring, turns):
    """What the warp that loads does."""
    _, _, _, _, _, empty = ring
    for j in range(turns):
        for place in gl.static_range(2):
            mbarrier.wait(empty.index(place), (j & 1) ^ 1)
            fetch_keys(ring, j * 2 + place, place, True)


@gluon.jit
def tile_each(q_at, k_at, out_at, scale, N, ROWS: Constant, KEYS: Constant):
    """Of an even number of tiles."""
    first_row, turns = gl.program_id(0) * ROWS, gl.cdiv(N, 2 * KEYS)
    maxima = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchange = (maxima, barriers(2, 1), barriers(2, 1))
    ring = ring_of(k_at, N, KEYS, 2, 2, HALF)
    q, q_full = queries(q_at, N, first_row, ROWS, HALF)
    gl.warp_specialize(
        [
            (group, (q, q_full, ring, exchange, turns, scale, out_at, first_row, ROWS, KEYS, 0)),
            (group, (q, q_full, ring, exchange, turns, scale, out_at, first_row, ROWS, KEYS, 1)),
            (load, (ring, turns)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def one_tile(q_at, k_at, out_at, scale, N, ROWS: Constant, KEYS: Constant, STAGES: Constant):
    """Of any number of tiles, but whole ones."""
    S_LAYOUT: Constant = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    O_LAYOUT: Constant = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    ROW: Constant = gl.SliceLayout(1, S_LAYOUT)
    first_row, turns = gl.program_id(0) * ROWS, gl.cdiv(N, KEYS)
    ring = ring_of(k_at, N, KEYS, STAGES, 1, 512)
    q, q_full = queries(q_at, N, first_row, ROWS, 512)
    _, _, parts, _, full, _ = ring
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, KEYS], shared_layout(ROWS, KEYS))
    for i in gl.static_range(STAGES):
        fetch_keys(ring, i, i, i < turns)
    acc = gl.full([ROWS, 512], 0.0, gl.float32, O_LAYOUT)
    m, l = gl.full([ROWS], float("-inf"), gl.float32, ROW), gl.full([ROWS], 0.0, gl.float32, ROW)
    for i in gl.static_range(2):
        mbarrier.wait(q_full.index(i), 0)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=[scores(q, ring, 0, KEYS, S_LAYOUT)])
    p, alpha, m, l = softmax_step(s, m, l, scale)
    for j in range(1, turns):
        place, before = j % STAGES, (j - 1) % STAGES
        p_tile.store(p.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.wait(full.index(place), (j // STAGES) & 1)
        s = scores(q, ring, place, KEYS, S_LAYOUT)
        acc = warpgroup_mma(p_tile, parts.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p, alpha, m, l = softmax_step(s, m, l, scale)
        mbarrier.wait(full.index(place), (j // STAGES) & 1)  # it is open: a branch that ptxas moves no wait across
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        fetch_keys(ring, j - 1 + STAGES, before, j - 1 + STAGES < turns)
        acc = rescaled(acc, alpha, O_LAYOUT)
    p_tile.store(p.to(gl.bfloat16))
    fence_async_shared()
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p_tile, parts.index((turns - 1) % STAGES), acc, is_async=True)])
    write(acc, l, out_at, first_row, 0, O_LAYOUT)
