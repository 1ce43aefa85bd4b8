"""The page of a report: whole HTML, everything in it, small enough, nothing fetched."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import fusion
from fusion.ir import AttentionSpec
from fusion.refusals import Reason, Refusal
from fusion.report import drawings
from fusion.report.page import highlight, mlir, python, to_html
from tests.numerics import assert_same_in_float64

VOID = {"meta", "br", "hr", "img", "input", "link", "rect", "path"}


class Checker(HTMLParser):
    """Collects what a page consists of; fails on tags that do not nest."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag, **attributes):
        found = [attrs for name, attrs in self.seen if name == tag]
        return [a for a in found if all(a.get(k) == v for k, v in attributes.items())]

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.text))


def banded(q, k, v):
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
    s = torch.tanh(q @ k.mT / 20) * 20
    return torch.softmax(s.masked_fill((j > i) | (j <= i - 300), float("-inf")), -1) @ v


def two(q, k, v):
    w = torch.tanh(torch.softmax(q @ k.mT, -1))
    return banded(q, k, v) + w @ v


def inputs(n=1024):
    return [torch.randn(1, 2, n, 16) for _ in range(3)]


@pytest.fixture(scope="module")
def report():
    torch._dynamo.reset()
    with torch.no_grad():
        return fusion.explain(two, *inputs())


@pytest.fixture(scope="module")
def page(report):
    return Checker(to_html(report))


def test_nothing_is_fetched_and_nothing_runs(page):
    assert not page.all("script") and not page.all("link") and not page.all("img") and not page.all("iframe")
    assert not [a for _, attrs in page.seen for a in attrs if a in ("src", "srcset") or a.startswith("on")]
    assert all(str(a["href"]).startswith("#") for a in page.all("a"))


def test_every_site_is_a_row_that_opens(page, report):
    rows = page.all("details", **{"class": "site"})
    assert [row["id"] for row in rows] == ["site-0", "site-1"]
    assert "1 of 2" in page.words and "not fused" in page.words


def test_what_a_row_holds(page, report):
    site = report.sites[0]
    assert 'return torch.softmax(s.masked_fill((j > i) | (j <= i - 300), float("-inf")), -1) @ v' in page.words
    program = report.data["sites"][0]["attentions"][0]["program"]
    assert re.sub(r"\s+", " ", program) in page.words
    labels = [svg.get("aria-label") for svg in page.all("svg")]
    assert any("Mask of 1024 queries by 1024 keys" in str(label) for label in labels)
    assert any("Graph before the rewrite of attention 0" in str(label) for label in labels)
    assert any("Graph after the rewrite of attention 0" in str(label) for label in labels)
    assert any(str(label).startswith("elements moved: I/O") for label in labels)
    words = page.words.replace(",", "")
    assert site.plan.symbolic.replace(",", "") in words and site.plan.formula.replace(",", "") in words
    assert "limited by" in page.words and "values in " in page.words
    assert re.sub(r"\s+", " ", site.source.splitlines()[40]).strip() in page.words


def test_what_an_unfused_row_holds(page):
    assert "Stopped by aten.tanh.default" in page.words
    assert "w = torch.tanh(torch.softmax(q @ k.mT, -1))" in page.words
    assert "Apply it before the softmax" in page.words
    assert page.all("g", **{"class": "box blame"})


def test_light_and_dark_and_keyboard(page):
    style = "".join(page.text)
    assert "prefers-color-scheme:dark" in style and ":focus-visible" in style
    assert page.all("html", lang="en")
    scrolling = page.all("pre", **{"class": "kernel"})
    assert scrolling and all(a.get("tabindex") == "0" for a in scrolling)
    assert all(a.get("aria-label") or a.get("aria-hidden") for a in page.all("svg"))


def test_equal_layers_share_a_kernel_and_stay_small(tmp_path: Path):
    model = GPT2Model(GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=50, attn_implementation="eager")).eval()
    with torch.no_grad():
        report = fusion.explain(model, torch.randint(0, 50, (1, 64)), use_cache=False)
    assert report.fused == 4
    path = report.to_html(tmp_path / "report.html")
    assert path.stat().st_size < 2_000_000
    checked = Checker(path.read_text())
    assert len(checked.all("pre", **{"class": "kernel"})) == 1
    assert checked.words.count("the same as [0]") == 3


def test_kernels_beyond_the_budget_are_cut_and_say_so(report, monkeypatch):
    monkeypatch.setattr("fusion.report.page.KERNEL_BYTES", 1000)
    words = Checker(to_html(report)).words
    assert "report.sites[0].sources[0] has all" in words


def test_text_of_the_user_is_escaped(report, monkeypatch):
    refusal = Refusal(Reason.DEFECT, "<script>alert(1)</script> & co")
    monkeypatch.setattr(report.sites[1], "refusal", refusal)
    checked = Checker(to_html(report))
    assert not checked.all("script") and "<script>alert(1)</script> & co" in checked.words


# --- parts ------------------------------------------------------------------------------------------------------


def spec_of(function, *given) -> tuple[AttentionSpec, dict]:
    site = fusion.explain(function, *given).sites[0]
    assert site.spec is not None
    return site.spec, dict(site.sizes[0])


