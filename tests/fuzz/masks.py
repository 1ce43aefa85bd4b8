"""Random masks and biases: what they keep, how they are spelled, and how they are applied to scores `s`."""

from __future__ import annotations

from tests.fuzz.writer import Writer

FILLS = ("-math.inf", "torch.finfo(s.dtype).min", "torch.finfo(torch.float32).min", "-1e9", "-1e4", "-65504.0", "-1e30")
FINITE = ("torch.finfo(s.dtype).min", "-1e9", "-1e4", "-65504.0")
INTEGERS = ("torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8")


def positions(w: Writer) -> tuple[str, str]:
    """Row and key numbers, [N, 1] and [M] or [1, M], at times as narrow integers."""
    dtype = f", dtype={w.pick(*INTEGERS)}" if w.chance(0.3) else ""
    if dtype:
        w.note("narrow positions")
    i = w.let("i", f"torch.arange(N{dtype})" + w.pick("[:, None]", ".view(-1, 1)", ".unsqueeze(1)"))
    return i, w.let("j", f"torch.arange(M{dtype})" + w.pick("", "[None]", "[None, :]"))


def _of_positions(w: Writer) -> str:
    i, j = positions(w)
    return w.let("keep", w.pick(
        f"{j} <= {i}", f"{i} >= {j}", f"~({j} > {i})", f"{j} - {i} <= 0", f"({i} - {j} < 3) & ({j} <= {i})",
        f"({i} - {j}).abs() < 3", f"({j} <= {i}) | ({j} < 2)", f"{i} // 4 == {j} // 4", f"({i} + {j}) % 3 != 0",
        f"({i} != 2) | ({j} < 0)", f"{i} + (M - N) >= {j}", f"torch.logical_or({j} <= {i}, {j} == M - 1)",
    ))  # fmt: skip


def _of_numbers(w: Writer) -> str:
    """What a unit in the last place, or the upper half of an integer, decides."""
    i, j = w.let("i", "torch.arange(N)[:, None]"), w.let("j", "torch.arange(M)")
    if w.chance(0.3):
        kind = w.note(f"positions in {w.pick('float64', 'bfloat16', 'float16', 'float32')}")
        i, j = (w.let(name, f"{name}.to(torch.{kind.removeprefix('positions in ')})") for name in (i, j))
    c, d = w.pick("3", "7", "11", "0.1", "0.7", "41"), w.pick("3", "5", "0.3", "1.3", "7")
    return w.let("keep", w.pick(
        f"({i} / {c}).floor() == ({j} / {c}).floor()", f"({i} / {c}).long() >= ({j} / {c}).long()",
        f"{i} / {c} >= {j} / {d}", f"{i} * {c} + {d} >= {j} * {d}", f"{i} * {c} * {d} >= {j} * {d}",
        f"(({i} - {j}) / {c}) % 1 == 0", f"({i} / {c}).ceil() >= ({j} / {d}).round()",
        f"({i}.long() * 2654435761 + {j}.long() * 40503) % 7 < 5", f"({i}.long() ** 6 + {j}.long()) % 11 < 8",
        f"{j}.long() * 2**33 <= {i}.long() * (2**33 + 5)", f"({i}.long() - {j}.long()) * 2**40 // 3 >= 0",
    ))  # fmt: skip


def _of_triangles(w: Writer) -> str:
    ones = f"torch.ones(N, M, dtype={w.pick('torch.bool', 'torch.bool', 'torch.uint8', 'torch.float32')})"
    kept = w.pick(f"{ones}.tril()", f"torch.tril({ones})", f"{ones}.tril(M - N)", f"{ones}.tril(1).triu(-2)")
    if w.chance(0.5):
        return w.let("keep", f"{kept}.bool()")
    return w.let("keep", w.pick(f"~{ones}.triu(1).bool()", f"{ones}.triu(diagonal=1) == 0", f"{ones}.triu(1) < 0.5"))


