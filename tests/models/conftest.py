"""Slow architectures stay out by default; tests of architectures report what they found (`tests/conftest.py`)."""

import pytest

from tests.conftest import OUTCOMES
from tests.models.harness import Outcome


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless `-m` says something."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    """Outcomes of this run, by the run's title; the summary prints them."""
    return request.config.stash[OUTCOMES]
