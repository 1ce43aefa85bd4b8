"""FlexAttention in the kernels of FlashAttention-4 (`kernel_options={"BACKEND": "FLASH"}`), called for a spec.

The score program becomes a `score_mod`, the mask a `mask_mod`. Both are graphs of torch operations, traced from the
evaluation of expressions (`fusion.ir.ops.evaluate`); the tensors that they read are indexed in the call's operands.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention

from fusion.caching import BoundedCache
from fusion.ir.expr import FALSE, SCORE, TRUE, Expr, I, J, Kind, coord, coordinates, load, loads, substitute, walk
from fusion.ir.mask_facts import LARGEST
from fusion.ir.ops import apply, conjuncts, evaluate
from fusion.ir.ranges import interval
from fusion.ir.spec import AttentionSpec, Normalizer
from fusion.lowering.score_programs import is_tame, may_overflow, plain_scale, rows_live

BLOCK = 128  # keys in a block of a mask, and queries; on compute capability 10 a block has twice as many queries

OPTIONS: Any = {"BACKEND": "FLASH"}  # by which FlexAttention takes FlashAttention's kernels, or raises

WIDEST = 256  # columns of Q and of V, at most; they come in eights

POSITIONS = (coord("b0"), coord("b1"), I, J)


@functools.cache
def installed() -> str:
    """Version of FlashAttention-4, "unknown" where it does not state one; empty where there is none."""
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return ""
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    except Exception:  # an older flash_attn may fail in any way where it does not fit this torch
        return ""


def runs(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether a device has kernels for a spec's dtype and columns."""
    if device.type != "cuda" or torch.version.hip is not None or not installed():
        return False
    options = getattr(flex_attention, "FlexKernelOptions", None)
    if options is None or "BACKEND" not in options.__annotations__ or not hasattr(flex_attention, "AuxRequest"):
        return False
    columns = [width.integer for width in (spec.d, spec.d_v) if width.is_const]
    fits = len(columns) == 2 and all(width % 8 == 0 and 0 < width <= WIDEST for width in columns)
    return fits and spec.dtype in ("float16", "bfloat16") and torch.cuda.get_device_capability(device)[0] in (9, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """FlexAttention's form of a spec."""

    scale: float  # of scores, before the program
    score: Expr  # the program, where keys are live if there is a mask; SCORE itself where there is nothing to do
    live: Expr | None  # of the mask, None where every key counts
    undefined: bool  # whether a row may be NaN in eager since all its scores are -inf; FlexAttention gives zeros


def words(spec: AttentionSpec) -> Words:
    """FlexAttention's form of a spec's program and mask. The mask becomes a `mask_mod` where dead keys have no weight
    in any
    row: they are filled with -inf, or each row is known to have a live key."""
    mask, score, live = spec.mask, spec.score, None
    certain = rows_live(spec)
    if mask is not None and (mask.fill == -math.inf or certain):
        live = mask.live
        known = (live, *conjuncts(live))
        score = substitute(score, dict.fromkeys(known, TRUE) | {apply("not", part): FALSE for part in known})
    scale, score = _scaled(score)
    ordinary = is_tame(score) and (live is None or certain)
    return Words(scale=scale, score=score, live=live, undefined=spec.normalizer is Normalizer.SOFTMAX and not ordinary)


def _scaled(score: Expr) -> tuple[float, Expr]:
    """(c, p) of a program that is p of c times the score: constant factors of the score."""
    scale = 1.0
    while score is not SCORE:
        users = [part for part in walk(score) if SCORE in part.args]
        factor = plain_scale(users[0]) if len(users) == 1 else None
        if factor is None or not 0 < scale * factor < math.inf:
            break
        scale, score = scale * factor, substitute(score, {users[0]: SCORE})
    return scale, score


class Modification(NamedTuple):
    """An expression as a function of torch. function: of tensors without dimensions: the score where it is one of
    `names`, POSITIONS, and `reads`. reads: sizes, and loads without index that stand for whole tensors."""

    function: Callable[..., Tensor]
    reads: tuple[Expr, ...]

    def read(self, spec: AttentionSpec, operands: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of `reads` in a call. Sizes are tensors too: FLASH takes no numbers that change."""
        values, device = dict(zip(spec.sizes, sizes, strict=True)), operands[0].device
        return [
            operands[part.operand].detach() if part.op == "load" else torch.full((), values[part.name], device=device)
            for part in self.reads
        ]


def modification(expr: Expr, names: Sequence[Expr], dtype: torch.dtype) -> Modification:
    """Modification that evaluates an expression. dtype: of floating-point numbers."""
    from_call = (part for part in walk(expr) if part.op in ("load", "size"))
    reads = dict.fromkeys(_tensor(part) if part.op == "load" else part for part in from_call)
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    given = {part: fx.Proxy(graph.placeholder(f"x{n}"), tracer) for n, part in enumerate((*names, *reads))}
    whole = torch.int64 if _is_wide(expr) else torch.int32
    as_kind = {Kind.FLOAT: dtype, Kind.INT: torch.int64, Kind.BOOL: torch.bool}

    def constant(value: float, kind: torch.dtype) -> Any:
        kind = whole if kind is torch.int64 else kind
        return given[POSITIONS[0]].new_full((), torch.tensor(value, dtype=kind).item(), dtype=kind)

    def element(part: Expr, *index: Any) -> Any:
        value: Any = given[_tensor(part)]
        for dim in reversed(range(len(index))):  # a constant index is none that FlexAttention would understand
            value = value.select(dim, part.args[dim].integer) if part.args[dim].is_const else value
        index = tuple(at for at, arg in zip(index, part.args, strict=True) if not arg.is_const)
        return (value[index] if index else value).to(as_kind[part.kind])

    def leaf(part: Expr) -> Any:
        if part.op == "load":
            return functools.partial(element, part) if part.args else element(part)
        return given[part].to(dtype if part is SCORE else whole)

    graph.output(evaluate(expr, leaf, dtype, constant).node)
    for made in graph.nodes:  # integers become numbers of the program at once, not by way of float64
        if made.op == "call_method" and made.target == "to" and made.args[1] is torch.float64:
            made.args = (made.args[0], dtype)
    graph.eliminate_dead_code()
    return Modification(fx.GraphModule({}, graph), tuple(reads))


def _tensor(part: Expr) -> Expr:
    """Leaf that stands for the tensor that a load reads."""
    return load(part.operand, (), part.kind)


def _is_wide(expr: Expr) -> bool:
    """Whether integers that are computed from coordinates may take more than 32 bits."""
    ranges = [interval(part, {}, lambda _: (0, 0)) for part in walk(expr) if part.kind is Kind.INT]
    return any(low < -(2**31) or high >= 2**31 for low, high in ranges)


class Flex:
    """FlexAttention for a spec, compiled at its first call and cached. dtype: of the programs' evaluation."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype = torch.float32):
        self.spec, self.words = spec, words(spec)
        score, live = self.words.score, self.words.live
        self.score = None if score is SCORE else modification(score, (SCORE, *POSITIONS), dtype)
        self.live = None if live is None else modification(live, POSITIONS, dtype)
        self.varies = [live is not None and part.name in coordinates(live) for part in POSITIONS[:2]]
        self.floor = may_overflow(score)
        self._kept, self._refused = BoundedCache(8), ""
        own = hashlib.sha256(spec.to_json().encode()).hexdigest()[:12]
        self._attend, self._mask = compiled(self.attend, own), compiled(self.block_mask, own)

    def __call__(self, qkv: Sequence[Tensor], out: Tensor, operands: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Fill the output [B, H, n_q, d_v]. Raises RuntimeError where FlexAttention does not take the tensors, and at
        once from then on: to find that out, it may compile for seconds."""
        if self._refused:
            raise RuntimeError(self._refused)
        reads = [[] if part is None else part.read(self.spec, operands, sizes) for part in (self.score, self.live)]
        try:
            self._attend(*qkv, out, *reads, self._mask_of_positions(qkv, reads[1], tuple(sizes)), _block(out.device))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refused = f"{type(error).__name__}: {error}"
            raise RuntimeError(self._refused) from error

    def _mask_of_positions(self, qkv: Sequence[Tensor], reads: Sequence[Tensor], sizes: tuple[int, ...]) -> Any:
        """Mask of these sizes, None where it is data. A mask that is computed while a CUDA graph is captured belongs to
        it."""
        if self.words.live is None or loads(self.words.live):
            return None
        device = qkv[0].device
        if (found := self._kept.get((sizes, device))) is not None:
            return found
        found = self._mask(self.mask_mod(reads), qkv[0], qkv[1].shape[2], _block(device))
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return found if captured else self._kept.store((sizes, device), found)

    def mask_mod(self, reads: Sequence[Tensor]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        assert self.live is not None
        live = self.live.function
        return lambda b, h, i, j: live(b, h, i, j, *reads)

    def block_mask(self, mask_mod: Callable[..., Tensor], q: Tensor, n_k: int, block: tuple[int, int]) -> Any:
        """Block mask, of one batch or head where all have the same."""
        batch, heads = (extent if varies else None for extent, varies in zip(q.shape[:2], self.varies, strict=True))
        return flex_attention.create_block_mask(mask_mod, batch, heads, q.shape[2], n_k, q.device, block)

    def score_mod(self, reads: Sequence[Tensor]) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
        """Score program; finite scores stay finite in FlashAttention's units, where they are multiplied by log2(e)."""
        if self.score is None:
            return None
        score, floor = self.score.function, self.floor

        def changed(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            found = score(value, b, h, i, j, *reads)
            return torch.where(found < -LARGEST, found, found.clamp(min=-LARGEST / 2)) if floor else found

        return changed

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, for_score: Sequence[Tensor], for_mask: Sequence[Tensor],
        mask: Any, block: tuple[int, int],
    ) -> None:  # fmt: skip
        """Fill the output. mask: the block mask, if it was computed before."""
        if mask is None and self.live is not None:
            mask = self.block_mask(self.mask_mod(for_mask), q, k.shape[2], block)
        found: Any = flex_attention.flex_attention(
            q, k, v, self.score_mod(for_score), mask, self.words.scale, q.shape[1] != k.shape[1],
            kernel_options=OPTIONS, return_aux=flex_attention.AuxRequest(lse=True) if self.words.undefined else None,
        )  # fmt: skip
        if self.words.undefined:
            found, rows = found
            found = torch.where(rows.lse.unsqueeze(-1) == -math.inf, math.nan, found)
        out.copy_(found)


def _block(device: torch.device) -> tuple[int, int]:
    """Numbers of queries and keys of a mask's block."""
    tall = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    return 2 * BLOCK if tall else BLOCK, BLOCK


def compiled(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Method compiled as a separate function: torch counts how often a piece of code is compiled, for all specs
    together, and remembers by its name which sizes have changed."""
    assert isinstance(method, types.MethodType)
    code = method.__func__.__code__.replace(co_name=f"{method.__name__}_{name}")
    own = types.FunctionType(code, method.__func__.__globals__, code.co_name, closure=method.__func__.__closure__)
    return torch.compile(types.MethodType(own, method.__self__), fullgraph=True)


@functools.lru_cache(maxsize=256)
def _of_spec(spec: AttentionSpec) -> Flex:
    return Flex(spec)


def flex(spec: AttentionSpec, device: torch.device) -> Flex | None:
    """FlexAttention of a spec, which is cached; None where a device has no kernels for it."""
    return _of_spec(spec) if runs(spec, device) else None
