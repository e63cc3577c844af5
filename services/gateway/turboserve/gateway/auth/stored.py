"""Follows the API keys of the database, so that creations and revocations take effect within two seconds."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from turboserve import logs
from turboserve.bus import UNREADABLE, Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.keys import KEYS_LIMIT, GetValidKeys, KeyChange, KeyUse, NoteKeyUses, ValidKeys
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.hashing import KeySet, StoredKey
from turboserve.subjects import GET_VALID_KEYS, KEY, NOTE_KEY_USES

LOOK_EVERY_S = 0.75
ANSWER_S = 1.0
"""Deadline of one read."""
RETRY_S = 0.2
"""Time from a failed read to the next one. The sum of the three is below 2 s: the time in which a change is
effective although its hint and the next answer are lost."""
USES_EVERY_S = 10.0
USE_INTERVAL_S = 60.0
"""A key's use is sent at most this often, seconds."""

log = logs.get("auth")


class KeyFollower:
    """Keeps `keys` as the database has them. While the state store is away, the known keys stay valid."""

    def __init__(self, bus: Bus, clock: Clock, keys: Keys) -> None:
        self._bus, self._clock, self._keys = bus, clock, keys
        self._salt: str | None = None
        self._version: int | None = None
        self._failed = False
        self._changed = asyncio.Event()
        self._noted: dict[str, float] = {}
        """Last use of each key that was sent."""

    async def listen(self) -> None:
        """Receive the hints about changes."""
        await self._bus.subscribe(KEY, "*", self._hint)

    async def run(self) -> None:
        """Read the keys at each hint, and every `LOOK_EVERY_S`; never returns."""
        while True:
            self._changed.clear()
            read = await self._read()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_EVERY_S if read else RETRY_S)

    async def note_uses_forever(self) -> None:
        """Send when keys were last used, every `USES_EVERY_S`; never returns."""
        while True:
            await asyncio.sleep(USES_EVERY_S)
            try:
                await self.note_uses()
            except TurboServeError as error:
                log.debug("uses of api keys not noted", error=error.detail)

    async def note_uses(self) -> None:
        """Send the uses that are due in one request. Raises UnavailableError."""
        uses = {
            key: at
            for key, at in self._keys.uses.items()
            if key not in self._noted or at >= self._noted[key] + USE_INTERVAL_S
        }
        due = tuple(KeyUse(key=key, at=max(at, 0.0)) for key, at in uses.items())[:KEYS_LIMIT]
        if due:
            await self._bus.call(NOTE_KEY_USES, NoteKeyUses(uses=due))
            self._noted |= uses
        self._noted = {key: at for key, at in self._noted.items() if key in self._keys.uses}

    async def _hint(self, _change: KeyChange, _body: bytes) -> None:
        self._changed.set()

    async def _read(self) -> bool:
        """Read the keys if they have changed. Returns whether the state store answered."""
        try:
            answer = await self._ask(self._version)
            if answer.keys is None and answer.salt != self._salt:
                # Another database has the same version by chance.
                answer = await self._ask(None)
        except (TurboServeError, *UNREADABLE) as error:
            if not self._failed:
                log.warning("api keys not read: the known ones stay valid", error=str(error)[:200])
            self._failed = True
            return False
        if self._failed:
            log.info("api keys are read again")
        self._failed = False
        if answer.keys is None:
            return True
        self._salt, self._version = answer.salt, answer.version
        self._keys.replace(_key_set(answer))
        self._keys.stream_limits = {
            key.id: key.limits.streams for key in answer.keys if key.limits.streams is not None
        }
        log.info("api keys read", version=answer.version, keys=len(answer.keys))
        return True

    async def _ask(self, version: int | None) -> ValidKeys:
        return await self._bus.call(GET_VALID_KEYS, GetValidKeys(version=version), deadline_s=ANSWER_S)


def _key_set(answer: ValidKeys) -> KeySet:
    return KeySet(
        salt=answer.salt,
        keys=tuple(StoredKey.model_validate(key.model_dump(exclude={"limits"})) for key in answer.keys or ()),
    )
