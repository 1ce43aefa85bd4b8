"""Faults in how heads are mixed: validation finds them."""

import pytest
import torch

import fusion
from fusion.passes.pullback import heads
from fusion.refusals import Ground
from tests.passes.test_mixed_heads import as_cait, drawn, scores_alone, weights_alone


@pytest.mark.parametrize("function", [as_cait, scores_alone, weights_alone], ids=lambda f: f.__name__)
def test_a_wrong_matrix_is_found(function, monkeypatch):
    """Heads read in the place of those that are written."""
    right = heads.named

    def turned(core, accesses, bounds):
        core, accesses, head = right(core, accesses, bounds)
        swapped = {heads.HEAD: head, head: heads.HEAD}
        names = [name for name in ("mixed_scores", "mixed_weights") if getattr(core, name) is not None]
        part = getattr(core, names[-1])
        part = heads.replace(part, matrix=heads.substitute(part.matrix, swapped))
        return heads.replace(core, **{names[-1]: part}), accesses, head

    torch._dynamo.reset()
    monkeypatch.setattr(heads, "named", turned)
    with torch.no_grad():
        (site,) = fusion.explain(function, *drawn()).sites
    assert site.refusal.kind is Ground.DEFECT, str(site)
