"""What is to be done for a session, from what its row wants and where its state is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from turboserve.worker.service import commands as do
from turboserve.worker.service.departures import Departures
from turboserve.worker.service.entry import Awaiting, Entry, Place, Wanted

RETRY_S = 0.1
RETRY_LIMIT_S = 2.0
"""A publication without an answer is repeated after this long at first, doubling up to the limit."""
RECHECK_S = 30.0
"""After this long without an answer the log is read before the next attempt: well below the time for which
the broker recognises a repeated message."""
REFUSAL_S = 5.0
"""What host or device memory had no room for is tried again after this long."""


class Conductor:
    """Compares and commands. It keeps the slots, the numbers, and who has a publication in flight."""

    def __init__(
        self,
        model: str,
        capacity: int,
        entries: Mapping[str, Entry],
        out: list[do.Command],
        reserved: Callable[[], int],
    ) -> None:
        """`reserved`: slots that are kept for sessions on their way here."""
        self.model = model
        self.capacity = capacity
        self.out = out
        """Commands since they were last taken away."""
        self.in_flight: set[str] = set()
        """Sessions with a publication whose outcome is not known; also of sessions that have left."""
        self.departures = Departures(self.out, self.number)
        self._entries, self._reserved = entries, reserved
        self._number = 0

    @property
    def slots_used(self) -> int:
        return sum(entry.takes_slot for entry in self._entries.values()) + self._reserved()

    def number(self) -> int:
        """A number never given before, for a run or a question."""
        self._number += 1
        return self._number

    def settle(self, entry: Entry, now: float) -> None:
        """Bring the session closer to what its row wants. Doing it again right away does nothing."""
        if entry.failure is not None:
            return
        self.departures.settle(entry, now)
        wanted = entry.wanted
        if wanted is Wanted.WAIT:
            return
        if entry.is_fenced:
            self._halt(entry)
            return
        if entry.checked != entry.ownership:
            # What has no state here and is not to run needs no look at the log until it is.
            if (wanted is Wanted.RUN or entry.place is not Place.NOWHERE) and entry.awaiting is None:
                self._read_log_end(entry)
            return
        if wanted is Wanted.RUN:
            self._run(entry, now)
        else:
            self._shelve(entry, now)
        self._publish(entry, now)

    def evict(self, entry: Entry) -> None:
        """Let go of this run, whatever there is of it. What comes of it later is stale."""
        self.departures.end(entry)
        self.out.append(do.Evict(entry.session, entry.run))
        entry.place, entry.awaiting, entry.halted, entry.have_latents = Place.NOWHERE, None, False, False
        entry.frozen = False
        entry.pending.clear()
        entry.attempts, entry.retry_at = 0, 0.0
        entry.run = self.number()

    def fail(self, entry: Entry, reason: str) -> None:
        """The session is over; said again with every renewal until the row says so too."""
        self.evict(entry)
        entry.failure = reason
        self.out += [do.FailSession(entry.session, entry.record.epoch, reason), do.Report()]

    def refuse(self, entry: Entry, reason: str, until: float = 0.0) -> None:
        """Do not do what the row wants, and say so; tried again from `until` on."""
        if entry.refusal != reason:
            self.out.append(do.Report())
        entry.refusal, entry.refused_until = reason, until

    def make_room_on_host(self) -> bool:
        """Let go of the state that has been there longest; whether there was one.

        Its session is rebuilt from its latents when it is wanted again. Kept for ever, the states of viewers
        who never came back would fill the host, and then one slab after the other.
        """
        asleep = [e for e in self._entries.values() if e.place is Place.HOST and e.wanted is Wanted.HOST]
        if not asleep:
            return False
        self.evict(min(asleep, key=lambda entry: entry.shelved))
        self.out.append(do.Report())
        return True

    def _run(self, entry: Entry, now: float) -> None:
        if entry.place in (Place.NOWHERE, Place.HOST):
            self._find_slot(entry, now)
        if entry.place is Place.SLAB:
            entry.refusal = None
            self._thaw(entry)
            if entry.halted:
                entry.halted = False
                self.out.append(do.Unhalt(entry.session, entry.run, entry.control_sent))
            if entry.record.control_seq > entry.control_sent:
                entry.control_sent = entry.record.control_seq
                self.out.append(
                    do.SetPrompt(entry.session, entry.run, entry.control_sent, entry.record.prompt)
                )

    def _find_slot(self, entry: Entry, now: float) -> None:
        if entry.awaiting is None and now >= entry.refused_until:
            if self.model != entry.record.model:
                self.refuse(entry, f"model: this worker serves {self.model}, not {entry.record.model}")
            elif entry.takes_slot or self.slots_used < self.capacity:
                self._take_slot(entry)
            elif not any(other.place is Place.LEAVING for other in self._entries.values()):
                self.refuse(entry, f"slots: all {self.capacity} are in use")

    def _take_slot(self, entry: Entry) -> None:
        if entry.place is Place.HOST:
            entry.place = Place.SLAB
            self.out += [do.Resume(entry.session, entry.run, entry.playhead_s), do.Report()]
        elif entry.next_publish > 0 and not entry.have_latents:
            self._ask(entry, Awaiting.LATENTS)
            self.out.append(
                do.FetchLatents(entry.session, entry.run, entry.query, entry.next_publish, entry.last_epoch)
            )
        else:
            self._admit(entry)

    def _admit(self, entry: Entry) -> None:
        record = entry.record
        entry.place, entry.have_latents = Place.SLAB, False
        entry.made_next = entry.next_publish
        entry.control_sent = entry.control_taken = record.control_seq
        self.out += [
            do.Admit(
                entry.session,
                entry.run,
                entry.next_publish,
                record.prompt,
                record.seed,
                record.control_seq,
                entry.playhead_s,
                isolated=record.device_errors > 0,
            ),
            do.Report(),
        ]

    def _shelve(self, entry: Entry, now: float) -> None:
        if entry.place is Place.SLAB:
            self._thaw(entry)
            if now >= entry.refused_until:
                entry.place = Place.LEAVING
                self.out.append(do.Suspend(entry.session, entry.run))
            else:
                self._halt(entry)
        elif entry.place is Place.NOWHERE:
            # Nothing of it is here: it is rebuilt from the log when it is wanted again.
            entry.refusal = None
            if entry.takes_slot:
                self.evict(entry)

    def _thaw(self, entry: Entry) -> None:
        if entry.frozen and entry.gift is None:
            entry.frozen = False
            self.out.append(do.Thaw(entry.session, entry.run))

    def _halt(self, entry: Entry) -> None:
        if entry.place is Place.SLAB and not entry.halted:
            entry.halted = True
            self.out.append(do.Halt(entry.session, entry.run, entry.control_sent))

    def _publish(self, entry: Entry, now: float) -> None:
        if entry.session in self.in_flight or now < entry.retry_at:
            return
        if entry.attempts and now - entry.tried_at >= RECHECK_S:
            entry.checked = None
            self._read_log_end(entry)
        elif entry.pending:
            index, ownership = entry.pending[0], entry.ownership
            began = index if entry.began is None else entry.began
            self.in_flight.add(entry.session)
            if entry.attempts == 0:
                entry.tried_at = now
                latents = do.PublishLatents(
                    entry.session, entry.run, index, ownership[0], began, entry.before
                )
                self.out.append(latents)
            self.out.append(do.PublishChunk(entry.session, entry.run, index, ownership, began))
        elif entry.finished is not None:
            self.fail(entry, entry.finished)

    def _read_log_end(self, entry: Entry) -> None:
        self._ask(entry, Awaiting.LOG_END)
        self.out.append(do.ReadLogEnd(entry.session, entry.query))

    def _ask(self, entry: Entry, what: Awaiting) -> None:
        entry.awaiting = what
        entry.query = self.number()
