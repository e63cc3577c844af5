"""The target of the attacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.helpers.attack_target import Target, running_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, until_group_ends: ExitStack) -> Target:
    """Every service as its own process, with API keys of two tenants, an operator and an admin."""
    return until_group_ends.enter_context(running_target(tmp_path_factory.mktemp("attacked")))


@pytest.fixture(autouse=True)
def no_traceback(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no service logs an unexpected exception during a test."""
    if "target" not in request.fixturenames:
        yield
        return
    target: Target = request.getfixturevalue("target")
    marks = target.marks()
    yield
    for service, mark in marks.items():
        assert b"Traceback" not in target.logged_since(service, mark), service
    assert target.alive()
