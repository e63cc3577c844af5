"""Operations that a real broker refuses a user."""

from __future__ import annotations

import re

from nats.aio.client import Client

from tests.helpers.broker_clients import connected_client, processed
from turboserve import subjects
from turboserve.cli.embedded import NatsServer

REFUSED = re.compile(r"permissions violation for (publish|subscription) to \"(.+?)\"")


async def connected(server: NatsServer, user: str, refused: set[tuple[str, str]]) -> Client:
    """Connect a client that notes the broker's refusals; nats-py writes the broker's errors in lower case."""

    async def note(error: Exception) -> None:
        found = REFUSED.search(str(error).lower())
        assert found is not None, error
        refused.add((found[1], found[2]))

    inbox = subjects.inbox_prefix(user).encode()
    return await connected_client(server.url(user), error_cb=note, allow_reconnect=False, inbox_prefix=inbox)


async def refusals(server: NatsServer, user: str, verb: str, names: list[str]) -> set[str]:
    """Return those of `names` that `user` may not publish, or subscribe to."""
    assert len({name.lower() for name in names}) == len(names)
    refused: set[tuple[str, str]] = set()
    client = await connected(server, user, refused)
    try:
        for name in names:
            if verb == "publish":
                await client.publish(name, b"")
            else:
                await client.subscribe(name)
        # Errors arrive in the order of their causes, and before the answer to a later ping.
        await processed(client)
        assert client.is_connected
    finally:
        await client.close()
    kind = {"publish": "publish", "subscribe": "subscription"}[verb]
    assert {found for found, _ in refused} <= {kind}
    told = {name for _, name in refused}
    assert told <= {name.lower() for name in names}
    return {name for name in names if name.lower() in told}
