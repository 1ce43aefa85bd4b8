"""Make docs/compatibility.md, and docs/compatibility-in-training.md, from records of the survey.

    python -m tests.models.compatibility rows.jsonl... [--before earlier.jsonl] > docs/compatibility.md
    python -m tests.models.compatibility --gradients rows.jsonl... [--orders orders.jsonl]
        > docs/compatibility-in-training.md

Of an architecture that was tried more than once the last row counts. `--keep FILE` writes the rows that the page was
made of, without what is empty and without paths of the machine. `--before FILE` has such rows of another time, to
compare with.
"""

import argparse
import dataclasses
import datetime
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.models.survey import Row, recorded

_CAUSES = (
    ("needs a package or a file that is not installed here", r"ImportError|ModuleNotFound|OSError|LocalEntryNotFound"),
    ("too large, or too slow to build or to compile, for this survey", r"TimedOut|MemoryError"),
    ("two runs in eager mode differ: it draws random numbers or keeps state", r"draws random numbers"),
    ("no finite number in eager mode's result", r"no finite number"),
    ("asks for arguments that no rule of the survey makes", r"missing \d+ required|no kind of inputs"),
    ("does not run in float64, with which results are compared", r"no float64 reference"),
)
_OTHER_CAUSE = "the survey's small configuration or its inputs do not fit"

_INTRODUCTION = """# Compatibility

What `torch.compile(model, backend="fusion")` makes of architectures as their packages ship them. Each is built small,
with random weights, and runs three times: in eager mode, in float64 and compiled. Its results must be as exact as eager
mode's (at most twice eager's error against float64, and NaN and infinities where eager has them). A **site** is one
attention in the model: a softmax, or a fused call, between two matrix products. Sites are counted independently, by a
program that knows nothing of the compiler's passes, and we take the larger of that count and the compiler's own, which
also has attention without a softmax. A site that is not fused runs as PyTorch runs it.

A model's name stands for the smallest version that the survey's rules make of it; other versions may have other sites.
Of transformers, diffusers and timm all architectures were tried, of vit-pytorch and x-transformers those listed here.
(timm and vit-pytorch with bare names in the place of torchvision, which they import and these models do not call.) The
first table has the versions. "Before" is commit `16a3626`, of 2026-11-22 and torch 2.13, whose rows are in its
`tests/models/compatibility.jsonl`.
"""

_OF_GRADIENTS = """# Compatibility in training

Gradients of every parameter of architectures of transformers under `torch.compile(model, backend="fusion")`. Models,
inputs and sites are those of [compatibility.md](compatibility.md). They are in eval mode, so that nothing is dropped at
random. The loss is the distance of all outputs from random ones. It and the gradients of all parameters must be as
exact as eager mode's (at most twice eager's error against float64), over three batches of inputs, or twelve where that
does not hold for three.
"""

_IN_OTHER_ORDERS = """
Errors as shares of what the rule allows: of the compiled model, and of eager mode itself where matrix products sum in
another order (`python -m tests.models.reordered rows.jsonl --record orders.jsonl`, eight random orders). Where orders
of eager mode are above 1 as well, the model magnifies roundings, and eager's own order was a lucky one. Architectures
without a row were not run in other orders.
"""

_IN_WORDS = {
    "big_bird": "on short inputs, for which it computes full attention; of its sparse pattern on 16 blocks 4 of 8: the "
    "softmax of the middle blocks has other blocks as further columns",
    "cpmant": "the mask is applied before and after the softmax, and a bias may be -inf where the mask is not: rows of "
    "nothing but -inf are 0 or NaN by the bias",
    "lilt": "scores of the text and of the layout are added",
    "longformer": "weights of a window are padded and read diagonally before the product with V",
    "luke": "",
    "nystromformer": "",
    "pegasus_x": "not the local attention, whose softmax has the global tokens as further columns",
    "t5": "also with `output_attentions=True`",
}
"""Architectures that were asked for, and what the table of reasons does not say of them."""

_VALIDATED = """## Fused sites that were not validated

Every other fused site was compared, while it was compiled, with the model's own operations on made-up values
([validation.md](validation.md)).
"""


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row per architecture, the last, without paths of the machine; by package and name."""
    found = {(row.package, row.name): row for row in rows}
    return [_without_paths(found[key]) for key in sorted(found)]


def _without_paths(row: Row) -> Row:
    unfused, unvalidated = ([(_reason(r), _place(p)) for r, p in told] for told in (row.unfused, row.unvalidated))
    error = re.sub(r"(/[\w.-]+)+/", "", row.error)[:160]
    told = {"unfused": unfused, "unvalidated": unvalidated}
    return dataclasses.replace(row, error=error, entropy=round(row.entropy, 3), seconds=0.0, **told)


def _reason(reason: str) -> str:
    """A refusal without the operands' names and places, so that equal ones are counted together."""
    reason = reason.split("\n")[0]
    reason = re.sub(r", at \S+:\d+ in .*?\)$|, at /.*\)$", ")", reason, flags=re.S)
    reason = re.sub(r": t\d+\[.*\]$", "", reason)
    reason = re.sub(r"-?\d+\.\d+e?[-+]?\d*|nan(?= where)|(?<=has )nan", "...", reason)
    return re.sub(r"\((?!by |they )\w+ stays in use\)", "(they stay in use)", re.sub(r"\b\d\d+\b", "n", reason))


