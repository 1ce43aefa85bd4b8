"""Random PyTorch functions as source text: attentions in many layouts and spellings, and near misses.

`program(seed)` gives the same text for a seed wherever it runs. What is drawn at random is written to be what people
write; nothing of it knows how the compiler reads it.
"""

from __future__ import annotations

import random
import re

from tests.fuzz.masks import apply_bias, apply_mask, predicate
from tests.fuzz.normalizers import normalize
from tests.fuzz.writer import Program, Writer

LEADS = (("B", "H"), ("B", "H"), ("B", "H"), ("B",), (), ("B * H",), ("B", "2", "H"))
SCORES = ("torch.tanh(s / 5) * 5", "20 * torch.tanh(s / 20)", "F.silu(s)", "s.clamp(-2, 3)", "s.abs()", "F.softplus(s)",
          "F.gelu(s)", "F.leaky_relu(s, 0.1)", "torch.where(s > 0, s, 0.2 * s)", "s.square() * 0.1", "torch.sin(s)",
          "torch.log1p(s.abs())", "torch.relu(s)", "-s", "s + s.sigmoid()", "torch.where(s > 0, s, 1.0).sqrt()",
          "torch.exp(s.clamp(max=2))", "(torch.relu(s) + 1e-6).sqrt()", "torch.lerp(s, s.tanh(), 0.6)", "F.elu(s)",
          "s.float()", "s.sign() * s.abs().sqrt()", "torch.atan(s)", "s / (1 + s.abs())", "s.pow(3) * 0.05",
          "F.hardtanh(s)", "torch.maximum(s, -s * 0.5)", "s.reciprocal().clamp(-3, 3)")  # fmt: skip
FURTHER = 0.08
"""The share of programs that return statistics, too."""
FAR = 0.03
"""The share of programs whose Q or K are far from 1, and scaled back at some point."""
MIXED = 0.05
"""The share of programs that mix the heads of scores or weights."""
GATED = 0.03
"""The share of programs whose weights are multiplied by a function of their scores."""
WEIGHED = 0.08
"""The share of programs whose weights are multiplied by a tensor."""
DEAD = 0.1
"""The share of programs that mask all keys of some rows, or lower all scores of those."""
ALIASED = 0.05
"""The share of programs that write to a tensor, or to a view of it, and read the other."""
DETACHED = 0.1
"""The share of trained programs in which a gradient ends at an operand, at scores or at weights."""
TIED = 0.35
"""The share of trained programs whose inputs are integers, with rows of zeros, as padded ones are: scores tie."""
KINKED = ("s.clamp(min=0.0)", "s.clamp(max=0)", "s.clamp(-1, 1)", "torch.relu(s)", "F.relu6(s)", "F.hardtanh(s)",
          "s.abs()", "torch.maximum(s, s.new_zeros(()))", "torch.clamp(s, min=s.new_zeros(()))", "F.hardshrink(s, 1.0)",
          "F.softshrink(s, 1.0)", "F.threshold(s, 0.0, 0.0)", "torch.maximum(s, -s)", "F.leaky_relu(s, 0.1)",
          "torch.minimum(s, s * 2)", "F.elu(s)", "torch.clamp(s, max=s * 2)", "torch.clamp(s, s.abs(), 2 * s.abs())",
          "torch.where(s >= 0, s, s * 0.5)", "s - s.amax(-1, keepdim=True)", "F.hardswish(s)", "s.clamp(0, 0) + s",
          "torch.logaddexp(s, s.relu())", "F.selu(s)")  # fmt: skip
MIXED_HEADS = "mixed heads"
MIXTURES = ("F.linear({x}.movedim(-3, -1), {m}, {m}[0]).movedim(-1, -3)", "torch.einsum('bhij,hg->bgij', {x}, {m})",
            "F.linear({x}.permute(0, 2, 3, 1), {m}).permute(0, 3, 1, 2)", "F.conv2d({x}, {m}[..., None, None])",
            "{x} + F.conv2d({x}, {m}[:, :, None, None], {m}[1 % len({m})])")  # fmt: skip
