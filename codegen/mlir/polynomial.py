"""Calling the feature kernels: layouts in and out, tables, threads. See `features`."""

from __future__ import annotations

import functools

import torch

from fusion.codegen.mlir.calling import Function, apart, memory
from fusion.codegen.mlir.compile import compile_text, unavailable
from fusion.codegen.mlir.features import BLOCK, CHUNK, QUERY_BLOCK, FeatureShape, emit_readout, emit_state
from fusion.codegen.mlir.products import round_up
from fusion.codegen.mlir.target import amx_enabled, target_of
from fusion.codegen.reference.polynomial import Monomials, monomials
from fusion.machine import Machine

STATE_BYTES = 1 << 20
"""What the state of one work item's features may fill of a second-level cache."""


def supports(machine: Machine) -> str | None:
    """Why there are no feature kernels for this machine, or None."""
    if (reason := unavailable()) is not None:
        return reason
    if machine.kind != "cpu" or not target_of(machine).amx:
        return "the feature kernels use AMX tiles, which this machine lacks"
    return None


class _Compiled:
    """A kernel and its call with named parameters."""

    def __init__(self, name: str, emitted: tuple[str, tuple[tuple, ...], int]):
        amx_enabled()
        self.source, self.slots, self.bytes = emitted
        self.function = Function(compile_text(self.source, name), len(self.slots))

    def __call__(self, items: int, **values: torch.Tensor | int) -> None:
        threads = max(1, min(torch.get_num_threads(), items))
        per_thread = apart(self.bytes)
        mine = memory.own
        workspace = mine.reserve(threads * per_thread)
        mine.counter.value = 0
        known = {"workspace": workspace, "workspace_bytes": per_thread, "items": items}
        known["counter"] = mine.counter_address
        for name, value in values.items():
            known[name] = value.data_ptr() if isinstance(value, torch.Tensor) else value
        self.function([known[slot[-1]] for slot in self.slots], threads)


@functools.lru_cache(maxsize=64)
def kernels(d: int, d_v: int, degree: int, planes: int) -> FeatureKernels:
    """The two kernels for features of `degree` in d coordinates, d_v columns of values, compiled once."""
    return FeatureKernels(d, d_v, degree, planes)


class FeatureKernels:
    """State and readout of one shape. All tensors are float32; heads are one dimension."""

    def __init__(self, d: int, d_v: int, degree: int, planes: int):
        table = monomials(d, degree)
        self.table = table
        self.shape = FeatureShape(d=d, d_v=d_v, low=table.below_top, planes=planes)
        self.e = self.shape.e
        self.parents, self.variables, self.position = _padded_table(table, self.shape)
        self.chunks = len(self.parents) // CHUNK
        self.state_kernel = _Compiled("state", emit_state(self.shape))
        self.readout_kernel = _Compiled("readout", emit_readout(self.shape))

    @property
    def source(self) -> str:
        return f"{self.state_kernel.source}\n{self.readout_kernel.source}"

    def state(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """S [heads, padded features, e] of keys k [heads, N, d] with v [heads, N, d_v]: their features times [v, 1]."""
        heads, n, _ = k.shape
        blocks = -(-n // BLOCK)
        state = k.new_zeros(heads, len(self.parents), self.e)
        group_bytes = 4 * CHUNK * self.e
        groups = max(1, -(-self.chunks * group_bytes // STATE_BYTES))
        threads = torch.get_num_threads()
        if heads * groups % threads and heads * groups < 4 * threads:
            groups = min(self.chunks, -(-groups // threads) * threads)
        rows, values = _rows(k, BLOCK, self.shape.width), _rows(v, BLOCK, self.shape.value_width)
        self.state_kernel(
            heads * groups, rows=rows, values=values, parents=self.parents, variables=self.variables, state=state,
            chunks=self.chunks, groups=groups, blocks=blocks, n=n,
        )  # fmt: skip
        return state

    def readout(self, q: torch.Tensor, state: torch.Tensor, divided: bool = False) -> torch.Tensor:
        """[heads, N, d_v + 1]: for q [heads, N, d] the sums over keys of p(q.k) [v, 1].

        divided: the first d_v of them, divided by the last.
        state: times what every feature is worth (`weights`).
        """
        heads, n, _ = q.shape
        blocks = -(-n // QUERY_BLOCK)
        planes = _state_planes(state)
        out = torch.empty(heads, blocks * QUERY_BLOCK, self.shape.value_width if divided else self.e)
        self.readout_kernel(
            heads * blocks, rows=_rows(q, QUERY_BLOCK, self.shape.width), planes=planes, parents=self.parents,
            variables=self.variables, out=out, chunks=self.chunks, blocks=blocks, divided=int(divided),
        )  # fmt: skip
        return out[:, :n, : self.shape.d_v + (not divided)]

    def weights(self, coefficients: torch.Tensor) -> torch.Tensor:
        """[.., padded features]: what each is worth in p(q.k), coefficients [.., degree + 1] times the multinomials."""
        found = torch.zeros(*coefficients.shape[:-1], len(self.parents))
        found[..., self.position] = (coefficients.double()[..., self.table.degrees] * self.table.multinomials).float()
        return found


def _padded_table(table: Monomials, shape: FeatureShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(parents, variables) of the features, padded to whole chunks below and at the top degree, and the position of
    every feature among them. Feature 0 is the row of ones times the row of ones; padding is times the row of zeros."""
    low, total, low_padded = table.below_top, len(table.parents), shape.low_padded
    position = torch.arange(total)
    position[low:] += low_padded - low
    length = round_up(low_padded + total - low, CHUNK)
    parents, variables = torch.zeros(length, dtype=torch.int64), torch.full((length,), shape.width + 1)
    parents[position], variables[position] = table.parents, table.variables
    variables[0] = shape.width
    return parents, variables, position


def _rows(x: torch.Tensor, block: int, width: int) -> torch.Tensor:
    """[heads, N, d] with rows of zeros up to whole blocks, and columns of zeros up to `width`."""
    missing = -x.shape[1] % block, width - x.shape[2]
    return torch.nn.functional.pad(x, (0, missing[1], 0, missing[0])) if any(missing) else x.contiguous()


def _planes(x: torch.Tensor) -> torch.Tensor:
    """Two bf16 planes of a float32 tensor, stacked in front. x is used up."""
    planes = x.new_empty(2, *x.shape, dtype=torch.bfloat16)
    planes[0] = x
    planes[1] = x.sub_(planes[0].float())
    return planes


def _state_planes(state: torch.Tensor) -> torch.Tensor:
    """S [heads, features, e] as A tiles [heads, chunks, e tiles, planes, 16 e, 32 features]."""
    heads, features, e = state.shape
    turned = state.view(heads, features // CHUNK, CHUNK, e // 16, 16).permute(0, 1, 3, 4, 2).contiguous()
    return _planes(turned).permute(1, 2, 3, 0, 4, 5).contiguous()
