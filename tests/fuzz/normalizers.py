"""Random normalisers of scores `s`, what happens to weights after them, and the product with V."""

from __future__ import annotations

from tests.fuzz.writer import Writer

BY_LIBRARY = ("s.softmax(-1)", "torch.softmax(s, dim=-1)", "F.softmax(s, dim=-1)", "s.softmax(s.dim() - 1)",
              "torch.softmax(s, -1, dtype=torch.float32).to(dtype)", "F.softmax(s.float(), -1).to({v}.dtype)",
              "s.float().softmax(-1).type_as({v})", "F.log_softmax(s, -1).exp()", "torch.softmax(s, -1).to({v}.dtype)",
              "(s - s.amax(-1, keepdim=True)).softmax(-1)",
              "((s - s.amax(-1, keepdim=True)) * 2.0).softmax(-1)")  # fmt: skip
BY_HAND = ("e / e.sum(-1, keepdim=True)", "e * (1 / e.sum(-1, keepdim=True))", "e / e.sum(dim=-1, keepdim=True)",
           "e / (e.sum(-1, keepdim=True) + 1e-6)", "e / (1 + e.sum(-1, keepdim=True))", "F.normalize(e, p=1, dim=-1)",
           "e / e.sum(-1, keepdim=True).clamp(min=1e-9)", "e / torch.sum(e, -1, True)")  # fmt: skip
EXPONENTIALS = ("torch.exp(s)", "(s - s.amax(-1, keepdim=True)).exp()",
                "torch.exp(s - s.max(dim=-1, keepdim=True).values)",
                "torch.exp(s - s.amax(-1, keepdim=True).detach())", "torch.exp(s - s.detach().amax(-1, keepdim=True))",
                "torch.exp(s - s.max(-1, keepdim=True)[0])", "torch.exp2(s * 1.4426950408889634)")  # fmt: skip
UNSHIFTED = "exponentials without a maximum"
"""They overflow in eager mode where the fused softmax, which has a maximum, does not; or they all vanish, as do those
below the maximum of keys that are masked afterwards."""
RENORMALIZED = "renormalised"
GATES = ("torch.sigmoid(s)", "torch.sigmoid(s - 2)", "torch.relu(s).square()", "torch.relu(s)", "F.silu(s)")


def normalize(w: Writer, v: str, kept: list[str]) -> str:
    """The output [lead.., N, E] from scores `s`, with a normaliser in some spelling."""
    ways = ["library", "by hand", "late division", "logsumexp", "sink", "gate", "scaled", "elsewhere"]
    kind = w.note(f"normaliser: {w.rng.choices(ways, [60, 14, 4, 4, 6, 4, 4, 4])[0]}")
    if kind == "normaliser: late division":
        _exponentials(w)
        return w.let("o", f"({_with_values(w, 'e', v)}) / e.sum(-1, keepdim=True)")
    if kind == "normaliser: library":
        w.say("p = " + w.pick(*BY_LIBRARY).format(v=v))
    elif kind == "normaliser: by hand":
        _exponentials(w)
        if kept and w.chance(0.3):
            w.say(f"e = e * {w.pick(*kept)}")
            w.note(UNSHIFTED)
        w.say(f"p = {w.pick(*BY_HAND)}")
    elif kind == "normaliser: logsumexp":
        w.say("p = torch.exp(s - s.logsumexp(-1, keepdim=True))")
        w.note(UNSHIFTED)
    elif kind == "normaliser: sink":
        _sink(w)
    elif kind == "normaliser: gate":
        w.say(f"p = {w.pick(*GATES)}")
        _renormalized(w)
    elif kind == "normaliser: scaled":
        c = w.argument("c", f"torch.tensor({w.pick('1.5', '0.5', '3.0')}).to(dtype)")
        w.say(f"p = ((s - s.amax(-1, keepdim=True)) * {c}).softmax(-1)")
    else:
        w.intended = False
        w.say(w.pick("p = s.softmax(-2)", "p = s.softmax(0)", "p = s.softmax(-1).square()",
                     "p = (s - s.amax(-2, keepdim=True)).tanh().softmax(-1)", "p = (s.softmax(-2) + 0.1).softmax(-1)",
                     "p = (s - s.amax()).clamp(min=-9).softmax(-1)", "p = s.relu() / (s.relu().sum(-2, True) + 1e-3)",
                     "p = (s.sigmoid() - s.sigmoid().mean(-1, keepdim=True)).softmax(-1)",
                     "p = s.softmax(-1) @ s.softmax(-1).mT @ s.softmax(-1)", "p = s.softmax(-1).mT.reshape(s.shape)",
                     "p = s.flatten(-2).softmax(-1).view(s.shape)", "p = s.softmax(-1).softmax(-1)",
                     "p = F.softmin(s, dim=-1)", "p = s.softmax(-1).cumsum(-1)", "p = s"))  # fmt: skip
    _after(w, kept)
    return w.let("o", _with_values(w, "p", v))


