"""`visit_keys`: one stage of a kernel's loop over tiles of keys, from the score product to the sum of weighted values.

In the plain order a tile's softmax stands between its two products, and the matrix units wait for it. In the rotated
order a tile's product with V is computed one tile later,

    S_j = Q K_j^T;  O = O * alpha;  O = O + P_(j-1) V_(j-1);  P_j, alpha = softmax step of S_j

so that the units of Hopper have work during the exponentials. P is carried in float32 and rounded where it is
multiplied: in the products' dtype it would go through shared memory (seen in kernels of Triton 3.7). The weights of the
last tile are multiplied after the loop, by `last_product`.

Triton gives all warps rows of their own where a product with the weights follows the scores. Where a block has fewer
rows than that takes, it computes scores twice. In the spread order the steps from scores to weights stand behind a
condition that always holds, which only the last compiler finds out: Triton sees nothing that follows, and has the warps
share the keys of a tile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.ir.expr import Expr, J, const, coordinates
from fusion.ir.results import keeps_ends
from fusion.lowering.numbers import exponent_units
from fusion.lowering.score_programs import ScorePrograms, is_tame

from . import source
from .descriptors import Box, boxes
from .dtypes import DTYPES, cast
from .expressions import Level, Writer, number
from .matrices import Matrix, accumulation, brackets, made, matrix, sum_of
from .panels import Panel
from .stages import Visit, visit
from .tiles import Tiles

ALWAYS, ALWAYS_TOO = "(first | 1) != 0", "(first | 2) != 0"
"""Conditions that hold, which LLVM finds out, and Triton does not. Triton 3.6 joins what has the same one, and
fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Form of the loop over the tiles of a kernel."""

    rotated: bool = False  # the scores of the next tile are computed before the weights of this one are used
    spread: bool = False  # warps share the keys of a tile, see above
    shared: bool = False  # V is the first columns of K, and is read once (latent attention)
    packed: int = 1  # query heads whose rows lie side by side in a block of rows
    described: bool = False  # K and V are read by tensor descriptors where they can be (`descriptors`)


PLAIN = Order()


class KeyLoop:
    """`visit_keys` of a kernel, and `last_product` in the rotated order."""

    def __init__(self, kernel: Tiles, programs: ScorePrograms, order: Order):
        self.kernel, self.programs, self.order = kernel, programs, order
        self.spec, self.writer, self.listed, self.softmax = kernel.spec, kernel.writer, kernel.listed, kernel.softmax
        # Where the first key is known at run time only, tiles are counted: ptxas serialises products otherwise (C7515).
        self.numbered = not self.listed and self.spec.mask is not None and self.spec.mask.key_lo is not None
        self.columns, self.values = kernel.columns, kernel.values
        read = ("k", "v") if order.described else ()
        self.boxes = {name: box for name, box in boxes(self.spec, kernel.d, kernel.d_v).items() if name in read}
        # Keys as rows, for reading K and V: lines of their own at the level of tiles.
        self.keys = self.writer.where({J: "key"}, "key_ok")
        self.keys.lines, self.keys.uses = self.writer.lines | {Level.TILE: []}, Counter()
        self.blocks: dict[str, str] = {}  # where the block's keys and values begin
        self.sums = [f"acc{panel.suffix}" for panel in self.values]
        self.visit = self._visit()
        self.last = self._last() if order.rotated else None
        self.functions = [self.visit] if self.last is None else [self.visit, self.last]

    def initial(self) -> list[str]:
        """Statements that initialise the state."""
        lines = nothing_summed(self.values, self.softmax)
        if self.order.rotated:
            lines += ["p = tl.full([ROWS, KEYS], 0.0, tl.float32)", "alpha = tl.full([ROWS], 1.0, tl.float32)"]
        return lines

    def call(self, start: str, stop: str, whole: bool, *, begin: str, listed: bool = True) -> str:
        """Call of a stage. whole: its tiles need neither the mask nor bounds. begin: the start of the first stage of
        the same pass."""
        masked = not whole
        return self.visit.call(start=start, stop=stop, begin=begin, MASKED=masked, BOUNDED=masked, LISTED=listed)

    def finish(self, start: str, stop: str) -> str:
        """Statements after the last stage of a pass over start <= j < stop."""
        return "" if self.last is None else self.last.call(start=start, stop=stop)

    def pointers(self) -> list[str]:
        """Statements that point to the block's keys and values."""
        return [f"{name} = {at}" for name, at in sorted(self.blocks.items())]

    def _visit(self) -> Visit:
        k, tiles_of_k = self._parts(1)
        rotated = self.order.rotated
        v, tiles = self._parts(2, "key_before", "before_ok", True) if rotated else self._parts(2)
        loads, programs = self._programs_text()
        softmax = source.block(programs, self._statistics())
        softmax = self._hidden(softmax) if self.order.spread else softmax
        steps = [*self._scaled(), *v, *self._products(), softmax] if rotated else [softmax, *v, *self._products()]
        loop = source.block(*k, loads, *self._scores(), *steps)
        end = self.kernel.n_k if self.listed else "stop"
        columns = [
            "key = (first + tl.arange(0, KEYS))[:, None]",
            f"key_ok = key < {end}",
            "key_before = key - KEYS",
            "before_ok = key_before >= begin",
            "j = (first + tl.arange(0, KEYS))[None, :]",
            f"j_ok = j < {end}",
            *self.keys.lines[Level.TILE],
        ]
        loop = source.block(*self._first(), source.with_used(columns, loop))
        doc = "Keys start <= j < stop, in tiles; BOUNDED: the last tile may be cut off; MASKED: keys may be dead."
        turns = "0, (stop - start + KEYS - 1) // KEYS" if self.numbered else "start, stop, KEYS"
        if self.listed:
            doc = "Tiles start <= number < stop, LISTED: of a list; BOUNDED: of the last; MASKED: keys may be dead."
            turns = "start, stop"
        head = f"for {'number' if self.listed or self.numbered else 'first'} in tl.range({turns}):"
        text = source.block(*tiles_of_k, *tiles, head, source.indented(loop))
        state = [*self.sums, *(["m", "l"] if self.softmax else []), *(["p", "alpha"] if rotated else [])]
        first = [*(f"q{panel.suffix}" for panel in self.columns), "start", "stop"]
        return visit("visit_keys", doc, text, state=state, first=first, writer=self.writer)

    def _last(self) -> Visit:
        """Function for the product of the last tile's weights with its values."""
        self.keys.forget(Level.TILE)
        v, tiles = self._parts(2, always=True)
        later = source.block(*tiles, *self._scaled(), *v, *self._products())
        columns = [
            "first = (stop - 1) // KEYS * KEYS",
            "key = (first + tl.arange(0, KEYS))[:, None]",
            "key_ok = (key >= start) & (key < stop)",
            *self.keys.lines[Level.TILE],
        ]
        doc = "The sums with the weights p of the last tile of start <= j < stop."
        first = ["p", "alpha", "start", "stop"]
        body = source.with_used(columns, later)
        return visit("last_product", doc, body, state=self.sums, first=first, writer=self.writer)

    def _first(self) -> list[str]:
        """`first`, the first key of a tile, from its number or its place in the list."""
        if self.numbered:
            return ["first = start + number * KEYS"]
        if not self.listed:
            return []
        return ["if LISTED:", "    first = tl.load(list_at + number) * KEYS", "else:", "    first = number * KEYS"]

    def _of(self, column: Expr, panel: Panel, key: str, mask: str) -> Writer:
        """Writer for a panel's columns of the keys `key`, of which those exist that `mask` selects."""
        named, inside = {column: panel.column, J: key}, {column.name: panel.inside} if panel.inside else {}
        if not inside and all(self.keys.known.get(coordinate) == name for coordinate, name in named.items()):
            return self.keys
        return self.keys.where(named, mask, inside)

    def _parts(
        self, number: int, key: str = "key", mask: str = "key_ok", always: bool = False
    ) -> tuple[list[str], list[str]]:
        """Statements that read the tile of K or V, operand `number`, and those before the loop that point to it.
        always: with masks in every stage."""
        name, (index, _, column) = "qkv"[number], self.spec.access(number)
        value, box = self.spec.values[number], self.boxes.get(name)
        read = {(p.start, p.width) for p in self.columns} if self.order.shared and number == 2 else set()
        lines, tiles = [], []
        for panel in self.kernel.panels_of(number):
            to, writer = f"{name}{panel.suffix}", self._of(column, panel, key, mask)
            if (panel.start, panel.width) in read:
                lines.append(f"{to} = k{panel.suffix}")
            elif box is not None:
                lines.append(f"{to} = {self._boxed(box, panel, mask)}{cast(box.dtype(self.spec), self.spec.dtype)}")
            elif value is not None:
                lines.append(made(to, value, writer))
            else:
                part = matrix(writer, number, index, J, column)
                lines += self._load(number, part, panel, mask, always)
                self.blocks[f"{name}_block"] = sum_of(f"{part.operand}_ptr", part.block)
                within = sum_of(f"{name}_block", part.rows if part.advance else "", part.columns)
                tiles.append(f"{to}_tile = {within}")
        return lines, tiles

    def _boxed(self, box: Box, panel: Panel, mask: str) -> str:
        # Before the first tile of a pass: where there is nothing, and zeros are read.
        first = "tl.where(first > begin, first, 0) - KEYS" if mask == "before_ok" else "first"
        return box.load(self.keys, panel, first)

    def _load(self, number: int, part: Matrix, panel: Panel, mask: str, always: bool) -> list[str]:
        """Statements that read a tile of K or V, with masks only where it may be cut off (always: in every stage) or is
        padded."""
        name, inside, stored = f"{'qkv'[number]}{panel.suffix}", panel.inside, self.spec.operands[number]
        first = "first - KEYS" if mask == "before_ok" else "first"
        moved = f"tl.cast({first}, tl.int64) * {brackets(part.advance)}" if part.advance else ""
        at = sum_of(f"{name}_tile", moved, "" if part.advance else part.rows, part.both)
        widened = cast(stored.dtype, self.spec.dtype)
        nothing = "0.0" if stored.torch_dtype.is_floating_point else "0"
        limits = f"{mask} & ({inside})" if inside else mask
        masked = f"{name} = tl.load({name}_at, mask={limits}, other={nothing}){widened}"
        lines = [f"{name}_at = {at}"]
        if always:
            lines.append(masked)
        else:
            whole = f"tl.load({name}_at, mask={inside}, other={nothing})" if inside else f"tl.load({name}_at)"
            lines += ["if BOUNDED:", f"    {masked}", "else:", f"    {name} = {whole}{widened}"]
        if not part.rows and not part.both and not part.columns:  # one element for all
            lines.append(f"{name} = tl.broadcast_to({name}, [KEYS, {panel.width}])")
        return lines

    def _scores(self) -> list[str]:
        lines = []
        for panel in self.columns:
            sum_ = ", s" if lines and not self.order.spread else ""
            pair = f"q{panel.suffix}, tl.trans(k{panel.suffix})"
            name = f"s{panel.suffix}" if self.order.spread else "s"
            lines.append(f"{name} = tl.dot({pair}{sum_}, input_precision=PRECISION)")
        return lines

    def _hidden(self, softmax: str) -> str:
        """Steps from scores to weights, behind the condition. A product of another panel is no summand of the first
        one, or it would follow it; nor is their sum, which Triton turns into one. What is read
        behind the condition has to be there before it: Triton compiles nothing else."""
        summed = [f"s = tl.fma(s{panel.suffix}, 1.0, s)" for panel in self.columns[1:]]
        before = ["p = s", *(["alpha = m"] if self.softmax and self.spec.dtype == "float32" else [])]
        return source.block(*summed, *before, f"if {ALWAYS}:", source.indented(softmax))

    def _products(self) -> list[str]:
        weights = f"p.to({DTYPES[self.spec.dtype]})"
        factor = "alpha[:, None]" if self.softmax or self.order.rotated else "1.0"
        lines = [accumulation(f"acc{p.suffix}", weights, f"v{p.suffix}", self.spec.dtype, factor) for p in self.values]
        if self.order.spread:  # waits for the product: ptxas serialises all where one is in flight as the loop ends
            lines += [f"acc{p.suffix} = tl.where({ALWAYS_TOO}, acc{p.suffix}, 0.0)" for p in self.values]
        return lines

    def _scaled(self) -> list[str]:
        """Statements that multiply the sums by alpha, where `accumulation` does not."""
        if self.spec.dtype == "float32":
            return []
        return [f"acc{panel.suffix} = acc{panel.suffix} * alpha[:, None]" for panel in self.values]

    def _programs_text(self) -> tuple[str, str]:
        """(the loads, x, the score program of a tile, and w, the weight program), in the variants that there are."""
        programs = [self.programs.masked] if self.programs.full is None else [self.programs.masked, self.programs.full]
        loads, texts = zip(*map(self._program, programs), strict=True)
        beyond = 'float("-inf")' if self.softmax else "0.0"
        return source.by_mask(*loads), source.block(
            source.by_mask(*texts), "if BOUNDED:", f"    x = tl.where(j_ok, x, {beyond})"
        )

    def _program(self, program: Expr) -> tuple[str, str]:
        self.writer.forget(Level.TILE)
        value = self.writer.value(program)
        lines = [f"x = {value}"]
        if not {"i", "j"} <= coordinates(program):  # scores that do not depend on both: one value for many keys
            lines = [f"x = {source.spread(value, '[ROWS, KEYS]')}"]
        if self.spec.weight is not const(1.0):
            lines.append(f"w = {self.writer.value(self.spec.weight)}")
            if not is_tame(self.spec.weight):  # may be infinite where no key is, and p is 0
                lines.append("if BOUNDED:\n    w = tl.where(j_ok, w, 0.0)")
        loads, others = source.loads_first([*self.writer.lines[Level.TILE], *lines])
        self.writer.forget(Level.TILE)
        return source.block(*loads), source.block(*others)

    def _statistics(self) -> str:
        """Statements of the running maximum and sum, and of the weights p."""
        if not self.softmax:
            return "p = x" if self.spec.weight is const(1.0) else "p = x * w"
        unit, limit, exact = map(number, exponent_units(self.programs.scale))
        lines = ["m_new = tl.maximum(m, tl.max(x, 1))"]
        if keeps_ends(self.spec):
            lines.append('m_new = tl.where((m != m) | (tl.max((x != x).to(tl.int32), 1) != 0), float("nan"), m_new)')
        if self.programs.guarded:
            lines.append(f"unit = tl.where(tl.abs(m_new) > {limit}, {exact}, {unit})")
            lines.append('shift = tl.where(m_new == float("-inf"), 0.0, m_new * unit)')
            unit, units = "unit", "unit[:, None]"
        else:
            lines.append(f"shift = m_new * {unit}")
            units = unit
        lines.append(f"alpha = tl.exp2(m * {unit} - shift)")  # both are rounded, as they are in p (`module.EXACT`)
        lines.append(f"p = tl.exp2(tl.fma(x, {units}, -shift[:, None]))")
        lines.append("l = l * alpha + tl.sum(p, 1)")
        lines += ["m = m_new"] if self.order.rotated else [*self._scaled(), "m = m_new"]
        if self.spec.weight is not const(1.0):
            lines.append("p = p * w")
        return source.block(*lines)


def nothing_summed(values: Sequence[Panel], softmax: bool) -> list[str]:
    """Statements that initialise the sums over the keys."""
    lines = [f"acc{p.suffix} = tl.full([ROWS, {p.width}], 0.0, tl.float32)" for p in values]
    if softmax:
        lines += ['m = tl.full([ROWS], float("-inf"), tl.float32)', "l = tl.full([ROWS], 0.0, tl.float32)"]
    return lines
