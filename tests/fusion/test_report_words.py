"""The words of a report: expressions as people write them, tensors under the user's names, one sentence on the cost."""

import importlib
import math
import re
import sys

import pytest
import torch

import fusion
from fusion.ir import integers
from fusion.ir.expr import SCORE, I, J, const, contains, operation, substitute
from fusion.ir.ops import where
from fusion.ir.printing import ARGUMENTS, COMPOSITIONS, to_text
from fusion.passes.pullback.casts import Call
from fusion.passes.pullback.pointwise import BUILDERS
from fusion.planning import pays
from fusion.planning.schedules import SCHEDULES
from fusion.report.data import kernel_summary
from fusion.torch_private.tracing import short_path

ALWAYS = {"tile_maps": "always"}
X = SCORE / 8
CLAMPED = where(
    operation("and", operation("not", operation("flt", X, const(-5.0))), operation("flt", const(5.0), X)),
    const(5.0),
    where(operation("flt", X, const(-5.0)), const(-5.0), X),
)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (integers.sub(J, I), "j - i"),
        (integers.add(integers.sub(I, J), 5), "i - j + 5"),
        (integers.neg(I), "-i"),
        (CLAMPED, "clamp(s / 8, -5, 5)"),
        (where(operation("flt", X, const(0.0)), const(0.0), X), "max(s / 8, 0)"),
        (where(operation("flt", const(4.0), X), const(4.0), X), "min(s / 8, 4)"),
        (
            where(operation("flt", X, const(0.0)), -X, where(operation("ilt", I, J), SCORE, const(2.0))),
            "{-(s / 8) if s / 8 < 0; s if i < j; 2 otherwise}",
        ),
        (where(operation("ile", J, I), SCORE, const(-math.inf)), "s if j ≤ i else -inf"),
        (operation("fadd", X, -SCORE), "s / 8 - s"),
        (SCORE - (X - SCORE), "s - (s / 8 - s)"),
        ((X + 1) * 2, "(s / 8 + 1) * 2"),
        (operation("pow", SCORE + 1, const(2.0)), "(s + 1) ^ 2"),
        (operation("detach_nan", X), "s / 8"),
    ],
)
def test_expressions(expr, text):
    assert to_text(expr) == text


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_functions_that_are_compositions_are_printed_as_calls(name):
    arguments = (X, SCORE + 1)[: sum(contains(COMPOSITIONS[name](), each) for each in ARGUMENTS)]
    value = BUILDERS[getattr(torch.ops.aten, name)](Call(args=arguments, kwargs={}, dtype=torch.float32))
    whole = where(operation("ile", J, I), operation("fmul", value, SCORE), const(-math.inf))
    assert to_text(whole) == f"{name}({', '.join(map(to_text, arguments))}) * s if j ≤ i else -inf"


def test_a_form_with_another_constant_or_of_two_arguments_is_no_call():
    form = BUILDERS[torch.ops.aten.erfc](Call(args=(X,), kwargs={}, dtype=torch.float32))
    other = substitute(form, {const(1.0): const(0.25)})
    mixed = operation("fmul", X, operation("sigmoid", SCORE))
    assert form is not other and "erfc" not in to_text(other) and to_text(mixed) == "s / 8 * sigmoid(s)"


def short(records_gradients: bool, **options: str) -> fusion.Report:
    """A layer whose parameters require gradients, over few keys."""
    model, x = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(2, 16, 16)
    with torch.set_grad_enabled(records_gradients):
        return fusion.explain(model, x, options=options)


def test_a_report_says_that_gradients_were_recorded_and_how_not_to(monkeypatch):
    """Code that only infers forgets `torch.no_grad()`, and its attention is planned for training."""
    monkeypatch.setattr(pays, "TRAINING", dict.fromkeys(pays.TRAINING, (20, 40)))
    report = short(records_gradients=True)
    assert [site.fused for site in report.sites] == [False]
    notes = [line for line in str(report).splitlines() if line.startswith("  note: this call records gradients")]
    assert notes and "torch.no_grad()" in notes[0] and "torch.no_grad()" in str(report.sites[0].advice)
    assert "this call records gradients" in report._repr_html_()
    assert notes[0].removeprefix("  note: ") in report.data["notes"] and "1 note;" in repr(report)


