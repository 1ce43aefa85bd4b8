"""Calls that were met before are copied: the graph is the one that tracing every call makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusion.passes.trace import repeats, retrace
from fusion.passes.trace.normalize import normalize

X, W, B = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4)


def layers(x, w, b):
    for _ in range(3):
        x = F.layer_norm(F.gelu(F.linear(x, w, b)), (4,))
    return x


def operands(x, w, b):
    y = x + 1
    z = x + 1  # as before
    return y + z, y + y, z + z, y - z, z - y  # one tensor twice is not two tensors


def scalars(x, w, b):
    return x * 0.0, x * -0.0, x * 1, x * 1.0, x * True, x.sum(0), x.sum(1), x.clamp(max=1), x.clamp(min=1)


def several_results(x, w, b):
    for _ in range(2):
        left, right = x.chunk(2, -1)
        values, places = torch.topk(torch.cat([right, left], -1), 4, -1)
        x = values * places
    return x, torch.einsum("ij->ji", x), torch.einsum("ij->ji", x * 2)


def layouts(x, w, b):
    transposed = w.t()
    return w.contiguous(), transposed.contiguous(), w.half().contiguous(), w.view(-1), w[1:].view(-1), w[1:], w[2:]


def modes(x, w, b):
    y = x @ w
    with torch.no_grad():
        z = x @ w
    with torch.autocast("cpu", torch.bfloat16):
        narrow = x @ w, x @ w
    return y, z, narrow, x @ w, (x @ w).detach()


def written(x, w, b):
    y, z, kept = x * 2, x * 2, x * 2
    y.add_(1)
    z[:, 1:] = 0
    rows = y[1:]
    y.mul_(w.sum())
    return y, z, kept, rows, y[1:], z[1:]


def random(x, w, b):
    return F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout(x, 0.25), F.dropout(x, 0.5, training=False)


def constants(x, w, b):
    two, three = torch.tensor(2.0), torch.tensor(3.0)
    empty = torch.tensor([]), torch.tensor([])
    return x * two, x * three, (two + 1) * x, (three + 1) * x, [torch.cat([none, x[0]]) for none in empty]


def captured(function, dynamic=False):
    """Dynamo's graph, and the inputs that it is compiled for."""
    found = []

    def keep(module, example_inputs):
        found.append((module, example_inputs))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(X, W, B)
    return found[0]


