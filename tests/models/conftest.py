"""Collects what the architecture tests found and prints the table at the end of the run."""

import pytest

from tests.models.harness import Outcome, table

_OUTCOMES = pytest.StashKey[dict[str, list[Outcome]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: architectures that do not run by default (run them with `-m slow`)")
    config.stash.setdefault(_OUTCOMES, {})


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
    return request.config.stash[_OUTCOMES]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for title, found in config.stash.get(_OUTCOMES, {}).items():
        terminalreporter.section(title)
        terminalreporter.write_line(table(found))
