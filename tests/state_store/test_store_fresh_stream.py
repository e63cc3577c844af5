"""The stream of chunks is deleted while the store stays connected to the broker."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness, Store
from turboserve import subjects
from turboserve.contracts.errors import FencedError, TurboServeError


async def test_owners_go_on_in_a_stream_that_was_made_again(api: Harness, store: Store) -> None:
    """No connection breaks, so only the store that makes the stream knows that the fences are lost."""
    records = [await api.running(f"fresh{number}") for number in range(3)]
    for record in records:
        await api.chunk(record, 0)
    await api.bus.jetstream().delete_stream(subjects.CHUNKS)

    async def accepted() -> bool:
        for record in records:
            row = await api.get(record.id)
            if row.version == record.version or row.own_revision is None:
                return False
            with suppress(TurboServeError):
                await api.chunk(row, 1)
                continue
            return False
        return True

    await eventually(accepted)
    for record in records:
        assert (await api.get(record.id)).epoch == record.epoch


async def test_no_fence_of_a_new_stream_has_the_sequence_of_a_lost_one(api: Harness, store: Store) -> None:
    """Incident: the fence of a session's end had, so that a worker that was cut off could append."""
    record = await api.running("fresh-end")
    assert record.own_revision is not None
    await api.bus.jetstream().delete_stream(subjects.CHUNKS)
    await api.end(record.id)

    async def settled() -> bool:
        return (await api.get(record.id)).own_revision is not None

    await eventually(settled)
    info = await api.bus.jetstream().stream_info(subjects.CHUNKS)
    assert info.state.first_seq > record.own_revision
    with pytest.raises(FencedError):
        await api.chunk(record, 0)