def test_reports_of_inference_say_nothing_of_gradients():
    for report in (short(records_gradients=False), short(records_gradients=True, training="never")):
        assert report.fused == len(report.sites) == 1 and "records gradients" not in str(report)


LIBRARY = """
import torch

def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v
"""
MODELING = """
import torch
from library_of_attention import attend

class Layer(torch.nn.Module):
    def forward(self, x):
        return attend(x, x, x)

class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])

    def generate(self, *args):
        return self.layers[0](*args)

def generates(*args):
    return args[0].generate(args[1])
"""


def test_a_function_that_models_share_is_named_with_its_caller(tmp_path, monkeypatch):
    """As in transformers, whose models all call one file; and their `generate` compiles a function of `*args`."""
    (tmp_path / "library_of_attention.py").write_text(LIBRARY)
    (tmp_path / "modeling_of_it.py").write_text(MODELING)
    monkeypatch.syspath_prepend(str(tmp_path))
    modeling = importlib.import_module("modeling_of_it")
    report = fusion.explain(modeling.generates, modeling.Decoder(), torch.randn(1, 2, 9, 16))
    (site,) = report.sites
    assert site.module == "layers.0"
    assert site.location.endswith("library_of_attention.py:5 in attend: return torch.softmax(q @ k.mT / 4, -1) @ v")
    called = "    from     modeling_of_it.py:7 in forward: return attend(x, x, x)"
    assert called in str(report) and "Called from" in report._repr_html_()
    page = re.sub("<[^>]+>", "", report.to_html(tmp_path / "page.html").read_text())
    assert str(tmp_path) not in page + str(report) and "class Layer(torch.nn.Module)" in page
    own = fusion.explain(Model(), *torch.randn(3, 1, 2, 40, 16), torch.ones(1, 40, dtype=torch.bool))
    assert own.sites[0].calling is None and "    from " not in str(own)


def test_paths_are_short_where_they_lead_to_the_same_file(tmp_path, monkeypatch):
    here, other, installed = (tmp_path / name for name in ("here", "other", "here/lib/site-packages"))
    for folder in (here, other, installed / "package", here / "below"):
        folder.mkdir(parents=True)
        (folder / "model.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here / "below"), str(other), str(installed)])
    assert short_path(str(here / "model.py")) == "model.py"
    assert short_path(str(here / "below/model.py")) == "below/model.py"
    assert short_path(str(other / "model.py")) == str(other / "model.py")  # another model.py is nearer
    assert short_path(str(installed / "package/model.py")) == "package/model.py"
    assert short_path("<stdin>") == "<stdin>" and short_path(str(tmp_path / "gone.py")) == str(tmp_path / "gone.py")


def test_code_that_is_in_no_file_has_a_line_without_text(tmp_path):
    space: dict = {"torch": torch}
    exec(compile(LIBRARY, "<stdin>", "exec"), space)
    report = fusion.explain(space["attend"], *torch.randn(3, 1, 2, 9, 16))
    assert report.sites[0].location == "<stdin>:5 in attend"
    assert "&lt;stdin&gt;:5 in attend" in report.to_html(tmp_path / "page.html").read_text()


MLIR = """
func.func @attention() {
  scf.for %i = %c0 to %n step %c1 : i64 {
    %a = llvm.load %p : !llvm.ptr -> f32
    %r = scf.for %k = %c0 to %d step %c1 iter_args(%t = %zero) -> (vector<16xf32>) : i64 {
      %b = llvm.load %q : !llvm.ptr -> vector<16xf32>
      %x = math.fma %a, %b, %t : vector<16xf32>
      %y = math.fma %a, %b, %x : vector<16xf32>
      scf.yield %y : vector<16xf32>
    }
    scf.for %k = %c0 to %d step %c1 : i64 {
      llvm.store %r, %q : vector<16xf32>, !llvm.ptr
    }
  }
}"""
TRITON = """
def kernel(q, k):
    for first in tl.range(0, n, KEYS):
        s = tl.dot(q, tl.load(k + first))
    tl.store(k, s)
"""


def test_the_summary_of_a_kernel_counts_its_inner_loop():
    assert kernel_summary(MLIR) == ("3 loops, up to 2 deep; in the one of products at line 5: 2 multiply-adds, 1 load")
    assert kernel_summary(TRITON) == ("1 loop, up to 1 deep; in the one of products at line 3: 1 tile product, 1 load")
    assert kernel_summary("") == ""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(2, 1, 1))
        self.register_buffer("w", torch.ones(40, 40, dtype=torch.bool).tril())
        self.tables = torch.nn.ParameterList([torch.rand(2, 40)])
        self.position = torch.nn.Embedding(80, 2)

    def forward(this, q, k, v, padding):
        i = torch.arange(40)
        relative = this.position(i[None] - i[:, None] + 40).permute(2, 0, 1)
        x = q @ k.mT + this.slopes * (i[None] - i[:, None]) + relative + this.tables[0][:, None]
        return torch.softmax(x.masked_fill(~(this.w & padding[:, None, None]), -1e9), -1) @ v


