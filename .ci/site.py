"""What the site changes in the pages of docs/, which are read in the repository as well (mkdocs calls it).

Links to files outside of docs/ become the file's name, since the site holds pages alone.
"""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, without links that lead out of docs/."""

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)", named, markdown)