SPECIALS = ("math.inf", "-math.inf", "math.nan", "1e30", "-3e4", "0.0", "-0.0", "1e-40")

STATISTICS = ("{p}", "{p}.sum(-2)", "{p}.mean(dim=-2, keepdim=True)", "{p}.amax(-1)", "{p}.max(-1).values", "{p}.mT",
              "-({p} * torch.log({p} + 1e-9)).sum(-1)", "({p} * {p}.clamp(min=1e-6).log()).sum(-1, keepdim=True)",
              "{p}.square().sum(-1)", "({p} * torch.arange(M)).sum(-1)", "{p}[..., :2]", "{p}.detach()", "{p}.amin(-2)",
              "{p}[..., 1:, :].mean(-1)", "{p}.float().sum(-1)", "{p}.mT.sum(-1)", "{p} @ {v}[..., :3]", "{p}.sum(0)",
              "{p}.std(-2)", "{p}.flatten()", "{p} * 2 + 1", "{p}.pow(3).amax(-2)", "{p}.mean((-1, -2))",
              "torch.where({p} > 0.1, {p}, 0.0).sum(-2)", "{p}.log()", "({p} * {p}.detach()).sum(-1)")  # fmt: skip
OF_SCORES = ("s.amax(-1)", "s.max(-1)[0]", "s.logsumexp(-1)", "torch.logsumexp(s, -1, keepdim=True)", "s.amax(-2)",
             "s.logsumexp(-1).square()", "s.amax(-1).amax(-1)", "s.sum(-1)")  # fmt: skip
GATES = ("torch.sigmoid(s)", "s.tanh()", "(s * 0.1 + 1)")
FACTORS = ("{factor}", "{factor}.exp()", "({factor} > 0)", "({factor} + torch.arange(M))", "(4 * {factor})")
ROWS = ("torch.arange(N)[:, None] == {row}", "torch.arange(N)[:, None] >= {row}", "torch.arange(N)[:, None] % 3 == 1")
FILLED_ROWS = ("s = s.masked_fill({rows}, {fill})", "s = torch.where({rows}, {fill}, s)",
               "s = s + torch.where({rows}, {fill}, 0.0)",
               "s = s + torch.where({rows}, {fill}, 0.0).to(s.dtype)",
               "s = s - s.masked_fill({rows}, {fill}).amax(-1, keepdim=True)")  # fmt: skip
ROW_FILLS = ("-math.inf", "-math.inf", "torch.finfo(s.dtype).min", "-1e4", "-20.0")
DETACHED_FORMS = ("{x}.detach()", "{x} + 0.5 * {x}.detach()", "2 * {x} - {x}.detach()")
ALIASES = ("{x}.view({x}.shape)", "{x}.mT.mT", "{x}[...]", "{x}.unsqueeze(0)[0]")
WRITES = (".mul_(0.7)", ".add_(1)", "[..., :1] = 0", ".fill_(0.5)", "[..., ::2].mul_(-2)", ".mT.add_(0.3)")


