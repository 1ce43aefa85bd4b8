"""Faults of the compiler, each put in by hand, with a program that meets it."""

import dataclasses
import math

import torch
import torch.nn.functional as F

from fusion.ir import integers
from fusion.ir.expr import ONE, SCORE, ZERO, I, J, Kind, const, coord, load, loads, rebuild, substitute
from fusion.ir.ops import apply, where
from fusion.ir.primitives import PRIMITIVES
from fusion.ir.spec import Normalizer
from fusion.passes.pullback import casts, pointwise, pullback, views
from fusion.passes.recognize import softmaxes
from fusion.passes.specify import calls
from fusion.passes.specify.masks import understand

aten = torch.ops.aten
LENGTH, WIDTH = 19, 8


def inputs(trained=False, heads=4, length=LENGTH):
    torch.manual_seed(0)
    return [torch.randn(2, h, length, WIDTH, requires_grad=trained) for h in (4, heads, heads)]


# Programs


def plain(q, k, v):
    return (q @ k.mT * 0.3).softmax(-1) @ v


def scaled_queries(q, k, v):
    return ((q * 0.3) @ k.mT).softmax(-1) @ v


def flattened(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, n, d) for x in (q, k, v))
    return (q @ k.mT).softmax(-1).bmm(v).view(b, h, n, d).transpose(1, 2)


