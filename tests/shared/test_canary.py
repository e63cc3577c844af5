"""When a service knows that a stream accepts appends: rules by themselves, and on a real broker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from nats.js import api

from tests.helpers.waiting import eventually
from turboserve.broker_accounts import permissions
from turboserve.bus import Bus, append
from turboserve.bus.canary import STALL_S, CanaryMonitor, canaries_of, subscribe_canaries, watch_canaries
from turboserve.contracts.errors import LogFullError
from turboserve.subjects import CANARY_CHUNKS, CANARY_EVENTS, CHUNKS, EVENTS, SERVICES
from turboserve.tasks import stop

TIMEOUT_S = 5.0
STREAM_BYTES = 100_000


def monitor() -> CanaryMonitor:
    return CanaryMonitor((CHUNKS, EVENTS), TIMEOUT_S, 0.0)


def run_until(watched: CanaryMonitor, start: float, end: float) -> None:
    """Let the process run from `start` to `end`, without a stop."""
    while start < end:
        start = min(end, start + 0.5)
        watched.ran(start)


def test_a_stream_counts_from_its_first_canary_until_the_time_out() -> None:
    watched = monitor()
    assert not watched.takes(CHUNKS, 0.0)
    watched.arrived(CHUNKS, 1.0)
    assert watched.takes(CHUNKS, 1.0 + TIMEOUT_S)
    assert not watched.takes(CHUNKS, 1.1 + TIMEOUT_S)
    assert not watched.takes(EVENTS, 1.0)


def test_canaries_that_waited_while_the_process_was_stopped_do_not_count_as_new() -> None:
    watched = monitor()
    run_until(watched, 0.0, 10.0)
    watched.arrived(CHUNKS, 10.0)
    # Stopped for a minute; the socket holds canaries of that minute, and they come before or after a tick.
    watched.arrived(CHUNKS, 70.0)
    assert not watched.takes(CHUNKS, 70.0)
    assert watched.ran(70.1)
    watched.arrived(CHUNKS, 70.2)
    assert not watched.takes(CHUNKS, 70.2)
    watched.settled(70.3)
    assert not watched.takes(CHUNKS, 70.3)
    watched.arrived(CHUNKS, 71.0)
    assert watched.takes(CHUNKS, 71.0)


def test_a_short_stop_does_not_make_a_service_unready() -> None:
    watched = monitor()
    run_until(watched, 0.0, 10.0)
    watched.arrived(CHUNKS, 10.0)
    stopped_s = STALL_S + 1.0
    assert watched.ran(10.0 + stopped_s)
    watched.arrived(CHUNKS, 10.0 + stopped_s)
    assert watched.takes(CHUNKS, 10.0 + stopped_s)


def test_a_process_that_was_stopped_again_while_it_settled_is_not_settled() -> None:
    watched = monitor()
    watched.ran(60.0)
    watched.settled(120.0)
    watched.arrived(CHUNKS, 120.0)
    assert not watched.takes(CHUNKS, 120.0)


def test_only_the_state_store_appends_canaries_and_a_service_hears_those_of_its_streams() -> None:
    for service in SERVICES:
        rights = permissions(service)
        for log in (CANARY_CHUNKS, CANARY_EVENTS):
            assert (log.every in rights["publish"]) == (service == "state-store")
            assert (log.live_pattern in rights["subscribe"]) == (log in canaries_of(service))
    assert canaries_of("worker") == (CANARY_CHUNKS,)
    assert canaries_of("scheduler") == (CANARY_EVENTS,)
    assert canaries_of("gateway") == (CANARY_CHUNKS, CANARY_EVENTS)


async def test_a_canary_reaches_a_service_only_once_it_is_stored(
    connect: Callable[[str], Awaitable[Bus]],
) -> None:
    store, worker = await connect("state-store"), await connect("worker")
    await store.jetstream().add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=["own.*", "chunk.*.*", CANARY_CHUNKS.every],
            storage=api.StorageType.MEMORY,
            allow_msg_ttl=True,
            max_bytes=STREAM_BYTES,
            discard=api.DiscardPolicy.NEW,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )
    now = asyncio.get_running_loop().time
    watched = CanaryMonitor((CHUNKS,), 60.0, now())
    await subscribe_canaries(worker, watched, now)
    await worker.flush()
    watch = asyncio.create_task(watch_canaries(worker, watched, now))
    numbers = itertools.count()

    async def takes_after_a_canary() -> bool:
        # Each time a new one: a process that was stopped for a moment waits for the next one.
        await append(store, CANARY_CHUNKS.every, b"{}", message_id=str(next(numbers)), ttl_s=600)
        return watched.takes(CHUNKS, now())

    try:
        assert not watched.takes(CHUNKS, now())
        await eventually(takes_after_a_canary)
        used = (await store.jetstream().stream_info(CHUNKS)).state.bytes
        await store.jetstream().publish("own.s", b"x" * (STREAM_BYTES - used - 300))
        # Refused by the stream: the broker delivers it to no subscriber.
        heard_s = watched.silent_s(CHUNKS, now())
        with pytest.raises(LogFullError, match="maximum bytes"):
            await append(store, CANARY_CHUNKS.every, b"{}" * 300, message_id="refused", ttl_s=600)
        await worker.flush()
        silent_s = watched.silent_s(CHUNKS, now())
        assert heard_s is not None
        assert silent_s is not None
        assert silent_s >= heard_s
    finally:
        await stop(watch)
        # No service may delete a stream.
        admin = await connect("admin")
        await admin.jetstream().delete_stream(CHUNKS)
