"""The stream of chunks is deleted while the store stays connected to the broker."""

from __future__ import annotations

from contextlib import suppress

from tests.helpers.waiting import eventually
from tests.state_store.state_store_harness import Harness, Store
from turboserve import subjects
from turboserve.contracts.errors import TurboServeError


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