def described(traced):
    """Everything about the nodes of a graph that passes read: names and offsets into memory are not among it."""
    numbers = {node: f"%{number}" for number, node in enumerate(traced.graph.nodes)}
    found = []
    for node in traced.graph.nodes:
        held = [
            (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else v
            for v in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        ]
        target = getattr(traced, node.target).tolist() if node.op == "get_attr" else node.target
        given = torch.fx.map_arg((node.args, node.kwargs, node.meta.get("mutations")), numbers.__getitem__)
        found.append((node.op, target, given, held, node.meta.get("stack_trace"), node.meta.get("requires_grad")))
    return list(map(str, found))


def steps(x, w, b):
    out, kept = torch.zeros(3, 4), x * 2
    for t in range(3):
        out[t] = x[t] * 2 + out[t - 1]
        out[:, t] = kept[:, t]
        kept[t, 1:] = 7
    for t in (2, 0, -1):
        out[t, : t + 1] = 1.0
        out[t:, ::2] = out[None, t, ::2] * 0 + kept[-1, t:].sum()
    rows = x[0], x[2], x[-1], x[None, 1], x[..., 1], x[..., 2], x[:, [0, 2]]
    return out, kept, rows, (x[:2], x[1:3], x[0:3], x[:3], x[:1], x[::2], x[1::2])


def trained_steps(x, w, b):
    out = torch.zeros(3, 4)
    for t in range(3):
        out[t] = w[t] * x[t]
        out[t, 0] = b[t]
    with torch.no_grad():
        rows = torch.zeros(3, 4)
        for t in range(3):
            rows[t] = w[t]
    return out, rows, out[1], rows[1], rows[2]


def into_inputs(x, w, b):
    y = b
    for t in range(3):
        x[t, 1:3] = t
        y[t] = x[t, 0]
        x[t][2:] = y[t : t + 2]
    x[:, :] = x * 2
    x[...] = x + 1
    return x + y[0], y


def broadcast(x, w, b):
    out, row = torch.zeros(3, 4), x[:1]
    for t in range(3):
        out[: t + 1] = row
        out[t : t + 1, 1:] = row[:, 1:]
        out[t] = 3
        out[..., t] = 1.5
        out[t, :, None] = x[0, :, None]
    return out


def resized(x, w, b):
    left, right = x[:, 0:2], x[:, 1:3]
    right.t_()
    third = x[:, 2:4]
    left.t_()
    return left, right, third, x[0:2, 0:2].t_(), x[1:3, 0:2]


def scan(x, w, b):
    """Levels of vmap as in an associative scan: equal ones, of other sizes, of one tensor twice, with no result."""
    combine = torch.vmap(lambda one, other: (one * other, one + other.exp()))
    for _ in range(2):
        left, right = combine(x, x + 1)
        left, right = combine(left[:2], right[1:])
        combine(left, left)
        x = torch.cat([combine(left, left)[0], x[:1]]) + combine(x, right[:1].expand(3, 4))[1]
    return x, torch.vmap(lambda row: row)(x), torch.vmap(lambda row: F.dropout(row), randomness="different")(x)


def scan_twice(x, w, b):
    """Equal lines, other modes, weights that are trained, a number that is another one."""
    found = []
    for scale in (2.0, 2.0, -0.0, 0.0, 2):
        of_rows, of_columns = (torch.vmap(lambda row, by=scale: row @ w * by, in_dims=dim) for dim in (0, 1))
        found += of_rows(x), of_columns(w)
        with torch.no_grad():
            found += of_rows(x), of_columns(w)
    return found


LOOPS = [steps, trained_steps, into_inputs, broadcast, resized]
CASES = [
    *LOOPS,
    scan,
    scan_twice,
    layers,
    operands,
    scalars,
    several_results,
    layouts,
    modes,
    written,
    random,
    constants,
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_graph_is_that_of_a_whole_trace(function, dynamic, monkeypatch):
    module, inputs = captured(function, dynamic)
    found = described(normalize(module, inputs))
    monkeypatch.setattr(repeats.Repeats, "again", lambda self, call, values: None)
    assert found == described(normalize(module, inputs))


def test_equal_layers_are_traced_once(monkeypatch):
    (module, inputs), traced = captured(layers), []
    keep = repeats.Repeats.note
    monkeypatch.setattr(repeats.Repeats, "note", lambda *given: traced.append(1) or keep(*given))
    normalize(module, inputs)
    assert len(traced) <= 6, "of nine calls, those of the first layer, and of the second where strides differ"


def test_equal_levels_of_vmap_are_traced_once(monkeypatch):
    def stack(x, w, b):
        for _ in range(5):
            x = torch.vmap(lambda row: torch.softmax(row @ w, -1))(x)
        return x

    (module, inputs), traced = captured(stack), []
    through = retrace.trace_through_vmap
    monkeypatch.setattr(retrace, "trace_through_vmap", lambda *given: traced.append(1) or through(*given))
    graph = normalize(module, inputs).graph
    assert len(traced) <= 2, "the first, and another where strides or gradients differ"
    lines = {node.meta["stack_trace"] for node in graph.nodes if "softmax" in str(node.target)}
    assert len(lines) == 1 and "torch.softmax(row @ w, -1)" in lines.pop()


def test_equal_steps_are_traced_once(monkeypatch):
    def loop(x, w, b):
        out = torch.zeros(3, 4)
        for t in range(3):
            out[t, 1:] = x[t, t : t + 1] * b[1:]
        return out

    (module, inputs), traced = captured(loop), []
    keep = repeats.Repeats.note
    monkeypatch.setattr(repeats.Repeats, "note", lambda *given: traced.append(1) or keep(*given))
    normalize(module, inputs)
    assert len(traced) <= 5, "the calls of the first of three steps"


def test_functions_of_the_users_are_traced_each_time():
    state = {"calls": 0}

    @torch._dynamo.allow_in_graph
    def stateful(x):
        state["calls"] += 1
        return x * 2

    module, inputs = captured(lambda x, w, b: stateful(stateful(x)))
    state["calls"] = 0
    normalize(module, inputs)
    assert state["calls"] == 2


def test_a_trace_has_the_key_of_a_cache():
    module, inputs = captured(layers)
    code = normalize(module, inputs).graph.python_code("self")
    assert not any(isinstance(held, str) for held in code.globals.values()), "AOTAutograd imports each by its name"
