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
CONNECT_S = 10.0


@dataclass(frozen=True)
class FirstKey:
    """A valid key with the scope `admin`."""

    id: str
    text: str | None
    """Text of the key. None: the key existed, and its text is not stored."""


async def ensure(settings: Settings) -> FirstKey:
    """Return the oldest valid key with the scope `admin`. If there is none, create one of `default`.

    `settings` name the broker with a gateway's user. Raises the state store's typed errors and
    UnavailableError.
    """
    try:
        bus = await asyncio.wait_for(Bus.connect("gateway", settings), CONNECT_S)
    except TimeoutError:
        raise UnavailableError(f"the broker does not answer within {CONNECT_S:g} s") from None
    try:
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
        await bus.call(CREATE_KEY, request)
        return FirstKey(name, text)
    finally:
        await bus.close()


def main() -> int:
    try:
        found = asyncio.run(ensure(Settings()))
    except TurboServeError as error:
        print(f"no admin key: {error.detail}", file=sys.stderr)
        return 1
    if found.text is None:
        print(f"the key {found.id} with the scope admin exists: its text is not stored", file=sys.stderr)
        return 0
    print(f"key {found.id} with the scope admin; only this line shows its text:", file=sys.stderr)
    print(found.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
