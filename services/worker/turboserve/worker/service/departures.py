"""A session that is moving away, as its source sees it. Pure.

The row says that it moves; the target comes and asks for the state; the session stands still for the end of
it, and after that it does what its row says, and nothing before it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turboserve.contracts.sessions import SessionRecord
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.entry import Entry, Gift, Place, Wanted
from turboserve.worker.transfer.errors import NoState, NotOffered, NotReady

ASK_S = 2.0
"""A session that stands still for a move asks for its row this often."""


@dataclass(frozen=True)
class Departures:
    """What the session table does for those that leave."""

    out: list[do.Command]
    """Takes the commands."""
    number: Callable[[], int]
    """Gives a number that was never given before."""

    @staticmethod
    def check(entry: Entry | None, session: str, move: int, target: str) -> Entry:
        """Whether this target may have the state now: its entry. Changes nothing.

        Raises `NotOffered`, `NotReady` or `NoState`.
        """
        if entry is None or not _moves(entry.record, move) or entry.record.target != target:
            raise NotOffered(f"session {session}: no move {move} to {target} is known here")
        # Before the next check: the log is not read for a suspended session without state, so that its
        # ownership would never be settled.
        if entry.place is Place.NOWHERE and not entry.takes_slot:
            raise NoState(f"session {session}: its state is not here")
        if entry.is_fenced or entry.failure is not None or entry.checked != entry.ownership:
            raise NotReady(f"session {session}: its ownership is not settled")
        if entry.place is not (Place.HOST if entry.wanted is Wanted.HOST else Place.SLAB):
            raise NotReady(f"session {session}: its state is on its way to where it belongs")
        return entry

    def offer(self, entry: Entry | None, session: str, move: int, target: str) -> bool:
        """The target comes for the state: whether it is on the host. Raises what `check` does."""
        entry = self.check(entry, session, move, target)
        resting = entry.wanted is Wanted.HOST
        if entry.gift is not None and entry.gift.move == move:
            # Asked for again. What stands still, or may be the target's already, stays so.
            entry.gift.whole = False
        else:
            entry.gift = Gift(move, frozen_at=entry.made_next if resting else None)
        return resting

    def told(self, entry: Entry, message: told.GiftInput, now: float) -> None:
        """An input about the gift."""
        gift = entry.gift
        if gift is None:
            return
        match message:
            case told.FreezeWanted() if message.move == gift.move:
                if gift.frozen_at is not None:
                    self.out.append(do.GiveRest(entry.session, gift.move))
                elif entry.place is Place.SLAB and gift.freeze is None:
                    entry.frozen, gift.freeze = True, self.number()
                    self.out.append(do.Freeze(entry.session, entry.run, gift.freeze))
            case told.Frozen() if message.number == gift.freeze:
                gift.frozen_at, gift.whole, gift.asked_at = message.next_chunk, False, now
                self.out.append(do.GiveRest(entry.session, gift.move))
            case told.GiftSealed() if message.move == gift.move:
                gift.sealed = True
            case told.GiftBroken() if message.move == gift.move:
                self._broken(entry, gift)

    def settle(self, entry: Entry, now: float) -> None:
        """Compare the gift with the row."""
        gift = entry.gift
        if gift is None:
            return
        if not _moves(entry.record, gift.move):
            self.end(entry)
        elif gift.frozen_at is not None:
            whole = not entry.pending and entry.next_publish == entry.made_next == gift.frozen_at
            if whole and not gift.whole:
                gift.whole = True
                self.out.append(do.GiveSeal(entry.session, gift.move, gift.frozen_at))
            if entry.frozen and now - gift.asked_at >= ASK_S:
                gift.asked_at = now
                self.out.append(do.Report())

    def end(self, entry: Entry) -> None:
        """It does not move any more, or there is nothing left of it here."""
        if entry.gift is not None:
            entry.gift = None
            self.out.append(do.EndGift(entry.session))

    def _broken(self, entry: Entry, gift: Gift) -> None:
        if gift.sealed:
            # The target may have verified it: only the row can say whose it is.
            self.out.append(do.Report())
        else:
            entry.gift = None


def _moves(record: SessionRecord, move: int) -> bool:
    return record.move == move and record.target is not None