def brute_force(live: torch.Tensor, rows: int, columns: int) -> list[list[int]]:
    kinds = []
    for r in range(0, live.shape[0], rows):
        tiles = [live[r : r + rows, c : c + columns] for c in range(0, live.shape[1], columns)]
        kinds.append([2 if t.all() else 1 if t.any() else 0 for t in tiles])
    return kinds


@pytest.mark.parametrize("n", [100, 257, 1024])
def test_the_mask_map_is_that_of_the_mask(n):
    spec, sizes = spec_of(banded, *inputs(n))
    found = drawings.mask_map(spec, sizes, {})
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    assert [list(row) for row in found.cells] == brute_force((j <= i) & (j > i - 300), found.cell, found.cell)
    assert_same_in_float64(sum(found.shares.values()), 1)
    assert not found.sampled


def test_a_sampled_map_agrees_where_tiles_are_uniform(monkeypatch):
    spec, sizes = spec_of(banded, *inputs(1024))
    exact = drawings.mask_map(spec, sizes, {})
    monkeypatch.setattr(drawings, "MOST_SCORES", 1)
    sampled = drawings.mask_map(spec, sizes, {})
    assert sampled.sampled and sampled.cells == exact.cells


def test_what_data_decides_is_told_apart():
    def padded(q, k, v, keep):
        s = (q @ k.mT).masked_fill(~keep[:, None, None, :], float("-inf"))
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return torch.softmax(s.masked_fill(~causal, float("-inf")), -1) @ v

    keep = torch.rand(1, 256) > 0.2
    spec, sizes = spec_of(padded, *inputs(256), keep)
    found = drawings.mask_map(spec, sizes, {})
    for r, row in enumerate(found.cells):
        for c, kind in enumerate(row):
            assert kind == (drawings.DATA if c < r else drawings.DEAD if c > r else drawings.MIXED)


def test_the_mask_of_the_inputs_is_drawn():
    def packed(q, k, v, document):
        other = document[:, None, :, None] != document[:, None, None, :]
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return torch.softmax((q @ k.mT).masked_fill(other | ~causal, float("-inf")), -1) @ v

    document = torch.randint(0, 4, (1, 300)).sort().values
    report = fusion.explain(packed, *inputs(300), document)
    (attention,) = report.sites[0].attentions
    shown = drawings.mask_map(attention.spec, attention.sizes, attention.values)
    live = (document[0, :, None] == document[0]).tril()
    assert [list(row) for row in shown.cells] == brute_force(live, shown.cell, shown.cell)
    words = Checker(to_html(report)).words
    assert "The mask of these inputs." in words and "decided by data" not in words
    assert "Drawn for" not in words
    assert "document: int64[1, 300]" in words and "document: int64[1, 300]" in str(report)


@pytest.mark.parametrize("most", [1 << 24, 1 << 12])
def test_the_most_padded_element_is_drawn_and_named(monkeypatch, most):
    def padded(q, k, v, mask):
        return torch.softmax((q @ k.mT).masked_fill(~mask[:, None, None], float("-inf")), -1) @ v

    mask = torch.arange(96) < torch.tensor([96, 80, 33, 90])[:, None]
    report = fusion.explain(padded, *torch.randn(3, 4, 2, 96, 16), mask)
    monkeypatch.setattr(drawings, "MOST_SCORES", most)
    (attention,) = report.sites[0].attentions
    shown = drawings.mask_map(attention.spec, attention.sizes, attention.values)
    assert [list(row) for row in shown.cells] == brute_force(mask[2].expand(96, 96), shown.cell, shown.cell)
    about = "about " * (most < 4 * 96 * 96)
    words = Checker(to_html(report)).words
    assert f"Drawn for b0 = 2 (of 0 to 3), which has {about}the fewest live scores:" in words


def test_an_element_among_equals_is_named():
    def packed(q, k, v, document):
        return (
            torch.softmax((q @ k.mT).masked_fill(document[:, None, :, None] != document[:, None, None], -1e9), -1) @ v
        )

    report = fusion.explain(packed, *torch.randn(3, 2, 1, 40, 16), torch.arange(40).expand(2, 40) // 10)
    assert "Drawn for b0 = 0 (of 0 to 1):" in Checker(to_html(report)).words


def test_no_mask_no_map():
    spec, sizes = spec_of(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, *inputs(33))
    assert drawings.mask_map(spec, sizes, {}) is None


def test_highlighting_loses_no_text():
    code = "for x in range(3):  # a <comment>\n    print('&', x)\n"
    kernel = '// why\nfunc.func @f(%a: vector<16xf32>) {\n  %b = arith.addf %a, %a : vector<16xf32>\n  return "s"\n}\n'
    for text in (code, kernel, "def (", "x = '''never closed"):
        assert "".join(Checker(highlight(text)).text) == text
    assert "<i class=k>for</i>" in python(code) and "<i class=c># a &lt;comment&gt;</i>" in python(code)
    assert "<i class=k>arith.addf</i>" in mlir(kernel) and "<i class=t>vector&lt;16xf32&gt;</i>" in mlir(kernel)