def test_tensors_have_the_users_names():
    padding = torch.rand(1, 40) > 0.3
    with torch.no_grad():
        (site,) = fusion.explain(Model(), *torch.randn(3, 1, 2, 40, 16), padding).sites
    (attention,) = site.attentions
    program = attention.spec.formula(attention.names)
    assert "slopes[b1, 0, 0] * float(j - i)" in program and "padding[b0, j]" in program and "tables_0[b1, j]" in program
    assert "this.w[i, j]" in program and "embedding[i, j, b1]" in program  # w is the weight in formulas
    lines = {line.partition(":")[0]: line for line in attention.operands}
    assert lines["padding"] == "padding: bool[1, 40]"
    assert lines["slopes"] == "slopes: float32[2, 1, 1], this.slopes"
    assert lines["tables_0"] == "tables_0: float32[2, 40], this.tables.0"
    assert lines["this.w"] == "this.w: bool[40, 40]"
    (made,) = [line for line in attention.operands if "that the graph makes" in line]
    assert "12.8 kB" in made and "relative = this.position" in made
    assert {*attention.values} == {n for n, o in enumerate(attention.spec.operands) if o.dtype == "bool"}
    assert any(torch.equal(value, padding) for value in attention.values.values())


def test_a_map_of_tiles_is_no_line_of_the_users():
    def attend(q, k, v, mask):
        return torch.softmax((q @ k.mT).masked_fill(~mask, -1e9), -1) @ v

    report = fusion.explain(attend, *torch.randn(3, 1, 2, 40, 16), torch.rand(40, 40) > 0.3, options=ALWAYS)
    (text,) = [line for line in report.sites[0].attentions[0].operands if line.startswith("tiles")]
    assert text == "tiles: int32[3, 2, 2], 48 B, the map of tiles that every call makes of the mask"


def test_nothing_was_checked_where_nothing_was_replaced():
    def attend(q):
        return torch.softmax(q @ q.mT, -1) @ q

    report = fusion.explain(attend, torch.randn(1, 2, 40, 16, dtype=torch.float64))
    assert not report.fused and "checked" not in str(report) and report.data["sites"][0]["validated"] is None
    assert "checked  values" in str(fusion.explain(attend, torch.randn(1, 2, 40, 16)))
    by_reference = {"emitter": "reference"}  # which takes float64, too
    assert "float64" in str(
        fusion.explain(attend, torch.randn(1, 2, 40, 16, dtype=torch.float64), options=by_reference)
    )


class Differential(torch.nn.Module):
    """Attention with a factor made of parameters, as differential attention has it, and parameters of one letter."""

    def __init__(self):
        super().__init__()
        self.p, self.u = torch.nn.Parameter(torch.rand(2)), torch.nn.Parameter(torch.rand(4))

    def forward(self, q, k, v):
        factor = self.u.square().sum() + 0.8
        return torch.softmax(q @ k.mT, -1) * factor * torch.nn.functional.softplus(self.p)[:, None, None] @ v


