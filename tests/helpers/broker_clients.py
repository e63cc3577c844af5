"""Clients of a real broker without a bus, with time limits for a busy machine."""

from __future__ import annotations

from typing import Any

import nats
from nats.aio.client import Client

PATIENCE_S = 60
"""nats-py itself waits 2 s for a connection, 5 s for a stream and 10 s for a flush."""


async def connected_client(url: str, **options: Any) -> Client:
    """Connect a client to the broker at `url`; `options` are those of `nats.connect`."""
    return await nats.connect(url, connect_timeout=PATIENCE_S, **options)


async def processed(*clients: Client) -> None:
    """Wait until the broker has processed everything that `clients` have sent, subscriptions included."""
    for client in clients:
        # Twice, because nats-py sends the first ping ahead of its unwritten messages.
        for _ in range(2):
            await client.flush(timeout=PATIENCE_S)