def _of_data(w: Writer) -> str:
    share = w.pick("0.3", "0.7", "0.9")
    shape = w.pick("N, M", "N, M", "M", "N, 1")
    dtype = w.pick("torch.bool", "torch.bool", *INTEGERS[:1], "torch.uint8", "torch.float32")
    return w.let("keep", f"{w.argument('mask', f'(torch.rand({shape}) < {share}).to({dtype})')}.bool()")


def _of_padding(w: Writer) -> str:
    """[B, 1.., 1, M]: keys that exist; only where the first dimension is the batch."""
    w.note("padding")
    if w.chance(0.5):
        form = w.pick("torch.rand(B, M) < 0.7", "torch.arange(M)[None] >= torch.randint(0, M + 1, (B, 1))")
        pad = w.argument("pad", f"({form}).to({w.pick('torch.bool', 'torch.int64', 'torch.uint8', 'torch.float32')})")
        pad = w.let("live", w.pick(f"{pad} != 0", f"{pad}.bool()", f"{pad} > 0", f"{pad} == 1"))
    elif w.chance(0.7):
        lengths = w.argument("lengths", f"torch.randint(0, M + 1, (B,)).to({w.pick(*INTEGERS)})")
        pad = w.let("live", f"torch.arange(M)[None] {w.pick('<', '<', '>=', '<=')} {lengths}[:, None]")
    else:
        documents = w.argument("documents", "torch.randint(0, 3, (B, max(N, M))).sort(-1).values")
        pair = f"{documents}[:, :N, None] == {documents}[:, None, :M]"
        ones = "1, " * (len(w.lead) - 1)
        return w.let("keep", f"({pair}).view(B, {ones}N, M)" if ones else pair)
    spell = w.pick("view", "index", "reshape")
    ones = len(w.lead)
    if spell == "index":
        return w.let("keep", f"{pad}[:, {', '.join(['None'] * ones)}]")
    return w.let("keep", f"{pad}.{spell}(B, {'1, ' * ones}M)")


def predicate(w: Writer) -> str:
    """The name of a bool tensor that says which scores are kept."""
    kinds = [_of_positions, _of_positions, _of_numbers, _of_triangles, _of_data]
    if w.lead and w.lead[0] == "B":
        kinds += [_of_padding, _of_padding]
    keep = w.pick(*kinds)(w)
    if w.chance(0.15):
        other = w.pick(*kinds)(w)
        keep = w.let("keep", w.pick(f"{keep} & {other}", f"{keep} | {other}", f"torch.logical_and({keep}, {other})",
                                    f"({keep} * {other}).bool()"))  # fmt: skip
    if w.chance(0.2):
        keep = w.let("keep", f"{keep} | (torch.arange(M) == 0)")
    return keep


