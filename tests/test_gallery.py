"""The gallery is what its script writes."""

from benchmarks.docs import gallery


def test_the_page_is_what_the_script_writes():
    assert gallery.page(gallery.newest()) == gallery.PAGE.read_text(), "run python -m benchmarks.docs.gallery"
    for name, row in gallery.GPU_ROWS.items():
        if gallery.is_drawn(row):
            drawn = gallery.ROOT / "docs" / "figures" / gallery.file_of(name)
            assert gallery.picture(gallery.shares(row)) == drawn.read_text(), name