def test_what_the_graph_makes_is_named_after_the_operation_and_one_letter_by_its_path():
    inputs = torch.randn(3, 1, 2, 40, 16)
    with torch.no_grad():
        (attention,) = fusion.explain(Differential(), *inputs).sites[0].attentions
    program = attention.spec.formula(attention.names)
    assert "softplus(self.p[b1])" in program and "sum[]" in program and "bias" not in program
    verified = fusion.verify(Differential(), *inputs, gradients=True, options={"inner": "eager"})
    titles = [*verified.sites[0].outcome.errors]
    assert "gradient of self.p" in titles, titles
    assert any(title.startswith("gradient of sum") and "factor = self.u" in title for title in titles), titles


class Sinks(torch.nn.Module):
    """Sinks and a bias, whose names a kernel's text has none of, and a sum that the graph numbers."""

    def __init__(self):
        super().__init__()
        self.sinks, self.s = torch.nn.Parameter(torch.rand(2)), torch.nn.Parameter(torch.rand(2, 1, 1))

    def forward(self, q, k, v):
        scores = torch.cat([q @ k.mT + self.s, self.sinks[:, None, None].expand(1, 2, 40, 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] * self.s.square().sum() @ v


def test_a_tensor_has_one_name_in_all_views():
    with torch.no_grad():
        report = fusion.explain(Sinks(), *torch.randn(3, 1, 2, 40, 16))
    (site,) = report.sites
    names = [*site.attentions[0].names.values()][3:]
    assert sorted(names) == ["self.s", "sinks", "sum"]
    for shown in (site.before, site.after):
        boxes = {box.name for box in shown.nodes}
        assert {*names} <= boxes and not any(name.startswith("sum_") for name in boxes)
        assert {parent for box in shown.nodes for parent in box.parents} <= boxes
    assert all(f"// {name}: float32" in site.source for name in names)
    own = dict(zip(names, [*site.spec.names.values()][3:], strict=True))
    assert (
        f"# {own['self.s']} is self.s, " in site.on("h200").text and f"{own['sinks']} is sinks" in site.on("h200").text
    )


def test_the_share_of_tiles_has_a_letter_of_its_own():
    """`s` is the score in programs."""
    assert not any(re.search(r"\bs\b", item.io + item.footprint) for item in SCHEDULES.values())


def pairs(table):
    def attend(q, k, v):
        return torch.softmax(q @ k.mT + table(torch.arange(40)[:, None] - torch.arange(40)), -1) @ v

    return fusion.explain(attend, *torch.randn(3, 1, 2, 40, 16))


def test_a_table_of_pairs_is_said_to_grow_with_the_square():
    made = pairs(lambda d: d.float().cumsum(-1))
    assert "6.4 kB that the graph makes" in str(made) and "grows with the square of the length" in str(made)
    assert "I/O counts it as an" in str(made)
    read = pairs(lambda d: torch.linspace(0, 1, 79)[d + 39])
    assert read.fused == 1 and "grows with the square" not in str(read)


def test_one_sentence_says_what_limits_a_site():
    def difference(q, k, v):
        return (torch.softmax(q @ k.mT, -1) - 0.3 * torch.softmax(q @ k.mT / 2, -1)) @ v

    report = fusion.explain(difference, *torch.randn(3, 1, 2, 600, 32))
    (site,) = report.data["sites"]
    assert site["verdict"].startswith("limited by ") and "of the predicted time" in site["verdict"]
    assert [a["part"] for a in site["attentions"]] == [f"{k} of 2 attentions, whose results are added" for k in (1, 2)]
    assert "verdict  limited by " in str(report) and "part     2 of 2" in str(report)


def test_explain_takes_options():
    report = fusion.explain(
        lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *torch.randn(3, 1, 2, 9, 4), options={"emitter": "reference"}
    )
    assert report.fused == 1 and report.sites[0].source is None and report.options == {"emitter": "reference"}
    with pytest.raises(fusion.FusionError, match="Did you mean 'emitter'"):
        fusion.explain(torch.relu, torch.randn(3), options={"emiter": "reference"})


def test_gradients_and_scripts_have_the_users_names():
    padding = torch.rand(1, 40) > 0.3
    found = fusion.verify(Model(), *torch.randn(3, 1, 2, 40, 16), padding, gradients=True, options={"inner": "eager"})
    (site,) = found.sites
    assert found.right and {"gradient of this.slopes", "gradient of v"} <= {*site.outcome.errors}, str(found)
    text = site.script()
    signature = next(line for line in text.splitlines() if line.startswith("def attention("))
    assert "padding" in signature and "slopes" in signature and "arg" not in signature


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])

    def forward(net, x):
        return net.layers[0](x)