def program(seed: int | str, tied: bool = False) -> Program:
    """The program of a seed. tied: values tie in every one, and half of them are trained."""
    rng = random.Random(f"function {seed}")
    keys = rng.choice([1, 2, 3, 5, 7, 9, 13, 17, 24, 33, 40, 70])
    sizes = {
        "B": rng.randint(1, 3), "H": rng.randint(1, 4), "N": keys if rng.random() < 0.6 else rng.randint(1, 40),
        "M": keys, "D": rng.choice([4, 5, 8, 12, 16, 17, 24, 40]), "E": rng.choice([4, 6, 8, 16, 19, 33]),
    }  # fmt: skip
    dtype = rng.choices(["float32", "bfloat16", "float16", "float64"], [66, 18, 12, 4])[0]
    trained = rng.random() < (0.52 if tied else 0.35) and dtype != "float64"
    w = Writer(rng, sizes, dtype, trained=trained, lead=rng.choice(LEADS))
    w.intended = dtype != "float64"
    q, k, v = operands(w)
    out = by_sdpa(w, q, k, v) if w.chance(0.12) else by_hand(w, q, k, v)
    finish(w, out)
    route, emitter = _route(w)
    if (more := random.Random(f"statistics {seed}")).random() < FURTHER:
        return_statistics(w, v, more)
        emitter = more.choice([emitter, emitter, "auto"])
    if (more := random.Random(f"far {seed}")).random() < FAR and dtype != "float16":
        move_far(w, more)
    if (more := random.Random(f"heads {seed}")).random() < MIXED and len(w.lead) == 2:
        mix_heads(w, more)
    if (more := random.Random(f"gate {seed}")).random() < GATED:
        gate(w, more)
    if (more := random.Random(f"weights {seed}")).random() < WEIGHED:
        weigh(w, more)
    if (more := random.Random(f"dead rows {seed}")).random() < DEAD:
        mask_rows(w, more)
    if (more := random.Random(f"aliases {seed}")).random() < ALIASED:
        write_through_alias(w, more)
    if (more := random.Random(f"detached {seed}")).random() < DETACHED and trained:
        w.note("detached")
        name, at = _variable(w, more)
        w.lines.insert(at, f"{name} = {more.choice(DETACHED_FORMS).format(x=name)}")
    if (more := random.Random(f"ties {seed}")).random() < TIED and trained or tied:
        tie(w, more)
    return Program(
        text=w.text(), trained=w.trained, route=route, emitter=emitter, intended=w.intended,
        kinds=tuple(sorted({*w.kinds, dtype, route, emitter, "training" if w.trained else "inference"})),
    )  # fmt: skip


def _route(w: Writer) -> tuple[str, str]:
    drawn = w.rng.random()
    if drawn < 0.08:
        return "dynamo", "reference"
    if drawn < 0.11:
        return "dynamic", "reference"
    if drawn < 0.11 + (0.02 if w.trained else 0.15):
        return "trace", "auto"
    return "trace", "reference"


def operands(w: Writer) -> tuple[str, str, str]:
    """Q [lead.., N, D], K [lead.., M, D] and V [lead.., M, E], from inputs in some layout."""
    if w.chance(0.05):
        return _packed(w)
    group = w.lead == ("B", "H") and w.chance(0.15)
    found = [_operand(w, *about) for about in (("q", "N", "D"), ("k", "M", "D"), ("v", "M", "E"))]
    if group:
        w.note("grouped heads")
        w.sizes["G"] = w.rng.randint(2, 3)
        spell = w.pick(
            "{0}.repeat_interleave(G, 1)", "{0}[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2)",
            "{0}.repeat(1, G, 1, 1)", "{0}.unsqueeze(2).expand(B, H, G, M, {1}).reshape(B, H * G, M, {1})",
        )  # fmt: skip
        for name, width in zip(found[1:], "DE", strict=True):
            w.say(f"{name} = {spell.format(name, width)}")
        w.arguments[found[0]] = w.arguments[found[0]].replace("H", "H * G")
        w.lines = [line.replace("B, N, H, D", "B, N, H * G, D") if line[:3] == "q =" else line for line in w.lines]
        w.lead = ("B", "H * G")
    if w.chance(0.04):
        w.note("expanded key")
        w.arguments[found[1]] = w.arguments[found[1]].replace("randn(B, H,", "randn(B, 1,")
    return found[0], found[1], found[2]


def _packed(w: Writer) -> tuple[str, str, str]:
    w.note("packed qkv")
    w.sizes |= {"N": w.sizes["M"], "E": w.sizes["D"]}
    w.lead = ("B", "H")
    x = w.floats("x", "B, N, 3, H, D")
    q, k, v = (w.fresh(name) for name in "qkv")
    if w.chance(0.5):
        w.say(f"{q}, {k}, {v} = {x}.permute(2, 0, 3, 1, 4).unbind(0)")
    else:
        w.say(f"{q}, {k}, {v} = ({x}[:, :, n].transpose(1, 2) for n in range(3))")
    return q, k, v


