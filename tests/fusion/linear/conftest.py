"""Given speeds of the libraries in place of measured ones."""

import pytest
import torch

from fusion.caching import OncePerKey
from fusion.linear import speeds
from fusion.linear.speeds import Speeds


@pytest.fixture
def set_speeds(monkeypatch: pytest.MonkeyPatch):
    def put(found: Speeds) -> None:
        speeds.onednn_pays.cache_clear()
        known = OncePerKey()
        known[torch.get_num_threads(), torch.float32] = known[torch.get_num_threads(), torch.bfloat16] = found
        monkeypatch.setattr(speeds, "known", known)

    yield put
    speeds.onednn_pays.cache_clear()
