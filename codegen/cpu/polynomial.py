"""Calling the feature kernels: layouts in and out, tables, threads. See `mlir.approximate.features`."""

from __future__ import annotations

import functools

import torch

from fusion.machine import Machine
from fusion.machine.cpu import amx_enabled
from fusion.planning.register_tiles import target_of

from ..mlir.approximate.features import BLOCK, CHUNK, QUERY_BLOCK, FeatureShape, Readout, State
from ..mlir.values import round_up
from ..reference.polynomial import Monomials, monomials
from .calling import CompiledKernel
from .machine_code import unavailable

STATE_BYTES = 1 << 20  # what the state of one work item's features may fill of a second-level cache


def supports(machine: Machine) -> str | None:
    """Why there are no feature kernels for this machine, or None."""
    if (reason := unavailable()) is not None:
        return reason
    if machine.kind != "cpu" or not target_of(machine).amx:
        return "the feature kernels use AMX tiles, which this machine lacks"
    return None


@functools.lru_cache(maxsize=64)
def kernels(d: int, d_v: int, degree: int, planes: int) -> FeatureKernels:
    """The two kernels for features of `degree` in d coordinates, d_v columns of values, compiled once."""
    return FeatureKernels(d, d_v, degree, planes)


class FeatureKernels:
    """State and readout of one shape. All tensors are float32; heads are one dimension."""

    def __init__(self, d: int, d_v: int, degree: int, planes: int):
        self.table = monomials(d, degree)
        self.shape = FeatureShape(d=d, d_v=d_v, low=self.table.below_top, planes=planes)
        self.e = self.shape.e
        self.parents, self.variables, self.position = _padded_table(self.table, self.shape)
        self.chunks = len(self.parents) // CHUNK
        amx_enabled()
        self.kernels = [CompiledKernel(kind(self.shape).text()) for kind in (State, Readout)]

    @property
    def source(self) -> str:
        return "\n".join(kernel.text.source for kernel in self.kernels)

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
        self._run(0, heads * groups, rows=rows, values=values, state=state, groups=groups, blocks=blocks, n=n)
        return state

    def readout(self, q: torch.Tensor, state: torch.Tensor, divided: bool = False) -> torch.Tensor:
        """[heads, N, d_v + 1]: for q [heads, N, d] the sums over keys of p(q.k) [v, 1]. divided: the first d_v of them,
        divided by the last. state: times what every feature is worth (`weights`)."""
        heads, n, _ = q.shape
        blocks = -(-n // QUERY_BLOCK)
        rows, planes = _rows(q, QUERY_BLOCK, self.shape.width), _state_planes(state)
        width = self.shape.value_width if divided else self.e
        out = torch.empty(heads, blocks * QUERY_BLOCK, width, dtype=torch.float32)
        self._run(1, heads * blocks, rows=rows, planes=planes, out=out, blocks=blocks, divided=int(divided))
        return out[:, :n, : self.shape.d_v + (not divided)]

    def _run(self, number: int, items: int, **values: torch.Tensor | int) -> None:
        """Run a kernel; values: of the parameters of its own."""
        kernel, threads = self.kernels[number], max(1, min(torch.get_num_threads(), items))
        values |= {"parents": self.parents, "variables": self.variables, "chunks": self.chunks, "items": items}
        known = {name: x.data_ptr() if isinstance(x, torch.Tensor) else x for name, x in values.items()}
        kernel.launcher(kernel.by_name(known), (), threads)(())

    def weights(self, coefficients: torch.Tensor) -> torch.Tensor:
        """[.., padded features]: what each is worth in p(q.k), coefficients [.., degree + 1] times the multinomials."""
        result = torch.zeros(*coefficients.shape[:-1], len(self.parents), dtype=torch.float32)
        result[..., self.position] = (coefficients.double()[..., self.table.degrees] * self.table.multinomials).float()
        return result


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


def _state_planes(state: torch.Tensor) -> torch.Tensor:
    """S [heads, features, e] as A tiles [heads, chunks, e tiles, planes, 16 e, 32 features]."""
    heads, features, e = state.shape
    turned = state.view(heads, features // CHUNK, CHUNK, e // 16, 16).permute(0, 1, 3, 4, 2).contiguous()
    planes = turned.new_empty(2, *turned.shape, dtype=torch.bfloat16)
    planes[0] = turned
    planes[1] = turned.sub_(planes[0].float())
    return planes.permute(1, 2, 3, 0, 4, 5).contiguous()