def _operand(w: Writer, name: str, rows: str, width: str) -> str:
    lead = "".join(f"{size}, " for size in w.lead)
    kind = w.pick("plain", "plain", "plain", "last", "gaps", "heads inside", "merged", "shifted")
    if kind in ("heads inside", "merged") and w.lead == ("B", "H"):
        if kind == "merged":
            own = w.floats(name, f"B, {rows}, H * {width}")
            w.say(f"{own} = {own}.view(B, {rows}, H, {width}).transpose(1, 2)")
        else:
            own = w.floats(name, f"B, {rows}, H, {width}")
            w.say(f"{own} = {own}" + w.pick(".transpose(1, 2)", ".permute(0, 2, 1, 3)", ".movedim(1, 2)"))
    elif kind == "last":
        own = w.floats(name, f"{lead}{width}, {rows}")
        w.say(f"{own} = {own}" + w.pick(".mT", ".transpose(-1, -2)", ".transpose(-2, -1).contiguous()"))
    elif kind == "gaps":
        own = w.floats(name, f"{lead}2 * {rows}, {width} + 3")
        w.say(f"{own} = {own}[..., ::2, 1:{width} + 1]")
    elif kind == "shifted":
        own = w.floats(name, f"{lead}{rows} + 1, {width}")
        w.say(f"{own} = {own}[..., {w.pick('1:', ':-1')}, :]")
    else:
        own = w.floats(name, f"{lead}{rows}, {width}")
    w.note(f"layout {kind}")
    return own


def by_sdpa(w: Writer, q: str, k: str, v: str) -> str:
    """A call of scaled_dot_product_attention."""
    w.note("sdpa")
    call = [q, k, v]
    kind = w.pick("none", "causal", "mask", "bias", "product")
    if kind == "causal":
        call.append("is_causal=True")
    elif kind == "mask":
        call.append(f"attn_mask={predicate(w)}")
    elif kind == "bias":
        lead = "".join(f"{size}, " for size in w.lead)
        call.append(f"attn_mask={w.floats('bias', w.pick('N, M', f'{lead}N, M'))}")
    elif kind == "product":
        r = w.floats("r", "M, D")
        call.append(f"attn_mask=({q} * 0.5) @ {r}.mT" + w.pick("", " * 0.5"))
    if w.chance(0.4):
        call.append(f"scale={w.pick('0.3', '1.0', 'D ** -0.5')}")
    return w.let("o", f"F.scaled_dot_product_attention({', '.join(call)})")


def by_hand(w: Writer, q: str, k: str, v: str) -> str:
    """Products, a score program with masks, a normaliser, and the product with V."""
    scores(w, q, k)
    steps = w.rng.choices([0, 1, 2, 3], [3, 5, 3, 1])[0]
    kept: list[str] = []
    for _ in range(steps):
        kind = w.rng.choices(["bias", "mask", "function"], [3, 5, 2])[0]
        if kind == "bias":
            apply_bias(w)
        elif kind == "mask":
            kept.append(predicate(w))
            apply_mask(w, kept[-1])
        else:
            w.note("score function")
            w.say(f"s = {w.pick(*SCORES)}")
    if w.chance(0.1):
        near_miss(w, q, k)
    return normalize(w, v, kept)


def near_miss(w: Writer, q: str, k: str) -> None:
    """A change after which it is no attention, or another one."""
    w.note("near miss")
    w.intended = False
    w.say(w.pick(
        "s = s.roll(1, -1)", "s = s.flip(-1)", "s = s.cumsum(-1)", "s = s + s.mean()", "s = s.sort(-1).values",
        "s = s - s.mean(-1, keepdim=True)", "s = s + s.amax(-2, keepdim=True)", f"s = s + {q}.sum()",
        "s = s + s.sum(-1, keepdim=True)",
        "s = s[..., torch.arange(M - 1, -1, -1)]", "s = torch.cat([s[..., 1:], s[..., :1]], -1)", f"s = s * {k}.amax()",
        "s = s * s.softmax(-1)", "s = s.softmax(-1)", "s = s.round(decimals=1)", "s = s.mean(0, keepdim=True) + s",
        "s = s.transpose(-1, -2).reshape(s.shape)", "s = s + s.detach()", "s = s - s.amax()",
    ))  # fmt: skip


