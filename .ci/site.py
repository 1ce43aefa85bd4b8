"""Additions of the site to the pages of docs/, which are read in the repository as well (mkdocs calls it).

README, and result files of benchmarks that a page links to, are pages of the site, outside of its navigation. Links to
other files outside of docs/ become the file's name.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """The pages, README, and the result files that they link to."""

    def add(name: str, text: str) -> None:
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV))

    readme = _readme()
    add("readme.md", readme)
    for text in (readme, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))):
        for _, target in LINK.findall(text):
            path = posixpath.normpath(posixpath.join("docs", target))
            if path.startswith(RESULTS):
                add(f"results/{posixpath.basename(path)}", (ROOT / path).read_text())
    return files


def _readme() -> str:
    """README with links as a page of docs/ has them."""
    text = re.sub(r"\]\((?!https?:|#)", "](../", (ROOT / "README.md").read_text())
    return text.replace("](../docs/", "](")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, whose links stay inside of the site."""

    def inside(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if path.startswith(RESULTS):
            return f"[{text}](results/{posixpath.basename(path)})"
        if path.startswith("README.md"):
            return f"[{text}]({path.replace('README', 'readme')})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(inside, markdown)
