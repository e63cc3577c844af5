"""Row locks and advisory locks, held until their owner releases them; waiters are served in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from enum import IntEnum
from typing import Protocol


class LockMode(IntEnum):
    """Strength of a lock, as Postgres's row locks. A stronger lock includes the weaker ones."""

    KEY_SHARE = 1
    """`for key share`, and the row that a foreign key names."""
    NO_KEY_UPDATE = 2
    """`for no key update`, and `update`."""
    UPDATE = 3
    """`for update`, `delete`, `insert` and advisory locks."""


def _conflict(one: LockMode, other: LockMode) -> bool:
    if LockMode.KEY_SHARE in (one, other):
        return LockMode.UPDATE in (one, other)
    return True


class Owner(Protocol):
    """A holder of locks: one session of the server."""

    @property
    def locks(self) -> dict[Hashable, LockMode]: ...


class Waiter:
    """A lock for which an owner waits."""

    __slots__ = ("granted", "key", "mode", "owner")

    def __init__(self, owner: Owner, key: Hashable, mode: LockMode, granted: Callable[[], None]) -> None:
        self.owner, self.key, self.mode = owner, key, mode
        self.granted = granted


class LockTable:
    """All locks of one server."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, list[Owner]] = {}
        self._queues: dict[Hashable, list[Waiter]] = {}
        self._waiting: dict[Owner, Waiter] = {}

    def take(self, owner: Owner, key: Hashable, mode: LockMode) -> bool:
        """Take the lock if no other owner holds it in a conflicting mode.

        Returns whether `owner` has it now.
        """
        held = owner.locks.get(key)
        if held is not None and held >= mode:
            return True
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = [owner]
        else:
            if any(other is not owner and _conflict(other.locks[key], mode) for other in holders):
                return False
            if held is None:
                holders.append(owner)
        owner.locks[key] = mode
        return True

    def wait(self, waiter: Waiter) -> None:
        """Queue for a lock that could not be taken. `granted` is called once the owner has it."""
        self._queues.setdefault(waiter.key, []).append(waiter)
        self._waiting[waiter.owner] = waiter

    @property
    def waiting(self) -> int:
        """Number of owners that wait."""
        return len(self._waiting)

    def stop_waiting(self, owner: Owner) -> None:
        """Leave the queue, if the owner is in one."""
        waiter = self._waiting.pop(owner, None)
        if waiter is not None:
            self._queues[waiter.key].remove(waiter)
            self._grant(waiter.key)

    def release(self, owner: Owner, keep: Callable[[Hashable], bool] = lambda _key: False) -> None:
        """Release the owner's locks, except those for which `keep` is true."""
        for key in [key for key in owner.locks if not keep(key)]:
            self.release_one(owner, key)

    def release_one(self, owner: Owner, key: Hashable) -> None:
        """Release one lock that the owner holds."""
        del owner.locks[key]
        holders = self._holders[key]
        holders.remove(owner)
        if not holders:
            del self._holders[key]
        if key in self._queues:
            self._grant(key)

    def deadlocked(self, owner: Owner) -> bool:
        """Return whether the owner waits for itself through other owners."""
        seen: list[Owner] = []
        pending = list(self._blockers(owner))
        while pending:
            other = pending.pop()
            if other is owner:
                return True
            if other not in seen:
                seen.append(other)
                pending.extend(self._blockers(other))
        return False

    def _blockers(self, owner: Owner) -> Iterator[Owner]:
        waiter = self._waiting.get(owner)
        if waiter is None:
            return
        for other in self._holders.get(waiter.key, ()):
            if other is not owner and _conflict(other.locks[waiter.key], waiter.mode):
                yield other

    def _grant(self, key: Hashable) -> None:
        """Grant the lock in the order of waiting, up to the first waiter whose mode conflicts."""
        queue = self._queues[key]
        while queue and self.take(queue[0].owner, key, queue[0].mode):
            waiter = queue.pop(0)
            del self._waiting[waiter.owner]
            waiter.granted()
        if not queue:
            del self._queues[key]
