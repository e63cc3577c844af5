"""The keys of the migrations that this worker takes part in, from its rows."""

from __future__ import annotations

from turboserve.contracts.workers import MigrationKey
from turboserve.worker.service import events


class MigrationKeys:
    """The newest key of each session that migrates to or from this worker."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[MigrationKey, float]] = {}
        """By session: the key, and when it was learned, monotonic seconds."""

    def __len__(self) -> int:
        return len(self._keys)

    def learn(self, message: events.Input, now: float) -> None:
        """Store the keys of a message, and drop the keys of migrations that are over by it."""
        match message:
            case events.Renewed():
                # An answer does not cover keys learned after the renewal was sent.
                for session, (_, learned_at) in list(self._keys.items()):
                    if learned_at < message.asked_at:
                        del self._keys[session]
                for key in message.keys:
                    self._keep(key, now)
            case events.Assigned():
                if message.key is not None:
                    self._keep(message.key, now)
                elif message.record.target is None:
                    self._keys.pop(message.record.id, None)

    def of(self, session: str, migration: int) -> bytes | None:
        """The key, 32 bytes; None: no such migration is known."""
        found = self._keys.get(session)
        if found is None or found[0].migration != migration:
            return None
        return bytes.fromhex(found[0].key.get_secret_value())

    def _keep(self, key: MigrationKey, now: float) -> None:
        known = self._keys.get(key.session)
        if known is None or known[0].migration <= key.migration:
            self._keys[key.session] = key, now