def _place(place: str) -> str:
    found = re.search(r"[\w.-]+\.py:\d+", place)
    return found[0] if found else ""


def compact(row: Row) -> str:
    """A line of JSON with what differs from the defaults."""
    empty = dataclasses.asdict(Row(name=""))
    return json.dumps({k: v for k, v in dataclasses.asdict(row).items() if v == v and v != empty[k]})


def is_beyond(row: Row) -> bool:
    """Whether the compiled model's error is more than the rule allows."""
    return row.compiled and row.error.startswith("Mismatch")


def ran(row: Row) -> bool:
    """Whether a comparison was made: in eager mode, in float64 and compiled."""
    return row.compiled and (not row.error or is_beyond(row))


def sites(row: Row) -> int:
    """By the larger of two counts: the independent one, and the compiler's own, which also has normalisations that are
    no attention."""
    return max(row.total, row.fused + len(row.unfused))


def _table(head: str, rows: Iterable[Iterable[object]]) -> list[str]:
    names = [name.strip() for name in head.split("|")]
    rule = [
        "---" if index == 0 or name in ("why", "where", "for example") else "---:" for index, name in enumerate(names)
    ]
    cells = [names, rule, *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in cells] + [""]


def _summary(rows: list[Row]) -> list[str]:
    def line(name: str, of: list[Row]) -> list[object]:
        done = [row for row in of if ran(row)]
        total, fused = sum(map(sites, done)), sum(row.fused for row in done)
        share = f"{fused / total:.1%}" if total else ""
        beyond = sum(map(is_beyond, done))
        return [name, len(of), len(done), sum(sites(row) > 0 for row in done), total, fused, share, beyond]

    packages = sorted({row.package for row in rows})
    lines = [line(_with_versions(name, rows), [row for row in rows if row.package == name]) for name in packages]
    head = "package | tried | compared | with attention | sites | fused | share | beyond the rule"
    return _table(head, [*lines, line("all", rows)])


def _before(rows: list[Row], earlier: list[Row]) -> list[str]:
    """Shares then and now, of the architectures that were compared both times."""
    then = {(row.package, row.name): row for row in earlier if ran(row)}
    both = [(then[row.package, row.name], row) for row in rows if ran(row) and (row.package, row.name) in then]

    def line(name: str, of: list[tuple[Row, Row]]) -> list[object]:
        total = sum(max(map(sites, pair)) for pair in of)
        shares = (f"{sum(pair[k].fused for pair in of) / max(1, total):.1%}" for k in (0, 1))
        return [name, len(of), total, *shares]

    packages = sorted({row.package for _, row in both})
    lines = [line(name, [pair for pair in both if pair[1].package == name]) for name in packages]
    return _table("package | compared both times | sites | fused before | fused now", [*lines, line("all", both)])


def _with_versions(package: str, rows: list[Row]) -> str:
    return " ".join(
        [package, "; ".join(sorted({row.versions for row in rows if row.package == package} - {""}))]
    ).strip()


def _reasons(rows: list[Row], told: Callable[[Row], Iterable[tuple[str, str]]]) -> list[str]:
    """Reasons, with how often they were given; "None." where none was."""
    names, count, places = defaultdict(list), Counter(), {}
    for row in filter(ran, rows):
        for reason, place in told(row):
            count[reason] += 1
            names[reason].append(row.name)
            places[reason] = places.get(reason) or place
    lines = [
        [
            reason,
            number,
            len(set(names[reason])),
            f"{', '.join(list(dict.fromkeys(names[reason]))[:4])} (`{places[reason]}`)",
        ]
        for reason, number in count.most_common()
    ]
    return _table("why | sites | architectures | for example", lines) if lines else ["None.", ""]


def _in_words(rows: list[Row]) -> list[str]:
    """Table of the architectures of `_IN_WORDS`; nothing where none of them was compared."""
    of = [row for row in rows if row.package == "transformers" and row.name in _IN_WORDS and ran(row)]
    lines = [[row.name, sites(row), row.fused, _IN_WORDS[row.name]] for row in of]
    return ["In words:", "", *_table("architecture | sites | fused | why", lines)] if lines else []


def _listed(title: str, rows: list[Row], show: Callable[[Row], str]) -> list[str]:
    return [f"**{title}** ({len(rows)}): {', '.join(map(show, rows))}.", ""] if rows else []


