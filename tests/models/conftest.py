"""Tests of architectures report what they found (`tests/conftest.py`)."""

import pytest

from tests.conftest import OUTCOMES
from tests.models.harness import Outcome


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    """Outcomes of this run, by the run's title; the summary prints them."""
    return request.config.stash[OUTCOMES]