def scores(w: Writer, q: str, k: str) -> None:
    """The variable `s` [lead.., N, M]: one or several products and their scales."""
    before = w.pick("", "", "q", "k", "both")
    if before in ("q", "both"):
        w.say(f"{q} = {q}" + w.pick(" * 0.35", " / math.sqrt(D)", f" * {q}.shape[-1] ** -0.5", " * torch.tensor(0.4)"))
    if before in ("k", "both"):
        w.say(f"{k} = {k}" + w.pick(" * 0.6", " / D ** 0.25"))
    w.say(f"s = {_product(w, q, k)}")
    if before == "" and w.chance(0.7):
        w.say("s = s" + w.pick(" * 0.3", " / math.sqrt(D)", " * D ** -0.5", ".div(3.0)", " / 8", ".mul(0.2)",
                               f" * (1.0 / {k}.shape[-2])", f" * math.log({k}.shape[-2] + 1)"))  # fmt: skip
        if w.chance(0.1):
            w.say("s /= 2.0")
    if w.chance(0.14):
        w.note("second product")
        _second(w, q, k)


def _product(w: Writer, q: str, k: str) -> str:
    letters = {1: "b", 2: "bh", 3: "bgh"}.get(len(w.lead), "")
    ways = [f"{q} @ {k}.mT", f"torch.matmul({q}, {k}.transpose(-1, -2))", f"({k} @ {q}.mT).mT",
            f"torch.einsum('...id,...jd->...ij', {q}, {k})",
            f"torch.einsum('{letters}id,{letters}jd->{letters}ij', {q}, {k})"]  # fmt: skip
    if len(w.lead) == 1:
        ways += [f"torch.bmm({q}, {k}.transpose(1, 2))", f"{q}.bmm({k}.mT)"] * 2
        bias = f"torch.arange(M).to({q}.dtype).expand({w.lead[0]}, N, M) / 9"
        ways.append(f"torch.baddbmm({bias}, {q}, {k}.mT, beta={w.pick('1', '0.5', '0')}, alpha={w.pick('1', '0.3')})")
    if w.lead == ("B", "H") and w.chance(0.3):
        flat = f"torch.bmm({q}.reshape(B * H, N, D), {k}.reshape(B * H, M, D).mT)"
        return w.pick(f"{flat}.view(B, H, N, M)", f"{flat}.unflatten(0, (B, H))")
    return w.pick(*ways)


def _second(w: Writer, q: str, k: str) -> None:
    r = w.floats("r", "M", "D")
    lead = w.pick(f"torch.einsum('...id,jd->...ij', {q}, {r})", f"{q} @ {r}.mT", f"({q} * 0.25) @ {r}.mT",
                  f"({q}[..., :3] * 2) @ {k}[..., 1:4].mT", f"{q} @ ({r} * 0.5).mT")  # fmt: skip
    w.say(w.pick(f"s = s + {lead}", f"s = s - 0.5 * {lead}", f"s = s * torch.sigmoid({lead})", f"s = {lead} + s"))


