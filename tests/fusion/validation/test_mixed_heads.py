"""Faults in how heads are mixed: validation finds them."""

import pytest
import torch

import fusion
from fusion.passes.recognize import core as core_module
from fusion.passes.specify import specify
from fusion.refusals import Reason
from fusion.validation.replay import Replay
from fusion.validation.samples import ALL_KEYS, SAMPLES
from tests.passes.test_mixed_heads import as_cait, drawn, scores_alone, weights_alone


@pytest.mark.parametrize("function", [as_cait, scores_alone, weights_alone], ids=lambda f: f.__name__)
def test_a_wrong_matrix_is_found(function, monkeypatch):
    """Heads read in the place of those that are written."""
    right = specify.with_named_heads

    def turned(core, accesses, bounds):
        core, accesses, head = right(core, accesses, bounds)
        swapped = {core_module.HEAD: head, head: core_module.HEAD}
        names = [name for name in ("mixed_scores", "mixed_weights") if getattr(core, name) is not None]
        part = getattr(core, names[-1])
        part = core_module.replace(part, matrix=core_module.substitute(part.matrix, swapped))
        return core_module.replace(core, **{names[-1]: part}), accesses, head

    torch._dynamo.reset()
    monkeypatch.setattr(specify, "with_named_heads", turned)
    with torch.no_grad():
        (site,) = fusion.explain(function, *drawn()).sites
    assert site.refusal.kind is Reason.DEFECT, str(site)


def test_lines_within_lines_do_not_multiply_what_is_read(monkeypatch):
    """The maximum of a row does not depend on the key whose exponential is summed, though an einsum merges rows and
    keys and takes them apart again. Such a program took more than 20 GB."""
    right, sizes = Replay._value, []

    def measured(self, node, index, rank):
        value = right(self, node, index, rank)
        sizes.append(value.numel())
        return value

    def mixed_twice(q, k, v, scores, weights):
        s = torch.einsum("bhij,hg->bgij", q @ k.mT, scores)
        e = torch.exp(s - s.max(-1, keepdim=True)[0])
        return torch.einsum("bhij,hg->bgij", e / e.sum(-1, keepdim=True), weights) @ v

    monkeypatch.setattr(Replay, "_value", measured)
    given = [torch.randn(shape) for shape in ((2, 3, 12, 8), (2, 3, 30, 8), (2, 3, 30, 8), (3, 3), (3, 3))]
    with torch.no_grad():
        (site,) = fusion.explain(mixed_twice, *given).sites
    assert site.validated.startswith("values") and max(sizes) <= SAMPLES * ALL_KEYS * 5
