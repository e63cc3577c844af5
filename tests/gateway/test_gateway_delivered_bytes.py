"""Bytes that viewers are sent: each is reported once, whatever becomes of the message."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.chunk_headers import chunk_header
from turboserve.contracts.workers import Playhead
from turboserve.gateway.timeline.service import TimelineService

SESSIONS = "ses_a", "ses_b"


class LossyBus:
    """A bus that refuses some messages."""

    def __init__(self) -> None:
        self.works = True
        self.told = dict.fromkeys(SESSIONS, 0)
        self.lost = dict.fromkeys(SESSIONS, 0)

    async def publish(self, _topic: object, session: str, message: Playhead) -> None:
        into = self.told if self.works else self.lost
        into[session] += message.delivered_bytes
        if not self.works:
            raise OSError("the broker is away")


class SteppedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


Step = st.tuples(st.sampled_from(SESSIONS), st.integers(0, 5_000), st.booleans(), st.booleans())


@given(st.lists(Step, max_size=30))
def test_bytes_are_reported_once_and_forgotten_with_the_last_viewer(steps: list[Any]) -> None:
    asyncio.run(check(steps))


async def check(steps: list[Any]) -> None:
    bus, clock = LossyBus(), SteppedClock()
    fake_bus: Any = bus
    fake_clock: Any = clock
    timeline = TimelineService(fake_bus, fake_clock, "gtw_a", 0.25, 5.0)
    sent = dict.fromkeys(SESSIONS, 0)
    for session in SESSIONS:
        for viewer in ("one", "two"):
            await timeline.joined(session, f"{session}.{viewer}", 0.0, self_paced=False)
    for number, (session, size, works, reports) in enumerate(steps):
        bus.works = works
        await timeline.delivered(f"{session}.one", chunk_header(session, number, 1, "wk_1"), size)
        sent[session] += size
        if reports:
            clock.now += 0.25
            await timeline._do(timeline._timeline.tick(clock.now))
    for session in SESSIONS:
        for viewer in ("one", "two"):
            await timeline.left(session, f"{session}.{viewer}")
        assert bus.told[session] + bus.lost[session] == sent[session]
    assert timeline._delivered == {}
