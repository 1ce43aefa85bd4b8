"""Key loops of the forward by hand in Gluon for Hopper: plain attention in bfloat16, without a mask.

Gluon is Triton's lower language: layouts, barriers, copies and the roles of warps are written out, and Triton schedules
nothing. This is FlashAttention-3's loop: exponentials run beside the product with V of the tile before (`late`), or
beside that and the next tile's scores (`ahead`), in warps that do everything together, or with a warp that loads and
two groups that issue their products in turns. `gluon_static` compiles them. None has run: Gluon has no interpreter.
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

Constant = gl.constexpr


@gluon.constexpr_function
def shared_layout(rows, columns):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.jit
def barriers(count: Constant, arrivals: Constant):
    """So many barriers, each of which opens after so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), arrivals)
    return made


@gluon.jit
def fetch(described, first, column, full, tile, more):
    """Copies a tile, if there is one more, and opens its barrier."""
    mbarrier.expect(full, described.block_type.nbytes, more)
    tma.async_copy_global_to_shared(described, [first, column], full, tile, more)


@gluon.jit
def release(ring, tile, STAGES: Constant, KEYS: Constant, turns, ROLES: Constant):
    """Gives back a tile's place: to the warp that loads, or to the copy of a later tile."""
    described, tiles, full, empty = ring
    place = tile % STAGES
    if ROLES:
        mbarrier.arrive(empty.index(place))
    else:
        later = tile + STAGES
        fetch(described, later * KEYS, 0, full.index(place), tiles.index(place), later < turns)


@gluon.jit
def await_tile(ring, tile, STAGES: Constant):
    _, _, full, _ = ring
    mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)


@gluon.jit
def scores(q, ring, tile, STAGES: Constant, layout: Constant):
    """Begins the product with a tile of K."""
    await_tile(ring, tile, STAGES)
    _, tiles, _, _ = ring
    k = tiles.index(tile % STAGES).permute([1, 0])
    zero = gl.full([q.shape[0], k.shape[1]], 0.0, gl.float32, layout)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def values(p, acc, ring, tile, STAGES: Constant):
    """Begins the product with a tile of V, which is there."""
    _, tiles, _, _ = ring
    return warpgroup_mma(p, tiles.index(tile % STAGES), acc, is_async=True)