def _package(package: str, rows: list[Row]) -> list[str]:
    done = [row for row in rows if ran(row) and not is_beyond(row)]
    some = [row for row in done if row.fused < sites(row)]
    lines = [f"### {package}", ""]
    if some:
        cells = [[row.name, sites(row), row.fused, "; ".join(dict.fromkeys(r for r, _ in row.unfused))] for row in some]
        lines += _table("not all fused | sites | fused | why", cells)
    whole = [row for row in done if sites(row) and row.fused >= sites(row)]
    lines += _listed("Every site fused, with how many there are", whole, lambda row: f"{row.name} {sites(row)}")
    bare = [row for row in done if not sites(row)]
    return lines + _listed("No attention found, results as exact as eager mode's", bare, lambda row: row.name)


def cause(row: Row) -> str:
    """In a few words, why an architecture was not compared."""
    return next((words for words, pattern in _CAUSES if re.search(pattern, row.error)), _OTHER_CAUSE)


def _not_run(rows: list[Row]) -> list[str]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.compiled:
            groups[cause(row)].append(row)
    lines = []
    for words, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        by_package = defaultdict(list)
        for row in members:
            by_package[row.package].append(row.name)
        lines += [f"- **{words}** ({len(members)})"]
        lines += [f"    - {package}: {', '.join(names)}" for package, names in by_package.items()]
    return [*lines, ""]


def _in_other_orders(orders: Path | None) -> list[str]:
    """Shares that `tests.models.reordered` recorded."""
    if orders is None:
        return []
    records = sorted(map(json.loads, orders.read_text().splitlines()), key=lambda each: -each["compiled"])
    lines = [
        [each["name"], each["compiled"], max(each["orders"]), sum(share > 1 for share in each["orders"])]
        for each in records
    ]
    head = "architecture | compiled | eager mode, the worst order | orders above 1"
    return [_IN_OTHER_ORDERS, *_table(head, lines)]


def _troubles(rows: list[Row], orders: Path | None) -> list[str]:
    beyond = [row for row in rows if is_beyond(row)]
    failed = [row for row in rows if row.compiled and row.error and not is_beyond(row)]
    lines = ["## Results beyond the rule", "", "" if beyond else "None.", ""]
    lines += [f"- {row.package} {row.name}: {row.error.removeprefix('Mismatch: ')}" for row in beyond]
    lines += _in_other_orders(orders)
    if failed:
        lines += ["", "## Ran in eager mode, not compared", "", "Where torch traces no graph, or time ran out.", ""]
        lines += [f"- {row.package} {row.name}: {row.error.split('  ')[0]}" for row in failed]
    return [*lines, ""]


def page(
    rows: list[Row],
    made: str,
    earlier: Sequence[Row] = (),
    introduction: str = _INTRODUCTION,
    orders: Path | None = None,
) -> str:
    """The page, of rows as `latest` gives them. made: when, of what and how. earlier: rows to compare with.
    introduction: the quantities that were compared. orders: a record of `tests.models.reordered`."""
    packages = sorted({row.package for row in rows})
    listed = [line for name in packages for line in _package(name, [row for row in rows if row.package == name])]
    parts = [introduction, made, "", *_summary(rows)]
    parts += _before(rows, [*earlier]) if earlier else []
    parts += _troubles(rows, orders)
    parts += ["## Why sites are not fused", "", *_reasons(rows, lambda row: row.unfused)]
    parts += _in_words(rows)
    parts += [_VALIDATED, *_reasons(rows, lambda row: row.unvalidated)]
    parts += ["## Architectures", "", *listed, "## Not tried in full", "", *_not_run(rows)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _made(rows: list[Row], gradients: bool) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    names = " ".join(sorted({row.package for row in rows}))
    command = "rows.jsonl --before earlier.jsonl > docs/compatibility.md"
    if gradients:
        command = "--gradients rows.jsonl --orders orders.jsonl > docs/compatibility-in-training.md"
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return (
        f"{date}, float32 on a CPU, batch of two, the rest of each graph in plain torch, commits up to `{commit}`:\n\n"
        f"    python -m tests.models.survey --backend fusion{' --gradients' * gradients} --packages {names} "
        f"--record rows.jsonl\n    python -m tests.models.compatibility {command}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, help="files of the survey's --record")
    parser.add_argument("--keep", type=Path, help="write the rows that count to this file")
    parser.add_argument("--before", type=Path, help="rows of another time, to compare with")
    parser.add_argument("--gradients", action="store_true", help="rows are those of the survey with that option")
    parser.add_argument("--orders", type=Path, help="record of tests.models.reordered, of rows beyond the rule")
    arguments = parser.parse_args(argv)
    rows = latest(row for record in arguments.records for row in recorded(record))
    earlier = latest(recorded(arguments.before)) if arguments.before else []
    if arguments.keep:
        arguments.keep.write_text("".join(compact(row) + "\n" for row in rows))
    introduction = _OF_GRADIENTS if arguments.gradients else _INTRODUCTION
    sys.stdout.write(page(rows, _made(rows, arguments.gradients), earlier, introduction, arguments.orders))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