def finish(w: Writer, out: str) -> None:
    """What follows the product with V, writes in place anywhere, special values, and the return."""
    if w.chance(0.35):
        wide = w.floats("projection", "E", "3") if w.sizes["E"] != w.sizes["D"] else f"{out}.mT"
        ways = [f"{out} * 0.5", f"{out}.contiguous()", f"{out} + 1", f"{out}.float()", f"{out}.flatten(-2)",
                f"{out} @ {wide}"]  # fmt: skip
        if len(w.lead) == 2:
            ways += [f"{out}.transpose(1, 2).flatten(2)", f"{out}.transpose(1, 2).contiguous()",
                     f"{out}.permute(0, 2, 1, 3).reshape(B, N, -1)"] * 2  # fmt: skip
        w.say(f"{out} = {w.pick(*ways)}")
    if w.chance(0.15):
        write_in_place(w)
    for name in list(w.arguments):
        if w.chance(0.02) and "randn" in w.arguments[name]:
            w.note("special values")
            w.late.append(f"{name}.view(-1)[{w.rng.randint(0, 99)} % {name}.numel()] = {w.pick(*SPECIALS)}")
    if w.trained:
        w.lines[:0] = [f"{name} = {name}.clone()" for name in _written(w)]
    elif w.chance(0.5):
        w.lines[:0] = [f"{name} = {name}.clone()" for name in _written(w) if w.chance(0.5)]
    further = [name for name in ("s", "p") if any(line.startswith(f"{name} =") for line in w.lines)]
    if further and w.chance(0.04):
        w.note("weights returned")
        w.intended = False
        w.say(f"return {out}, {w.pick(*further)}")
    else:
        w.say(f"return {out}")


def return_statistics(w: Writer, v: str, rng: random.Random) -> None:
    """Results that are made of weights and scores, beside the output or made of it."""
    made = [name for name in ("p", "s") if any(line.startswith(f"{name} =") for line in w.lines)]
    if not made:
        return
    w.note("statistics returned")
    found = []
    for number in range(rng.randint(1, 2)):
        of = "s" if rng.random() < 0.3 or "p" not in made else "p"
        drawn = rng.choice(OF_SCORES if of == "s" else STATISTICS).format(p="p", v=v)
        if rng.random() < 0.4:  # computed where the weights are, before the product with V
            last = max(n for n, line in enumerate(w.lines) if line.startswith(f"{of} ="))
            mode = rng.choice(["", "with torch.no_grad(): ", "with torch.no_grad(): "])
            w.lines.insert(last + 1, f"{mode}of_{of}_{number} = {drawn}")
            drawn = f"of_{of}_{number}"
        found.append(drawn)
    w.lines[-1] = ", ".join([w.lines[-1], *found])


