"""A report as one self-contained HTML page: no script, no network, light and dark, usable with the keyboard alone.

    to_html(report) -> str

`page` puts it together from `maths` (score programs as MathML), `mask_map` and `graph_view` (drawings, SVG),
`highlight` (source and kernels) and `style` (the style sheet).
"""

from fusion.report.page.page import to_html

__all__ = ["to_html"]