def _exponentials(w: Writer) -> None:
    chosen = w.pick(*EXPONENTIALS)
    if "max" not in chosen:
        w.note(UNSHIFTED)
    w.say(f"e = {chosen}")


def _sink(w: Writer) -> None:
    last = w.lead[-1] if w.lead else "1"
    sink = w.floats("sink", last)
    shape = ", ".join([*w.lead, "N", "1"])
    column = f"{sink}.view({last}, 1, 1).expand({shape})" if w.lead else f"{sink}.expand({shape})"
    if w.chance(0.5):
        w.say(f"p = torch.cat([s, {column}.to(s.dtype)], -1).softmax(-1)[..., :-1]")
    elif w.chance(0.5):
        w.say(f"p = torch.cat([{column}.to(s.dtype), s], dim=-1).softmax(-1)[..., 1:]")
    else:
        w.say(f"p = F.pad(s, {w.pick('(0, 1)', '(1, 0)')}).softmax(-1)[..., :M]")
        w.intended = w.intended and "(1, 0)" not in w.lines[-1]


def _after(w: Writer, kept: list[str]) -> None:
    """What is done to weights `p` between the normaliser and the product."""
    if not w.chance(0.25):
        return
    w.note("after the normaliser")
    ways = ["p = F.dropout(p, 0.0)", "p = F.dropout(p, 0.3, training=False)", "p = torch.nan_to_num(p)",
            "p = p / p.sum(-1, keepdim=True)", f"p = p * {w.floats('gate', 'M') if w.chance(0.3) else '0.5'}",
            "p = p.nan_to_num(0.0)", "p = p.contiguous()", "p = p.clone()"]  # fmt: skip
    for keep in kept:
        ways += [f"p = p * {keep}", f"p = p.masked_fill(~{keep}, 0.0)", f"p = torch.where({keep}, p, 0.0)",
                 f"p = p.masked_fill(~{keep}.any(-1, keepdim=True), 0.0)"]  # fmt: skip
    w.say(w.pick(*ways))
    _renormalized(w)


def _renormalized(w: Writer) -> None:
    """Divide weights by what is left of them, at times."""
    if w.chance(0.3):
        w.note(RENORMALIZED)
        w.say(w.pick("p = p / (p.sum(-1, keepdim=True) + 1e-9)", "p = p / p.sum(-1, keepdim=True).clamp(min=1e-6)",
                     "p = p * (1 / (p.sum(dim=-1, keepdim=True) + 1e-6))", "p /= p.sum(-1, True) + 1e-13",
                     "p = p / p.sum(-1)[..., None]"))  # fmt: skip


def _with_values(w: Writer, p: str, v: str) -> str:
    letters = {1: "b", 2: "bh", 3: "bgh"}.get(len(w.lead), "")
    if w.dtype != "float32" and w.chance(0.8):
        p = f"{p}.to({v}.dtype)"
    ways = [f"{p} @ {v}", f"torch.matmul({p}, {v})", f"({v}.mT @ {p}.mT).mT", f"{p} @ {v}",
            f"torch.einsum('...ij,...je->...ie', {p}, {v})",
            f"torch.einsum('{letters}ij,{letters}je->{letters}ie', {p}, {v})"]  # fmt: skip
    if len(w.lead) == 1:
        ways += [f"torch.bmm({p}, {v})", f"{p}.bmm({v})"]
    return w.pick(*ways)
