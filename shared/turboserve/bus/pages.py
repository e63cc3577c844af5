"""Reads many stored messages with one request: JetStream's batched direct get, which nats-py lacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass

import nats
from nats.aio.msg import Msg as NatsMsg

from turboserve.bus.client import Bus
from turboserve.bus.log import Entry
from turboserve.contracts.errors import UnavailableError

PAGE_TIMEOUT_S = 2.0
"""Silence after which the rest of an answer counts as lost."""
PAGE_BYTES = 4 * 2**20
"""A page ends after the message with which it reaches this size."""

END_OF_BATCH, NOT_FOUND = "204", "404"


@dataclass(frozen=True)
class Page:
    """Consecutive messages of a stream, of all subjects."""

    entries: tuple[Entry, ...]
    complete: bool
    """Whether the stream had no message after `entries`."""


async def read_page(bus: Bus, stream: str, sequence: int, limit: int) -> Page:
    """Read at most `limit` stored messages from stream `sequence` on, without deleted ones.

    Raises UnavailableError if the broker does not answer, or if a message was lost in transit.
    """
    entries: list[Entry] = []
    ended: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
    heard = asyncio.Event()

    async def receive(raw: NatsMsg) -> None:
        heard.set()
        if ended.done():
            return
        headers = raw.headers or {}
        status = headers.get("Status")
        # Each message names the sequence of the message before it, and so does the end of the batch.
        if status in (None, END_OF_BATCH) and int(headers.get("Nats-Last-Sequence", "0")) != (
            entries[-1].sequence if entries else 0
        ):
            ended.set_exception(_unavailable(stream, "a message was lost in transit"))
        elif status is None:
            entries.append(Entry(headers["Nats-Subject"], int(headers["Nats-Sequence"]), raw.data, headers))
        elif status == END_OF_BATCH:
            ended.set_result(Page(tuple(entries), int(headers.get("Nats-Num-Pending", "0")) == 0))
        elif status == NOT_FOUND:
            ended.set_result(Page((), True))
        else:
            ended.set_exception(_unavailable(stream, f"status {status} {headers.get('Description', '')}"))

    request = {"seq": max(sequence, 1), "batch": limit, "max_bytes": PAGE_BYTES}
    try:
        inbox = bus.client.new_inbox()
        subscription = await bus.client.subscribe(inbox, cb=receive)
        try:
            await bus.client.publish(
                f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox
            )
            while not ended.done():
                heard.clear()
                async with asyncio.timeout(PAGE_TIMEOUT_S):
                    await heard.wait()
            return ended.result()
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise _unavailable(stream, repr(error)) from None


def _unavailable(stream: str, reason: str) -> UnavailableError:
    return UnavailableError(f"{stream} does not answer: {reason}", retry_after_s=0.5)