@gluon.jit
def softmax_step(s, m, l, scale, layout: Constant):
    """(weights in the layout of a product's factor, factor of sums, maximum, sum)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
    p_factor = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, layout, 2))
    return p_factor, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def rescaled(acc, alpha, layout: Constant):
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def take_turn(turn, number, GROUP: Constant, ROLES: Constant):
    """Waits until the other group has issued its products."""
    if ROLES:
        mbarrier.wait(turn.index(GROUP), (number + 1 + GROUP) & 1)


@gluon.jit
def give_turn(turn, GROUP: Constant, ROLES: Constant):
    if ROLES:
        mbarrier.arrive(turn.index(1 - GROUP))


@gluon.jit
def late(
    q, k, v, turn, turns, scale, layouts: Constant, D: Constant, KEYS: Constant, STAGES: Constant, GROUP: Constant,
    ROLES: Constant,
):  # fmt: skip
    """(sums, sum of weights): the product with V of a tile runs beside the exponentials of the next."""
    S_LAYOUT: Constant = layouts[0]
    O_LAYOUT: Constant = layouts[1]
    acc = gl.full([q.shape[0], D], 0.0, gl.float32, O_LAYOUT)
    m = gl.full([q.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.full([q.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    s = warpgroup_mma_wait(0, deps=[scores(q, k, 0, STAGES, S_LAYOUT)])
    release(k, 0, STAGES, KEYS, turns, ROLES)
    p, alpha, m, l = softmax_step(s, m, l, scale, O_LAYOUT)
    await_tile(v, 0, STAGES)
    for j in range(1, turns):
        take_turn(turn, j - 1, GROUP, ROLES)
        s = scores(q, k, j, STAGES, S_LAYOUT)
        acc = values(p, acc, v, j - 1, STAGES)
        give_turn(turn, GROUP, ROLES)
        s = warpgroup_mma_wait(1, deps=[s])
        release(k, j, STAGES, KEYS, turns, ROLES)
        p, alpha, m, l = softmax_step(s, m, l, scale, O_LAYOUT)
        await_tile(v, j, STAGES)  # here: without a branch ptxas waits for the product before the exponentials
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        release(v, j - 1, STAGES, KEYS, turns, ROLES)
        acc = rescaled(acc, alpha, O_LAYOUT)
    return warpgroup_mma_wait(0, deps=[values(p, acc, v, turns - 1, STAGES)]), l


@gluon.jit
def ahead(
    q, k, v, turn, turns, scale, layouts: Constant, D: Constant, KEYS: Constant, STAGES: Constant, GROUP: Constant,
    ROLES: Constant,
):  # fmt: skip
    """`late`, where the next tile's scores are computed beside the exponentials, too; of two tiles or more."""
    S_LAYOUT: Constant = layouts[0]
    O_LAYOUT: Constant = layouts[1]
    acc = gl.full([q.shape[0], D], 0.0, gl.float32, O_LAYOUT)
    m = gl.full([q.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.full([q.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    s = warpgroup_mma_wait(0, deps=[scores(q, k, 0, STAGES, S_LAYOUT)])
    release(k, 0, STAGES, KEYS, turns, ROLES)
    p, alpha, m, l = softmax_step(s, m, l, scale, O_LAYOUT)
    s = warpgroup_mma_wait(0, deps=[scores(q, k, 1, STAGES, S_LAYOUT)])
    release(k, 1, STAGES, KEYS, turns, ROLES)
    await_tile(v, 0, STAGES)
    for j in range(1, turns - 1):
        take_turn(turn, j - 1, GROUP, ROLES)
        s_next = scores(q, k, j + 1, STAGES, S_LAYOUT)
        acc = values(p, acc, v, j - 1, STAGES)
        give_turn(turn, GROUP, ROLES)
        p, alpha, m, l = softmax_step(s, m, l, scale, O_LAYOUT)
        await_tile(v, j, STAGES)
        s, acc, p = warpgroup_mma_wait(0, deps=[s_next, acc, p])
        release(k, j + 1, STAGES, KEYS, turns, ROLES)
        release(v, j - 1, STAGES, KEYS, turns, ROLES)
        acc = rescaled(acc, alpha, O_LAYOUT)
    acc = warpgroup_mma_wait(0, deps=[values(p, acc, v, turns - 2, STAGES)])
    p, alpha, m, l = softmax_step(s, m, l, scale, O_LAYOUT)
    await_tile(v, turns - 1, STAGES)
    return warpgroup_mma_wait(0, deps=[values(p, rescaled(acc, alpha, O_LAYOUT), v, turns - 1, STAGES)]), l


@gluon.jit
def multiply(
    q, shared, first_row, scale, AHEAD: Constant, D: Constant, KEYS: Constant, STAGES: Constant, GROUP: Constant,
    ROLES: Constant,
):  # fmt: skip
    """What warps that multiply do: the loop over the keys, and writing."""
    WARPS: Constant = gl.num_warps()
    S_LAYOUT: Constant = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    O_LAYOUT: Constant = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    q_full, k, v, turn, turns, out_at = shared
    mbarrier.wait(q_full.index(GROUP), 0)
    LAYOUTS: Constant = (S_LAYOUT, O_LAYOUT)
    if AHEAD:
        acc, l = ahead(q, k, v, turn, turns, scale, LAYOUTS, D, KEYS, STAGES, GROUP, ROLES)
    else:
        acc, l = late(q, k, v, turn, turns, scale, LAYOUTS, D, KEYS, STAGES, GROUP, ROLES)
    l = gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT))
    rows = first_row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, O_LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    at = out_at + gl.expand_dims(rows, 1) * D + gl.expand_dims(columns, 0)
    gl.store(at, (acc / gl.expand_dims(l, 1)).to(gl.bfloat16))


@gluon.jit
def load(k, v, turns, KEYS: Constant, STAGES: Constant):
    """What the warp that loads does."""
    for j in range(turns):
        place, closed = j % STAGES, ((j // STAGES) & 1) ^ 1
        for ring in gl.static_range(2):
            described, tiles, full, empty = k if ring == 0 else v
            mbarrier.wait(empty.index(place), closed)
            fetch(described, j * KEYS, 0, full.index(place), tiles.index(place), True)


@gluon.jit
def ring_of(at, N, D: Constant, KEYS: Constant, STAGES: Constant):
    """Of K or V: (descriptor, places, barriers that open when a place is full, and when it is empty)."""
    LAYOUT: Constant = shared_layout(KEYS, D)
    described = tma.make_tensor_descriptor(at, [N, D], [D, 1], [KEYS, D], LAYOUT)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], LAYOUT)
    return described, tiles, barriers(STAGES, 1), barriers(STAGES, 2)


@gluon.jit
def forward(
    q_at, k_at, v_at, out_at, scale, N, AHEAD: Constant, D: Constant, ROWS: Constant, KEYS: Constant, STAGES: Constant,
    ROLES: Constant,
):  # fmt: skip
    """scale holds log2(e)."""
    GROUPS: Constant = 2 if ROLES else 1
    OWN: Constant = ROWS // GROUPS
    Q_LAYOUT: Constant = shared_layout(OWN, D)
    described = tma.make_tensor_descriptor(q_at, [N, D], [D, 1], [OWN, D], Q_LAYOUT)
    q = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, OWN, D], Q_LAYOUT)
    q_full, turn = barriers(GROUPS, 1), barriers(2, 1)
    k, v = ring_of(k_at, N, D, KEYS, STAGES), ring_of(v_at, N, D, KEYS, STAGES)
    fence_async_shared()
    first_row, turns = gl.program_id(0) * ROWS, gl.cdiv(N, KEYS)
    for i in gl.static_range(GROUPS):
        fetch(described, first_row + i * OWN, 0, q_full.index(i), q.index(i), True)
    if ROLES:
        shared = (q_full, k, v, turn, turns, out_at)
        gl.warp_specialize(
            [
                (multiply, (q.index(0), shared, first_row, scale, AHEAD, D, KEYS, STAGES, 0, ROLES)),
                (multiply, (q.index(1), shared, first_row + OWN, scale, AHEAD, D, KEYS, STAGES, 1, ROLES)),
                (load, (k, v, turns, KEYS, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        for i in gl.static_range(STAGES):
            release(k, i - STAGES, STAGES, KEYS, turns, ROLES)
            release(v, i - STAGES, STAGES, KEYS, turns, ROLES)
        shared = (q_full, k, v, turn, turns, out_at)
        multiply(q.index(0), shared, first_row, scale, AHEAD, D, KEYS, STAGES, 0, ROLES)
