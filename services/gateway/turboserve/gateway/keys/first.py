"""The first key with the scope `admin`, without which no request can create any.

`python -m turboserve.gateway.keys.first`, with the environment of a gateway, creates and prints it if there
is none.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError, UnavailableError
from turboserve.contracts.keys import CreateKey, GetValidKeys, Scope
from turboserve.gateway.auth.access import DEFAULT_TENANT
from turboserve.gateway.auth.hashing import KeySet, key_text
from turboserve.gateway.keys.service import ID_BYTES
from turboserve.ids import random_token
from turboserve.subjects import CREATE_KEY, GET_VALID_KEYS

LABEL = "first admin key"
UNCONFIRMED = "the state store has not confirmed this key: if a gateway refuses it with 401, start again"
CONNECT_S = 10.0
"""Deadline of the connection to the broker, and time for which the request for the key is repeated."""
RETRY_S = 0.2


@dataclass(frozen=True)
class FirstKey:
    """A valid key with the scope `admin`."""

    id: str
    text: str | None
    """Text of the key. None: the key existed, and its text is not stored."""
    confirmed: bool = True
    """False: the state store has not answered, so the key may exist or not."""


async def ensure(settings: Settings) -> FirstKey:
    """Return the oldest valid key with the scope `admin`. If there is none, create one of `default`.

    If the answer does not arrive, the same request is repeated. A key whose answer was lost thus keeps its
    text.

    `settings` name the broker with a gateway's user. Raises the state store's typed errors and
    UnavailableError.
    """
    try:
        bus = await asyncio.wait_for(Bus.connect("gateway", settings), CONNECT_S)
    except TimeoutError:
        raise UnavailableError(
            f"TURBOSERVE_NATS_URL: the broker does not answer within {CONNECT_S:g} s",
            field="TURBOSERVE_NATS_URL",
            limit=CONNECT_S,
        ) from None
    try:
        return await ensure_over(bus)
    finally:
        await bus.close()


async def ensure_over(bus: Bus) -> FirstKey:
    """As `ensure`, over a gateway's bus."""
    valid = await bus.call(GET_VALID_KEYS, GetValidKeys())
    for key in valid.keys or ():
        if Scope.ADMIN in key.scopes:
            return FirstKey(key.id, None)
    name = random_token(ID_BYTES)
    text = key_text(name)
    request = CreateKey(
        id=name,
        tenant=DEFAULT_TENANT,
        scopes=(Scope.ADMIN,),
        hash=KeySet(salt=valid.salt).hash_of(text),
        label=LABEL,
    )
    return FirstKey(name, text, await _created(bus, request))


async def _created(bus: Bus, request: CreateKey) -> bool:
    """Create the key. Returns whether the state store has answered within `CONNECT_S`."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + CONNECT_S
    while True:
        try:
            await bus.call(CREATE_KEY, request)
        except UnavailableError:
            if loop.time() >= end_s:
                return False
            await asyncio.sleep(RETRY_S)
        else:
            return True


def main() -> int:
    try:
        found = asyncio.run(ensure(Settings()))
    except TurboServeError as error:
        print(f"no admin key: {error.detail}", file=sys.stderr)
        return 1
    if found.text is None:
        print(f"the key {found.id} with the scope admin exists: its text is not stored", file=sys.stderr)
        return 0
    print(f"key {found.id} with the scope admin; its text is shown only once:", file=sys.stderr)
    if not found.confirmed:
        print(UNCONFIRMED, file=sys.stderr)
    print(found.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
