"""The executor's calls of the provider."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from turboserve.autoscaler.executor import GONE_GRACE_S, Executor
from turboserve.autoscaler.messages import Done, Release

GRACE_S = 10.0


class RecordingProvider:
    """Ends workers at once, and notes how long each would have had."""

    def __init__(self) -> None:
        self.graces: list[float] = []

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        self.graces.append(grace_s)


@pytest.mark.parametrize(("declared_gone", "grace_s"), [(False, GRACE_S), (True, GONE_GRACE_S)])
async def test_a_worker_that_was_declared_gone_gets_no_time_to_end(
    declared_gone: bool, grace_s: float
) -> None:
    """Incident: with all workers frozen, their successors were started only 10 s after the workers' death,
    since a frozen process does not end when it is asked to."""
    provider = RecordingProvider()
    executor = Executor(cast(Any, SimpleNamespace(call=None)), cast(Any, provider), GRACE_S)
    answer = await executor.run(Release(1, "local-0", "wrk_a", "gone", declared_gone))
    assert answer == Done(1)
    assert provider.graces == [grace_s]
