"""The rendezvous of a process group of two, over the existing control channel.

torch.distributed finds its peer through a store. Each side has its own store, which no socket serves. An
entry that one side's library writes is sent to the other side as a frame of the authenticated channel.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore

from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import TransferError, TransferProtocolError, error_of
from turboserve.worker.transfer.frames import Frame, Linked, Refuse, StoreEntry

POLL_S = 0.002
ENTRIES_LIMIT = 64


def new_store(seconds: float) -> HashStore:
    """Create one side's store. A wait for a key gives up after `seconds`."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=max(0.001, seconds)))
    return store


async def exchange(
    channel: Channel, store: HashStore, making: asyncio.Future[Any], deadline: Deadline
) -> None:
    """Exchange entries in both directions until `making` is done on both sides.

    Raises the errors of `making`, the other side's refusal, `TransferProtocolError` and the errors of
    `Channel`.
    """
    sent: set[str] = set()
    heard: set[str] = set()
    told = linked = False
    hearing: asyncio.Future[Frame] | None = None
    try:
        while not (told and linked):
            if hearing is None and not linked:
                hearing = asyncio.ensure_future(channel.receive(deadline.left()))
            waited = [one for one in (hearing, None if told else making) if one is not None]
            # The library does not signal a new entry: poll for it.
            await asyncio.wait(waited, timeout=deadline.left(POLL_S), return_when=asyncio.FIRST_COMPLETED)
            for key in sorted(set(store.list_keys()) - sent - heard):
                sent.add(key)
                entry = StoreEntry(key=key, value=store.get(key).hex())
                await channel.send(entry, deadline.left())
            if making.done() and not told:
                making.result()
                await channel.send(Linked(), deadline.left())
                told = True
            if hearing is not None and hearing.done():
                frame, hearing = hearing.result(), None
                if isinstance(frame, Linked):
                    linked = True
                elif isinstance(frame, StoreEntry) and len(heard) < ENTRIES_LIMIT:
                    heard.add(frame.key)
                    # torch's stub requires text; the library itself stores bytes.
                    store.set(frame.key, bytes.fromhex(frame.value))  # type: ignore[arg-type]
                else:
                    raise _unexpected(frame)
    finally:
        if hearing is not None:
            hearing.cancel()
            with suppress(asyncio.CancelledError, TransferError):
                await hearing


def _unexpected(frame: Frame) -> TransferError:
    if isinstance(frame, Refuse):
        return error_of(frame.code, frame.detail)
    return TransferProtocolError(f"{frame.type}: not expected while a link is being made")
