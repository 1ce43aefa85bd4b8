"""The gallery is what its script writes."""

from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_page_is_what_the_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gallery

    assert gallery.page(gallery.newest()) == gallery.PAGE.read_text(), "run python benchmarks/gallery.py"
    for name, row in gallery.GPU_ROWS.items():
        if gallery.is_drawn(row):
            drawn = gallery.ROOT / "docs" / "figures" / gallery.file_of(name)
            assert gallery.picture(gallery.shares(row)) == drawn.read_text(), name
