"""The wheel holds every package, and `fusion` alone at its top level; the lists kept by hand agree with the folders."""

import fnmatch
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("passes", "codegen")


def packages_in_folders() -> set[str]:
    """Dotted names of all folders with Python files under fusion/, passes/ and codegen/, as they are imported."""
    names = set()
    for top in ("fusion", *LINKED):
        for file in (ROOT / top).rglob("*.py"):
            parts = file.parent.relative_to(ROOT).parts
            if top == "fusion" and len(parts) > 1 and parts[1] in LINKED:
                continue  # Python before 3.13 follows the links here; the folders they lead to have their own turn
            names.add(".".join(parts if top == "fusion" else ("fusion", *parts)))
    return names


def test_packages_are_listed() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_in_folders()


def test_packages_have_init() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        parts = package.split(".")
        stem = ".".join(parts[:2])
        folder = Path(mapping.get(stem, "/".join(parts[:2])), *parts[2:])
        assert (ROOT / folder / "__init__.py").is_file(), f"{package} has no __init__.py in {folder}"


@pytest.mark.parametrize("name", LINKED)
def test_links(name: str) -> None:
    """A checkout without symbolic links (some archives) would import other files than the installed package."""
    assert (ROOT / "fusion" / name).resolve() == ROOT / name


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "importlib mode wants no __init__.py under tests/"


def test_wheel(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("fusion", *LINKED):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = set()
    for top in ("fusion", *LINKED):
        for file in (ROOT / top).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            if not (top == "fusion" and parts[1] in LINKED):
                expected.add("/".join(parts if top == "fusion" else ("fusion", *parts)))
    data = {name for name in names if not name.endswith(".py")}
    assert set(names) - data == expected
    listed = PROJECT["tool"]["setuptools"]["package-data"].items()
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, files in listed for pattern in files]
    assert all(data & set(fnmatch.filter(names, pattern)) for pattern in patterns)
    assert data == {str(file.relative_to(ROOT)) for pattern in patterns for file in ROOT.glob(pattern)}
    assert {name.split("/")[0] for name in names} == {"fusion"}


def test_entry_points_lead_somewhere() -> None:
    project = PROJECT["project"]
    targets = [*project["scripts"].values(), *project["entry-points"]["torch_dynamo_backends"].values()]
    for target in targets:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


def test_constraints_pin_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][^ @:/]*", line) for line in lines), "only `name==version` lines"
    pinned = {line.split("==")[0] for line in lines}
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(entry for extra in extras for entry in extra)]
    names = {re.split(r"[\[<>=;~! ]", entry)[0].lower() for entry in wanted}
    assert names <= pinned, f"not in constraints.txt: {sorted(names - pinned)}"


def test_the_version_is_the_same_everywhere() -> None:
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    assert cited == PROJECT["project"]["version"]


def test_workflows_name_make_targets_and_versions_that_are_there() -> None:
    """The hosted jobs run what .ci/run does, and what docs/versions.md says was tried."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    hosted = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (jobs,) = re.findall(r"target: \[(.*)\]", hosted)
    ran = re.findall(r"make --no-print-directory ([a-z-]+)", (ROOT / ".ci" / "run").read_text())
    assert set(ran) == set(jobs.split(", ")) <= targets
    tried = {
        (line.split("|")[1].strip().rpartition(".")[0], line.split("|")[2].strip())
        for line in (ROOT / "docs" / "versions.md").read_text().splitlines()
        if re.match(r"\| \d.* right", line)
    }
    assert set(re.findall(r'python: "(\S+)", torch: "(\S+)"', hosted)) <= tried
    classifiers = {entry.rpartition(" ")[2] for entry in PROJECT["project"]["classifiers"] if ":: 3." in entry}
    assert {python for python, _ in tried} == classifiers
    assert f">={min(classifiers, key=lambda version: int(version[2:]))}" == PROJECT["project"]["requires-python"]


@pytest.mark.parametrize(("title", "columns"), [("torch", 1), ("Python", 2)])
def test_rows_of_versions_go_to_their_table(title: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, rows of Python's versions went to the table of torch's."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    table = importlib.import_module("version_table")
    page = (ROOT / "docs" / "versions.md").read_text()
    lines = page.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith(f"| {title} |"))
    heads, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in (lines[first], *lines[first + 2 :])
    )
    key = lambda cells: tuple(map(table.release, cells[:columns]))
    assert table.with_row(page, dict(zip([title.lower(), *heads[1:]], rows[0], strict=True)), key) == page
    added = table.with_row(page, {title.lower(): "99.1"} | dict.fromkeys(heads[1:], "99.1"), key).splitlines()
    (place,) = (k for k, line in enumerate(added) if "99.1" in line)
    assert added[place - 1].count("|") == added[place].count("|") and added[place + 1] == ""
    assert (
        next(line for line in reversed(added[:place]) if line.startswith(("| torch |", "| Python |"))) == lines[first]
    )
