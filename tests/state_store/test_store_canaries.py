"""The state store's canaries on a real broker: appended, kept for a short time, without side effects."""

from __future__ import annotations

from tests.helpers.waiting import eventually
from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import Harness, Store
from turboserve.state_store.settings import Settings
from turboserve.subjects import CANARIES, CHUNKS, EVENTS


async def test_a_store_appends_canaries_to_both_streams_and_is_ready_by_them(
    api: Harness, store: Store
) -> None:
    async def ready() -> bool:
        checks = store.runtime.checks()
        return checks["log_chunks"] and checks["log_events"]

    await eventually(ready)
    jetstream = api.bus.jetstream()
    for canary in CANARIES:
        info = await jetstream.stream_info(canary.stream, subjects_filter=canary.every)
        assert info.state.subjects is not None
        assert info.state.subjects[canary.every] >= 1


async def test_old_canaries_leave_the_log(api: Harness, start_store: StartStore, settings: Settings) -> None:
    await start_store(canary_interval_s=0.1)
    jetstream = api.bus.jetstream()

    async def left() -> bool:
        """Return whether canaries were appended and dropped: fewer exist than the newest one's sequence."""
        counts: list[bool] = []
        for stream in (CHUNKS, EVENTS):
            state = (await jetstream.stream_info(stream)).state
            counts.append(state.last_seq > 60 and state.messages < 40)
        return all(counts)

    await eventually(left)
