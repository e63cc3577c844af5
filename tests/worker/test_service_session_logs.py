"""The end of a session's log is read from a replica that has what it must have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.trace import INVALID_SPAN

from turboserve.bus import LAG_WARN_S
from turboserve.contracts.errors import UnavailableError
from turboserve.worker.service import commands, events, session_logs
from turboserve.worker.service.session_logs import LAG_S, SessionLogs
from turboserve.worker.service.wire import LogEnd

FENCE, KNOWN = 7, 9
READ_S = 0.2


class LaggingWire:
    """A replica of the log that gets `FENCE` after some questions. Each takes `READ_S` of the clock."""

    def __init__(self, lags: int) -> None:
        self.now = 0.0
        self.asked: list[int] = []
        self._lags = lags

    def monotonic(self) -> float:
        return self.now

    async def reaches(self, sequence: int) -> bool:
        self.asked.append(sequence)
        self.now += READ_S
        if len(self.asked) == 1:
            raise UnavailableError("no answer")
        return len(self.asked) > self._lags

    async def log_end(self, session: str, known: Any) -> LogEnd:
        return LogEnd(len(self.asked), mine=False, epoch=1)


def logs_of(wire: LaggingWire, entry: object, delivered: list[Any]) -> SessionLogs:
    logs = SessionLogs(
        "wk1_a", cast(Any, None), cast(Any, wire), cast(Any, None), 60, True,
        cast(Any, SimpleNamespace(entries={"s1": entry})), delivered.append, lambda: None,
    )  # fmt: skip
    logs._wire = cast(Any, wire)
    return logs


async def read_end(wire: LaggingWire, known: tuple[int, int] | None) -> events.LogEndRead:
    entry = SimpleNamespace(record=SimpleNamespace(own_revision=FENCE), awaits=lambda query: True)
    delivered: list[Any] = []
    logs = logs_of(wire, entry, delivered)
    await logs.carry_out(commands.ReadLogEnd("s1", 1, known))
    [found] = delivered
    assert isinstance(found, events.LogEndRead)
    return found


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_logs, "asyncio", SimpleNamespace(sleep=lambda _: asyncio.sleep(0)))


@pytest.mark.parametrize(("known", "needed"), [(None, FENCE), ((3, KNOWN), KNOWN), ((1, 4), FENCE)])
async def test_a_replica_that_lags_is_not_believed(known: tuple[int, int] | None, needed: int) -> None:
    """Otherwise a new owner would append chunks once more that the replica does not have yet."""
    wire = LaggingWire(lags=3)
    assert (await read_end(wire, known)).next_chunk == 4
    assert wire.asked == [needed] * 4


async def test_a_log_that_has_lost_its_end_is_read_as_it_is() -> None:
    wire = LaggingWire(lags=1_000)
    assert (await read_end(wire, None)).next_chunk == pytest.approx(LAG_S / READ_S, abs=1)


def test_a_chunk_that_waits_is_a_lag_and_chunks_that_wait_in_turn_are_none() -> None:
    wire = LaggingWire(lags=0)
    logs = logs_of(wire, None, [])

    def packaged(index: int) -> None:
        chunk = SimpleNamespace(session="s1", run=1, index=index, packaged_at_s=wire.now, span=INVALID_SPAN)
        logs.packaged(cast(Any, chunk))

    # Over a slow network, the next chunk is there before the last one is acknowledged.
    for index in range(10):
        packaged(index)
        wire.now += 0.75
        packaged(index + 1)
        logs.forget("s1", 1, index)
        assert logs.warning() is None
    packaged(11)
    wire.now += LAG_WARN_S
    assert logs.warning() == "2 chunks wait, the oldest for 5 s"
    logs.forget("s1", 1, 10)
    logs.forget("s1", 1, 11)
    assert logs.warning() is None