def apply_mask(w: Writer, keep: str) -> None:
    """Scores `s` with a mask, by one of many spellings."""
    style = w.note(f"mask by {w.pick('fill', 'fill', 'where', 'added', 'added', 'product', 'in place', 'other')}")
    fill, finite = w.pick(*FILLS), w.pick(*FINITE)
    if style == "mask by fill":
        w.say(w.pick(f"s = s.masked_fill(~{keep}, {fill})", f"s = torch.masked_fill(s, {keep} == 0, {fill})",
                     f"s = s.masked_fill({keep}.logical_not(), float('-inf'))"))  # fmt: skip
    elif style == "mask by where":
        w.say(w.pick(f"s = torch.where({keep}, s, {fill})", f"s = torch.where({keep}, s, torch.full_like(s, {fill}))",
                     f"s = torch.where(~{keep}, torch.full([], {fill}, dtype=s.dtype), s)"))  # fmt: skip
    elif style == "mask by added":
        w.say(w.pick(
            f"s = s + torch.where({keep}, 0.0, {fill})", f"s = s + (1.0 - {keep}.to(s.dtype)) * {finite}",
            f"s = s - (~{keep}).to(s.dtype) * 1e9", f"s = s + torch.zeros_like(s).masked_fill(~{keep}, {fill})",
            f"s = s + (~{keep}) * {finite}", f"s = s + (1 - {keep}.long()) * -10000",
            f"s = s + torch.where({keep}, 0.0, {fill}).to(s.dtype)", f"s = s + torch.log({keep}.to(s.dtype))",
            f"s = s.add({keep}.to(s.dtype) - 1, alpha=1e9)",
        ))  # fmt: skip
    elif style == "mask by product":
        w.say(w.pick(f"s = s * {keep} + (1 - {keep}.to(s.dtype)) * {finite}", f"s = s * {keep} - 1e9 * (~{keep})",
                     f"s = torch.addcmul(s, (~{keep}).to(s.dtype), torch.full([], {finite}, dtype=s.dtype))",
                     f"s = s * {keep}.to(s.dtype)"))  # fmt: skip
    elif style == "mask by in place":
        recorded = w.pick("", "", "", "with torch.no_grad(): ")
        w.say(recorded + w.pick(f"s.masked_fill_(~{keep}, {fill})", f"s += torch.where({keep}, 0.0, {fill})",
                     f"s.add_((~{keep}).to(s.dtype) * {finite})", f"s.masked_fill_({keep}.logical_not(), -1e9)",
                     f"s.view(s.shape).masked_fill_(~{keep}, {fill})", "s[..., M // 2:] = -math.inf",
                                "s[..., M // 2:].mul_(0.5).sub_(3)", "s[..., :1].copy_(s[..., -1:] * 2)"))  # fmt: skip
    else:
        w.say(w.pick(f"s = torch.minimum(s, torch.where({keep}, math.inf, {fill}).to(s.dtype))",
                     f"s = torch.lerp(torch.where({keep}, s, {finite}), s, {w.pick('0.3', '0.6')})",
                     f"s = s.clamp(min=-50.0).where({keep}, {fill})",
                     f"s = torch.where({keep}, s, s * 0 + {finite})"))  # fmt: skip


def apply_bias(w: Writer) -> None:
    """Scores `s` with something added or multiplied."""
    last = f"{w.lead[-1]}, 1, 1" if w.lead else "1, 1"
    kind = w.note(f"bias: {w.pick('dense', 'row', 'column', 'head', 'alibi', 'table', 'scale', 'scalar')}")
    if kind in ("bias: dense", "bias: row", "bias: column", "bias: head"):
        shape = {"dense": "N, M", "row": "N, 1", "column": "M", "head": last}[kind.removeprefix("bias: ")]
        if kind == "bias: dense" and w.lead and w.chance(0.4):
            shape = f"{w.lead[-1]}, N, M"
        bias = w.floats("bias", shape)
        w.say(
            w.pick(f"s = s + {bias}", f"s = {bias} + s", f"s = s - {bias} * 0.5", f"s = torch.add(s, {bias}, alpha=2)")
        )
    elif kind in ("bias: alibi", "bias: table"):
        i, j = positions(w)
        if kind == "bias: alibi":
            slope = w.argument("slope", f"torch.linspace(0.1, 1, {w.lead[-1] if w.lead else '1'}).to(dtype)")
            w.say(f"s = s + {slope}.view({last}) * ({j} - {i})" + w.pick("", ".to(s.dtype)", " / 7", ".div(3).floor()"))
        else:
            table = w.floats("table", "9")
            w.say(f"s = s + {table}[({i} - {j}).clamp(-4, 4).long() + 4]")
    elif kind == "bias: scale":
        w.say(f"s = s * {w.floats('temperature', last)}" + w.pick("", ".exp()", ".clamp(max=3)", ".sigmoid()"))
    else:
        w.say(w.pick("s = s + 0.5", "s = 2 - s", "s = s * -0.7", f"s = s * {w.floats('gain')}", "s = s - 3",
                     "s = s / math.log(M + 1)"))  # fmt: skip