def move_far(w: Writer, rng: random.Random) -> None:
    """Inputs of another magnitude, and numbers that bring scores back to where they were: before or after the product,
    in one step or two."""
    made = next((n for n, line in enumerate(w.lines) if line.startswith("s = ")), None)
    moved = [name for name, value in w.arguments.items() if name in ("q", "k") and "randn" in value]
    if made is None or not moved:
        return
    w.note("far from 1")
    total = 0
    for name in moved:
        power = rng.choice([-14, -9, 3, 12, 18])
        w.arguments[name] += f" * 1e{power}"
        total += power
    before = rng.choice([0, 0, total // 2, total, -5])
    name = rng.choice(moved)
    w.lines[made + 1 : made + 1] = [f"s = s * 1e{before - total}"] * (before != total)
    w.lines[made:made] = [f"{name} = {name} * 1e{-before}"] * (before != 0)


def tie(w: Writer, rng: random.Random) -> None:
    """Integers in the place of numbers, some rows zero, and often a function with a kink. Integers of Q and K have one
    sign, and a row of K another: sums of products that cancel would be zero or not by how they are rounded."""
    w.note("ties")
    for name, drawn in w.arguments.items():
        found = re.match(r"\(torch\.randn\(([^()]+)\)", drawn)
        if found is not None:
            sizes = found[1].split(", ")
            rows = ", ".join([*sizes[:-1], "1"])
            kept, sign = rng.choice([0.5, 0.8, 1.0]), ""
            some = f" * (torch.rand({rows}) < {kept})" if len(sizes) > 1 and kept < 1 else ""
            if name in ("q", "k", "x"):
                sign = ".abs() * torch.randn(()).sign()"
            w.arguments[name] = f"({found[0][1:]}.round(){sign}{some}{drawn[found.end() :]}"
    made = [n for n, line in enumerate(w.lines) if line.startswith("s = ")]
    if made and rng.random() < 0.7:
        w.lines.insert(rng.choice(made) + 1, f"s = {rng.choice(KINKED)}")


def gate(w: Writer, rng: random.Random) -> None:
    """Weights times a function of their scores, which training leaves alone."""
    if (made := _made(w, "p")) and _made(w, "s"):
        w.note("gate of scores")
        w.intended = w.intended and not w.trained
        w.lines.insert(made[0] + 1, f"p = p * {rng.choice(GATES)}")


def weigh(w: Writer, rng: random.Random) -> None:
    """Weights times a tensor of keys, or of rows and keys."""
    if made := _made(w, "p"):
        w.note("weights of keys")
        factor = rng.choice(FACTORS).format(factor=w.floats("factor", rng.choice(("M", "N, M"))))
        w.lines.insert(made[-1] + 1, f"p = p * {factor}")


def mask_rows(w: Writer, rng: random.Random) -> None:
    """A mask of all keys of some rows: what eager makes of such a row depends on the fill, and on its dtype."""
    if made := _made(w, "s"):
        w.note("rows masked")
        rows = rng.choice(ROWS).format(row=rng.randrange(w.sizes["N"]))
        w.lines.insert(rng.choice(made) + 1, rng.choice(FILLED_ROWS).format(rows=rows, fill=rng.choice(ROW_FILLS)))


def write_through_alias(w: Writer, rng: random.Random) -> None:
    """A write to a tensor that is read through a view from before the write, or the other way round."""
    name, at = _variable(w, rng)
    w.note("alias written")
    w.intended = False
    written, read = rng.choice(((name, "seen"), ("seen", name)))
    alias, write = rng.choice(ALIASES).format(x=name), rng.choice(WRITES)
    w.lines[at:at] = [f"{name} = {name}.clone()", f"seen = {alias}", written + write, f"{name} = {read}"]


def _variable(w: Writer, rng: random.Random) -> tuple[str, int]:
    """One of Q, K, V, scores and weights, or an argument of a program that names none of them so, and the number of a
    statement before which it has been made."""
    names = [name for name in ("q", "k", "v", "s", "p") if name in w.arguments or _made(w, name)]
    name = rng.choice(names or [*w.arguments])
    return name, rng.choice([n + 1 for n in _made(w, name)] or [0])


def _made(w: Writer, name: str) -> list[int]:
    """Numbers of the statements that a variable is assigned in."""
    return [n for n, line in enumerate(w.lines) if line.startswith(f"{name} = ")]


def mix_heads(w: Writer, rng: random.Random) -> None:
    """Sums over heads after a step that made scores or weights, by matrices that are inputs."""
    for name in rng.choice([("s",), ("p",), ("s", "p")]):
        made = [n for n, line in enumerate(w.lines) if line.startswith(f"{name} = ")]
        if made:
            w.note(MIXED_HEADS)
            matrix = w.floats(f"mix_{name}", f"{w.lead[1]}, {w.lead[1]}")
            mixed = rng.choice(MIXTURES).format(x=name, m=f"{matrix}.to({name}.dtype)")
            w.lines.insert(rng.choice(made) + 1, f"{name} = {mixed}")


def _written(w: Writer) -> list[str]:
    """Parameters that are written in place."""
    body = "\n".join(w.lines)
    return [name for name in w.arguments if any(name + write in body for write in WRITES)]


def write_in_place(w: Writer) -> None:
    """One or two writes at any point, to any variable that exists there, through itself or a view of it."""
    w.note("written in place")
    w.intended = False
    for _ in range(w.rng.randint(1, 2)):
        point = w.rng.randint(0, len(w.lines))
        made = [line.split(" = ")[0] for line in w.lines[:point] if " = " in line.split("(")[0]]
        names = [n for n in [*made, *(n for n, e in w.arguments.items() if "randn" in e)] if n.isidentifier()]
        name = w.pick(*names)
        w.lines.insert(point, name + w.pick(*WRITES))
