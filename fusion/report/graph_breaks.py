"""Where Dynamo cut a function into graphs, and why."""

from __future__ import annotations

import linecache
from typing import Any

from torch.fx import GraphModule


def graph_break(module: GraphModule) -> str | None:
    """The graph break that ends this graph of Dynamo's, if one does: the user's line, and Dynamo's reason."""
    found: Any = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    title, *rest = str(found.reason).strip().splitlines()
    explanation = next((line.strip() for line in rest if line.strip().startswith("Explanation: ")), "")
    reason = ": ".join(part for part in (title, explanation.removeprefix("Explanation: ")) if part)
    if not found.user_stack:
        return reason
    frame = found.user_stack[-1]
    code = linecache.getline(frame.filename, frame.lineno).strip()
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {code}\n{reason}"
