"""The page of architectures says what the survey's rows say."""

import dataclasses
import json

import torch

from tests.models.compatibility import cause, compact, latest, main, page
from tests.models.reordered import Orders, Reordered
from tests.models.survey import Row

RETURNED = "the attention weights are needed elsewhere (by aten.topk.default, at /home/x/attend.py:12 in f: y = g(a))"
ROWS = [
    Row(name="bert", compiled=True, total=2, fused=1, share=0.5),
    Row(name="bert", compiled=True, total=2, fused=2, share=0.5),
    Row(name="net", package="timm", compiled=True, share=0.4),
    Row(
        name="cait", package="timm", compiled=True, fused=2, unfused=[(RETURNED, "/home/x/cait.py:179 in f: y = a @ v")]
    ),
    Row(name="off", compiled=True, total=3, fused=3, error="Mismatch: off.output: largest error 2 exceeds 1"),
    Row(name="slow", error="TimedOut: more than 20 s"),
    Row(name="odd", compiled=True, error="InternalTorchDynamoError: no  from user code: /home/x/y.py"),
]


def _cells(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_counts_are_those_of_the_rows() -> None:
    text = page(latest(ROWS), "made")
    assert _cells(text, "timm") == ["2", "2", "1", "3", "2", "66.7%", "0"]
    assert _cells(text, "all") == ["6", "4", "3", "8", "7", "87.5%", "1"]  # the last row of bert counts
    assert _cells(text, "cait") == ["3", "2", "the attention weights are needed elsewhere (by aten.topk.default)"]
    assert "bert 2." in text and "(1): net." in text
    assert "off.output: largest error 2 exceeds 1" in text
    assert "InternalTorchDynamoError: no\n" in text
    assert "(1)\n    - transformers: slow" in text


def test_reasons_are_counted_without_places_and_paths() -> None:
    again = Row(name="b", package="timm", compiled=True, unfused=[(RETURNED.replace("12", "99"), "")])
    text = page(latest([*ROWS, again]), "made")
    (line,) = [line for line in text.splitlines() if line.startswith("| the attention weights")]
    assert line == (
        "| the attention weights are needed elsewhere (by aten.topk.default) | 2 | 2 | b, cait (`cait.py:179`) |"
    )
    assert "/home" not in text


def test_kept_rows_make_the_same_page(tmp_path, capsys) -> None:
    record, kept = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    record.write_text("".join(compact(row) + "\n" for row in ROWS))
    main([str(record), "--keep", str(kept)])
    first = capsys.readouterr().out
    main([str(kept)])
    assert capsys.readouterr().out == first
    assert {"name": "bert", "compiled": True, "total": 2, "fused": 2, "share": 0.5} in [
        json.loads(line) for line in kept.read_text().splitlines()
    ]


def test_rows_of_gradients_make_a_page_of_their_own(tmp_path, capsys) -> None:
    record = tmp_path / "rows.jsonl"
    record.write_text("".join(compact(row) + "\n" for row in ROWS))
    main(["--gradients", str(record)])
    text = capsys.readouterr().out
    assert text.startswith("# Compatibility in training") and "survey --backend fusion --gradients" in text
    assert _cells(text, "all") == ["6", "4", "3", "8", "7", "87.5%", "1"]


def test_errors_of_other_orders_stand_beside_those_beyond_the_rule(tmp_path, capsys) -> None:
    record, orders = tmp_path / "rows.jsonl", tmp_path / "orders.jsonl"
    record.write_text("".join(compact(row) + "\n" for row in ROWS))
    shares = Orders(package="transformers", name="off", tensor="off.output", compiled=2.0, orders=[0.5, 3.8, 1.2])
    orders.write_text(json.dumps(dataclasses.asdict(shares)) + "\n")
    main(["--gradients", str(record), "--orders", str(orders)])
    assert _cells(capsys.readouterr().out, "off") == ["2.0", "3.8", "2"]


def test_products_in_another_order_are_those_of_the_same_matrices() -> None:
    factors = [torch.randn(size, dtype=torch.float64) for size in ((2, 5, 40), (2, 40, 3), (2, 5, 3))]
    for a, b, c in factors, [(8 * x).round() for x in factors]:  # sums of integers are exact in any order
        with Reordered(0):
            results = a @ b, torch.baddbmm(c, a, b), torch.addmm(c[0], a[0], b[0])
        for result, expected in zip(results, (a @ b, c + a @ b, c[0] + a[0] @ b[0]), strict=True):
            assert torch.equal(result, expected) == (a is not factors[0])


def test_shares_of_another_time_are_those_of_the_architectures_compared_both_times() -> None:
    earlier = [Row(name="bert", compiled=True, total=2, fused=1), Row(name="gone", compiled=True, total=9, fused=9)]
    lines = page(latest(ROWS), "made", earlier).splitlines()
    assert "| all | 1 | 2 | 50.0% | 100.0% |" in lines
    assert "None." in lines[lines.index("## Fused sites that were not validated") :]


def test_causes() -> None:
    assert "random" in cause(Row(name="", error="ArithmeticError: draws random numbers, or keeps state: ..."))
    assert "arguments" in cause(Row(name="", error="TypeError: f() missing 1 required positional argument: 'x'"))
    assert "do not fit" in cause(Row(name="", error="RuntimeError: shapes cannot be multiplied"))