def grouped(q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def grouped_call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def einsum(q, k, v):
    return torch.einsum("bhij,bhje->bhie", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def sliced(q, k, v):
    return (q[:, :, 2:] @ k[:, :, 3:].mT).softmax(-1) @ v[:, :, 3:]


def split(q, k, v):
    whole = torch.cat([q, k, v], -1)
    q, k, v = whole.split(WIDTH, -1)
    return (q @ k.mT).softmax(-1) @ v


def keys_permuted(q, k, v):
    return torch.einsum("bhid,dbhj->bhij", q, k.permute(3, 0, 1, 2)).softmax(-1) @ v


def square(q, k, v):
    q, k, v = (x[:, :2] for x in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v


def causal_padded(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep[:, None, None], -math.inf).softmax(-1) @ v


def causal(q, k, v):
    keep = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v


def padded(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep[:, None, None], torch.finfo(torch.float32).min).softmax(-1) @ v


def biased(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-1) @ v


def two_products(q, k, v, table):
    q = q * 0.35
    return (q @ k.mT + torch.einsum("bhid,jd->bhij", q, table)).softmax(-1) @ v


def sinking(q, k, v, sink):
    s = torch.cat([q @ k.mT, sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def soft_capped(q, k, v):
    return (4 * torch.tanh(q @ k.mT / 4)).softmax(-1) @ v


def activated(q, k, v):
    return F.gelu(q @ k.mT).softmax(-1) @ v


def less(q, k, v, bias):
    return torch.sub(q @ k.mT, bias, alpha=2).softmax(-1) @ v


def differential(q, k, v):
    one, other = ((x @ k.mT).softmax(-1) for x in (q, q.flip(-1)))
    return (one - 0.4 * other) @ v


def dropped(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.4) @ v


def plus_one(q, k, v):
    e = torch.exp(q @ k.mT)
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def half_lowest(q, k, v, keep):
    s = (q @ k.mT).to(torch.float16)
    s = s.masked_fill(~keep[:, None, None], -math.inf)
    return s.softmax(-1).float() @ v


def lerped(q, k, v, other, keep):
    s = (q @ k.mT).masked_fill(~keep[:, None, None], -math.inf)
    return torch.lerp(s, other, 0.6).softmax(-1) @ v


def shifted(q, k, v, keep, factor):
    s = (q @ k.mT).masked_fill(~keep[:, None, None], torch.finfo(torch.float32).min)
    return ((s - s.amax(-1, keepdim=True)) * factor).softmax(-1) @ v


def two_fills(q, k, v, padding):
    keep = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (torch.where(keep, q @ k.mT, torch.finfo(torch.float32).min) + padding[:, None, None]).softmax(-1) @ v


def dead_rows(q, k, v, keep):
    return (q @ k.mT + (1 - keep[:, None, None].float()) * -1e9).softmax(-1) @ v


def rooted(q, k, v):
    return (F.relu(q @ k.mT) + 1e-6).sqrt().softmax(-1) @ v


def wrapping(q, k, v, small):
    return (q @ k.mT + 0.01 * (small - 1).float()[:, None, None]).softmax(-1) @ v


def keep():
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, 5:] = False
    return mask


# What is put in


def spec_fault(change):
    """A fault in the finished spec: `change(spec)` gives the fields that are wrong."""

    def put_in(patch):
        right = calls.specify

        def wrong(*args):
            found = right(*args)
            return dataclasses.replace(found, spec=dataclasses.replace(found.spec, **change(found.spec)))

        patch.setattr(calls, "specify", wrong)

    return put_in


def score_fault(change):
    """A fault in the score program, and so in what is known of its mask."""

    def wrong(spec):
        score = change(spec.score)
        return {"score": score, "mask": understand(score, spec.normalizer)}

    return spec_fault(wrong)


def operand_fault(change):
    """A fault in which tensors are read."""

    def put_in(patch):
        right = calls.specify
        patch.setattr(
            calls, "specify", lambda *args: dataclasses.replace(f := right(*args), operands=change(f.operands))
        )

    return put_in


def builder_fault(packet, builder):
    """A fault in the table of pointwise operations."""
    return lambda patch: patch.setitem(pointwise.BUILDERS, packet, builder)


def attribute_fault(module, name, make):
    """`make(right)` in the place of a function."""
    return lambda patch: patch.setattr(module, name, make(getattr(module, name)))


def rule_fault(packet, make):
    """A fault in how a view moves indices."""
    return lambda patch: patch.setitem(views._RULES, packet, make(views._RULES[packet]))


def _replaced(expr, change):
    """`expr` with every node for which `change` returns one replaced."""
    return rebuild(expr, change)


def _loads_are(value):
    return lambda score: _replaced(score, lambda part: value if part.op == "load" and part.kind is Kind.FLOAT else None)


def _looser(part):
    return apply(part.op, part.args[0], integers.add(part.args[1], 1)) if part.op in ("ile", "ilt") else None


def _swap(index, first, second):
    return tuple(substitute(e, {coord(first): coord(second), coord(second): coord(first)}) for e in index)


def _moved(access, by):
    return lambda spec: {access: tuple(integers.add(e, by) if "j" in str(e) else e for e in getattr(spec, access))}


def _mask_fact(**changes):
    def change(spec):
        facts = {name: function(getattr(spec.mask, name)) for name, function in changes.items()}
        return {"mask": dataclasses.replace(spec.mask, **facts)}

    return change


def _permuted(right):
    def wrong(node, args, index, bounds):
        return tuple(index[d % len(index)] for d in args["dims"])

    return wrong


def _lerp(call):
    start, end, weight = (casts.operand(arg, Kind.FLOAT) for arg in call.args[:3])
    return apply("fadd", start, apply("fmul", weight, apply("fsub", end, start)))


def _sub_ignores_alpha(call):
    left, right = (casts.operand(arg, Kind.FLOAT) for arg in call.args[:2])
    return apply("fsub", left, right)


def _derivative_of(name, rule):
    """The rule takes (gradient, result, arguments)."""
    wrong = dataclasses.replace(PRIMITIVES[name], derivative=lambda g, y, *args: rule(g, y, args))
    return lambda patch: patch.setitem(PRIMITIVES, name, wrong)


LOWEST = torch.finfo(torch.float32).min


def load_at(part, index):
    """The load of another element."""
    return load(part.attr, index, part.kind)


def _exchanged(dims):
    """The first two dimensions, one for the other."""
    return (dims[1], dims[0], *dims[2:])


def _forgetful_fill(spec):
    """where(causal, s + padding, lowest), and not lowest + padding."""
    (padding,) = (part for part in loads(spec.score) if part.kind is Kind.FLOAT)
    return {"score": where(apply("ile", J, I), apply("fadd", SCORE, padding), const(LOWEST))}


def _only(score, kind):
    return next(part for part in loads(score) if part.kind is kind)


def _selected(spec):
    """An addition of -1e9 as a selection, through which no gradient flows."""
    return {"score": where(_only(spec.score, Kind.BOOL), SCORE, const(-1e9))}


def _leaking(patch):
    """The derivative of an arm that is not taken is multiplied by 0, also where it is infinite."""
    root = apply("sqrt", apply("fadd", SCORE, const(1e-6)))
    spec_fault(lambda spec: {"score": where(apply("fle", SCORE, ZERO), const(1e-3), root)})(patch)

    def where_rule(g, y, args):
        taken = apply("bool_to_float", args[0])
        return None, apply("fmul", g, taken), apply("fmul", g, apply("fsub", const(1.0), taken))

    _derivative_of("where", where_rule)(patch)


FOUND = {
    "a second product's scale twice": (two_products, (torch.randn(LENGTH, WIDTH),), False,
        score_fault(lambda s: _replaced(s, lambda p: apply("fmul", p, const(0.35)) if p.op == "load" else None))),
    "a fill forgets what else is added": (two_fills, ((1 - keep().float()) * LOWEST,), False,
        spec_fault(_forgetful_fill)),
    "an addition taken for a selection": (dead_rows, (keep(),), True, spec_fault(_selected)),
    "0 * inf of an arm not taken": (rooted, (), True, _leaking),
    "a shift taken off that overflows": (shifted, (keep(), torch.tensor(2.0)), False,
        attribute_fault(softmaxes, "may_be_far", lambda right: lambda value: False)),
    "narrow integers that do not wrap": (wrapping, (keep().to(torch.uint8),), False,
        attribute_fault(pullback, "within", lambda right: lambda value, dtype, limits: value)),
    "one formula of lerp for two": (lerped, (torch.randn(LENGTH, LENGTH), keep()), False,
        builder_fault(aten.lerp, _lerp)),
}  # fmt: skip
"""The wrong results that were found before there was validation: (program, further inputs, trained, fault)."""

B1 = coord("b1")
BIAS = torch.randn(LENGTH, LENGTH)

INJECTED = {
    "scale twice": (scaled_queries, (), False,
        score_fault(lambda s: apply("fmul", s, const(0.3)))),
    "scale dropped": (plain, (), False, score_fault(lambda s: SCORE)),
    "wrong sign of the scale": (plain, (), False, score_fault(lambda s: apply("neg", s))),
    "mask off by one": (causal, (), False, score_fault(lambda s: _replaced(s, _looser))),
    "mask of the call off by one": (call, (), False, score_fault(lambda s: _replaced(s, _looser))),
    "mask inverted": (padded, (keep(),), False,
        builder_fault(aten.masked_fill, lambda c: where(c.args[1], c.args[0], const(float(c.args[2]))))),
    "mask of another batch": (padded, (keep(),), False,
        score_fault(lambda s: substitute(s, {coord("b0"): integers.integer(0)}))),
    "wrong fill": (padded, (keep(),), False,
        score_fault(lambda s: _replaced(s, lambda p: const(-math.inf) if p is const(LOWEST) else None))),
    "bias dropped": (biased, (BIAS,), False, score_fault(_loads_are(ZERO))),
    "bias transposed": (biased, (BIAS,), False,
        score_fault(lambda s: _replaced(s, lambda p: load_at(p, p.args[::-1]) if p.op == "load" else None))),
    "bias subtracted the wrong way": (less, (BIAS,), False, score_fault(lambda s: apply("neg", s))),
    "a factor of an argument dropped": (less, (BIAS,), False, builder_fault(aten.sub, _sub_ignores_alpha)),
    "q and k swapped": (plain, (), False, operand_fault(lambda o: (o[1], o[0], *o[2:]))),
    "k read for v": (plain, (), False, operand_fault(lambda o: (o[0], o[1], o[1], *o[3:]))),
    "wrong head map": (grouped, (), False,
        rule_fault(aten.repeat_interleave, lambda right: lambda node, args, index, bounds: (
            index[0], integers.mod(index[1], 2), *index[2:]))),
    "wrong head map of the call": (grouped_call, (), False,
        attribute_fault(integers, "floordiv", lambda right: lambda a, b, *bounds:
            integers.mod(a, 2) if getattr(b, "attr", b) == 2 else right(a, b, *bounds))),
    "batch and head exchanged in v": (plain, (), False,
        spec_fault(lambda spec: {"v": _swap(spec.v, "b0", "b1")})),
    "v one key late": (plain, (), False, spec_fault(_moved("v", 1))),
    "start of a slice forgotten": (sliced, (), False,
        rule_fault(aten.slice, lambda right: lambda node, args, index, bounds: index)),
    "wrong piece of a split": (split, (), False,
        spec_fault(lambda spec: {"q": (*spec.q[:3], integers.add(spec.q[3], 1))})),
    "a permutation's inverse": (keys_permuted, (), False, rule_fault(aten.permute, _permuted)),
    "output permuted": (square, (), False,
        spec_fault(lambda spec: {"output": dataclasses.replace(spec.output, dims=_exchanged(spec.output.dims))})),
    "scores transposed": (square, (), False, operand_fault(lambda o: (o[1], o[0], *o[2:]))),
    "sink dropped": (sinking, (torch.randn(4),), False, spec_fault(lambda spec: {"sinks": ()})),
    "sink of another head": (sinking, (torch.randn(4),), False,
        spec_fault(lambda spec: {"sinks": tuple(substitute(s, {B1: integers.integer(0)}) for s in spec.sinks)})),
    "rows not scaled": (plus_one, (), False, spec_fault(lambda spec: {"row_scale": None})),
    "dead rows zero": (causal_padded, (keep(),), False,
        spec_fault(lambda spec: {"normalizer": Normalizer.SAFE_SOFTMAX})),
    "sign of a difference": (differential, (), False, spec_fault(lambda spec: {"weight": ONE})),
    "wrong dropout scale": (dropped, (), False,
        spec_fault(lambda spec: {"weight": apply("fmul", spec.weight, const(0.6))})),
    "dropout of another row": (dropped, (), False,
        spec_fault(lambda spec: {"weight": substitute(spec.weight, {I: integers.add(I, 1)})})),
    "missing cast of a constant": (half_lowest, (keep(),), False,
        score_fault(lambda s: _replaced(s, lambda p: const(LOWEST) if p is const(-math.inf) else None))),
    "another activation": (activated, (), False,
        builder_fault(aten.gelu, lambda c: pointwise.BUILDERS[aten.silu](c))),
    "derivative of tanh": (soft_capped, (), True,
        _derivative_of("tanh", lambda g, y, args: (apply("fmul", g, apply("fsub", ONE, y)),))),
    "derivative of a product": (soft_capped, (), True,
        _derivative_of("fmul", lambda g, y, args: (g, g))),
    "gradient of a bias dropped": (less, (torch.randn(LENGTH, LENGTH, requires_grad=True),), True,
        _derivative_of("fsub", lambda g, y, args: (g, None))),
    "keys of a row cut off": (causal, (), False,
        spec_fault(_mask_fact(key_hi=lambda e: integers.sub(e, 1)))),
    "whole tiles beyond the diagonal": (causal, (), False,
        spec_fault(_mask_fact(full_hi=lambda e: integers.add(e, 1)))),
    "live keys forgotten": (causal, (), False,
        spec_fault(_mask_fact(live=lambda e: apply("ilt", J, I)))),
    "another dtype of the result": (plain, (), False, spec_fault(lambda spec: {"out_dtype": "bfloat16"})),
}  # fmt: skip
"""Others: likewise."""