class Layer(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


def test_the_path_of_a_module_begins_with_what_the_user_calls_it():
    (site,) = fusion.explain(Layers(), torch.randn(1, 2, 9, 4)).sites
    assert site.module == "net.layers.0"
    (site,) = fusion.explain(torch.nn.Sequential(Layer()), torch.randn(1, 2, 9, 4)).sites
    assert site.module == "0"


@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_verify_says_where_eager_itself_is_too_far_from_float64_to_judge(shift):
    """1e8 + s keeps none of the differences of scores in float32, and all of them in float64."""

    def attend(q, k, v):
        return torch.relu(torch.tanh(q @ k.mT + shift - shift)) @ v

    torch.manual_seed(0)
    verified = fusion.verify(attend, *torch.randn(3, 1, 2, 40, 16), options={"inner": "eager"})
    outcome = verified.sites[0].outcome
    assert verified.right and outcome.judged == (not shift), str(verified)
    assert ("cannot be judged" in str(verified)) == ("0 of 1 fused attentions right" in str(verified)) == bool(shift)


@pytest.mark.parametrize("records_gradients", [False, True])
@pytest.mark.parametrize("weights", [lambda s: (1 + s.clamp(min=0)) ** -1.5, lambda s: s.square() * s.sigmoid()])
def test_the_advice_on_weights_divided_by_their_sum_is_fused(weights, records_gradients):
    def divided(q, k, v, behind):
        w = weights(q @ k.mT / 4)
        total = w.abs().sum(-1, keepdim=True) + 1e-6
        return (w @ v) / total if behind else (w / total) @ v

    inputs = torch.randn(3, 1, 2, 40, 16).requires_grad_(records_gradients)
    refused, fused = (
        fusion.explain(divided, *inputs, behind, options={"training": "always"}) for behind in (False, True)
    )
    assert not refused.fused and "(w @ v) / w.sum(-1, keepdim=True)" in refused.sites[0].advice
    assert fused.fused == 1, fused


def test_a_plan_on_another_machine_is_printed_in_one_screen():
    (site,) = fusion.explain(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *torch.randn(3, 1, 2, 64, 32)).sites
    plan, text = result = site.on("h200")
    assert len(str(result).splitlines()) < 40 and "Expr(" not in str(result)
    assert plan.explain() in str(result) and text.splitlines()[0] in str(result) and result.text == text


@pytest.mark.parametrize("machine", ["h200", "a100", "4090", "mi300x"])
def test_the_text_for_a_gpu_begins_with_what_its_kernels_need(machine):
    (site,) = fusion.explain(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *torch.randn(3, 1, 2, 64, 32)).sites
    head = site.on(machine).text.splitlines()[0]
    assert re.match(r"# attention_\w+: [1-9]\d* registers, \d+ bytes spilled, [1-9]\d* bytes of shared memory", head)


def test_a_kernels_text_begins_with_the_formula_and_its_tensors():
    padding = torch.rand(1, 40) > 0.3
    with torch.no_grad():
        (site,) = fusion.explain(Model(), *torch.randn(3, 1, 2, 40, 16), padding).sites
    head = [line for line in site.source.splitlines()[:20] if line.startswith("// ")]
    assert head[0].startswith("// out = softmax(") and "// slopes: float32[2, 1, 1], this.slopes" in head
