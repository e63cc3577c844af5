"""Issue commands for a session from what its row wants and where its state is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from turboserve.worker.service import commands
from turboserve.worker.service.class_slots import ClassSlots, refusal_of
from turboserve.worker.service.session_entry import (
    Absent,
    DesiredState,
    Failed,
    FetchingLatents,
    InSlab,
    LatentsReady,
    LeavingSlab,
    OnHost,
    Present,
    SessionEntry,
)
from turboserve.worker.service.table_migrations import OutgoingMigrations

RETRY_S = 0.1
RETRY_LIMIT_S = 2.0
"""Longest delay before a publication without an answer is repeated, seconds. Delays double from `RETRY_S`."""
RECHECK_S = 30.0
"""Time without an answer after which the log is read before the next attempt, seconds. It is well below the
time for which the broker recognizes a repeated message."""
REFUSAL_S = 5.0
"""Delay before host or device memory that was full is tried again, seconds."""

# Each chunk asks for these. Python 3.11 takes ten times as long for a member of an enumeration as for a
# global name, and builds a union again in each call.
_WAIT, _RUN = DesiredState.WAIT, DesiredState.RUN
_IN_SLAB = (InSlab, LeavingSlab)


class SessionReconciler:
    """Compares rows with states and issues commands. Keeps slots, numbers, and publications in flight."""

    def __init__(
        self,
        model: str,
        capacity: int,
        entries: Mapping[str, SessionEntry],
        out: list[commands.Command],
        reserved: Callable[[], int],
        classes: ClassSlots | None = None,
    ) -> None:
        """`capacity`: most sessions that may hold a slot. `reserved`: slots that are kept for arriving
        sessions. `classes`: the slots of a worker that serves several classes."""
        self._model = model
        self.models = model if classes is None else classes.names
        self.capacity = capacity
        self._classes = classes
        self.out = out
        """Commands since they were last taken."""
        self.in_flight: set[str] = set()
        """Sessions with a publication whose outcome is not known, including sessions that have left."""
        self.outgoing = OutgoingMigrations(self.out, self.number)
        self._entries, self._reserved = entries, reserved
        self._number = 0

    @property
    def slots_used(self) -> int:
        return sum(entry.takes_slot for entry in self._entries.values()) + self._reserved()

    def serves(self, model: str) -> bool:
        """Whether the worker serves sessions of this class."""
        return model == self._model if self._classes is None else model in self._classes.served

    def free(self, model: str) -> int:
        """Number of further sessions of this class that may hold a slot. Not above 0: none."""
        if self._classes is None:
            # Sessions that are paused in their slab hold slots too.
            return self.capacity - self.slots_used
        return self._classes.free(model)

    def number(self) -> int:
        """A number never returned before, for a run or a query."""
        self._number += 1
        return self._number

    def settle(self, entry: SessionEntry, now: float) -> None:
        """Bring the session closer to what its row wants. Repeating it right away does nothing."""
        if isinstance(entry.state, Failed):
            return
        if entry.outgoing_migration is not None:
            self.outgoing.settle(entry, now)
        wanted = entry.wanted
        if wanted is _WAIT:
            return
        if entry.fenced is not None and entry.is_fenced:
            self._pause(entry)
            return
        if entry.log_doubted and entry.session not in self.in_flight:
            # An answer from before the broker was away proves nothing now.
            entry.checked = entry.log_end_query = None
            entry.log_doubted = False
        if entry.checked != entry.ownership:
            # A session without state here that is not to run needs no read of the log yet.
            needed = wanted is _RUN or isinstance(entry.state, Present)
            if needed and entry.log_end_query is None:
                self._read_log_end(entry)
            return
        if wanted is _RUN:
            self._run(entry, now)
        else:
            self._suspend_session(entry, now)
        self._publish(entry, now)

    def evict(self, entry: SessionEntry) -> None:
        """Release this run, wherever its state is. Its later events are stale."""
        self.outgoing.end(entry)
        self.out.append(commands.Evict(entry.session, entry.run))
        entry.state, entry.log_end_query = Absent(), None
        entry.pending.clear()
        entry.attempts, entry.retry_at = 0, 0.0
        entry.run = self.number()

    def fail(self, entry: SessionEntry, reason: str) -> None:
        """End the session as failed. Every renewal repeats the failure until the row says so too."""
        self.evict(entry)
        entry.state = Failed(reason)
        self.out += [commands.FailSession(entry.session, entry.record.epoch, reason), commands.Report()]

    def refuse(self, entry: SessionEntry, reason: str, until: float = 0.0) -> None:
        """Refuse what the row wants, and report the refusal. Retried from `until` on."""
        if entry.refusal != reason:
            self.out.append(commands.Report())
        entry.refusal, entry.refused_until = reason, until

    def make_room_on_host(self, model: str) -> bool:
        """Release the oldest state in the host pool of this class. Returns whether there was one.

        Its session is rebuilt from its latents when it is wanted again. Without this limit, the states of
        viewers who never returned would fill the host, and then one slab after the other.
        """
        suspended = {
            entry.state.order: entry
            for entry in self._entries.values()
            if isinstance(entry.state, OnHost) and entry.wanted is DesiredState.HOST
            if entry.record.model == model
        }
        if not suspended:
            return False
        self.evict(suspended[min(suspended)])
        self.out.append(commands.Report())
        return True

    def _run(self, entry: SessionEntry, now: float) -> None:
        if not isinstance(entry.state, _IN_SLAB):
            self._find_slot(entry, now)
        if isinstance(entry.state, InSlab):
            entry.refusal = None
            self._unquiesce(entry, entry.state)
            if entry.state.paused:
                entry.state = replace(entry.state, paused=False)
                self.out.append(commands.ResumeGeneration(entry.session, entry.run, entry.control_sent))
            if not entry.has_conditions:
                entry.control_sent, entry.lacks_values = entry.record.control_seq, entry.values is None
                self.out.append(
                    commands.SetConditions(
                        entry.session,
                        entry.run,
                        entry.control_sent,
                        entry.record.prompt,
                        entry.record.prompt_traceparent,
                        entry.values,
                    )
                )
            if entry.record.drop_buffer_seq > max(entry.drop_sent, entry.last_control):
                entry.drop_sent = entry.record.drop_buffer_seq
                waiting_s = entry.waiting_s(now) or 0.0
                self.out.append(commands.DropBuffer(entry.session, entry.run, entry.control_sent, waiting_s))
            if not entry.has_limits:
                entry.limits_sent = entry.limits
                self.out.append(
                    commands.SetLimits(entry.session, entry.run, entry.control_sent, entry.limits)
                )
            if entry.log_lost and not entry.pending and not entry.state.next_asked:
                entry.state = replace(entry.state, next_asked=True)
                self.out.append(commands.GenerateNext(entry.session, entry.run))

    def _find_slot(self, entry: SessionEntry, now: float) -> None:
        if not isinstance(entry.state, FetchingLatents) and now >= entry.refused_until:
            if not self.serves(entry.record.model):
                self.refuse(entry, f"model: this worker serves {self.models}, not {entry.record.model}")
            elif entry.takes_slot or self.free(entry.record.model) > 0:
                self._take_slot(entry, now)
            elif not any(isinstance(other.state, LeavingSlab) for other in self._entries.values()):
                self.refuse(entry, refusal_of(self._classes, self.capacity, entry.record.model))

    def _take_slot(self, entry: SessionEntry, now: float) -> None:
        if isinstance(entry.state, OnHost):
            entry.state = InSlab(entry.state.paused, entry.state.quiesced)
            resume = commands.Resume(
                entry.session, entry.run, entry.playhead_s, entry.record.traceparent, entry.waiting_s(now)
            )
            self.out += [resume, commands.Report()]
        elif entry.next_publish > 0 and not isinstance(entry.state, LatentsReady):
            query = self.number()
            entry.state = FetchingLatents(query)
            self.out.append(
                commands.FetchLatents(entry.session, entry.run, query, entry.next_publish, entry.last_epoch)
            )
        else:
            self._admit(entry, now)

    def _admit(self, entry: SessionEntry, now: float) -> None:
        record = entry.record
        entry.state = InSlab()
        entry.made_next = entry.next_publish
        entry.control_sent = entry.control_taken = record.control_seq
        entry.lacks_values = entry.values is None
        entry.drop_sent, entry.limits_sent = record.drop_buffer_seq, entry.limits
        self.out += [
            commands.Admit(
                entry.session,
                entry.run,
                entry.next_publish,
                record.prompt,
                record.seed,
                record.control_seq,
                entry.playhead_s,
                isolated=record.device_errors > 0,
                traceparent=record.traceparent,
                prompt_traceparent=(
                    record.prompt_traceparent if record.applied_control_seq < record.control_seq else None
                ),
                limits=entry.limits,
                waiting_s=entry.waiting_s(now),
                drops_buffer=entry.last_control < record.drop_buffer_seq,
                values=record.controls,
                model=record.model,
            ),
            commands.Report(),
        ]

    def _suspend_session(self, entry: SessionEntry, now: float) -> None:
        if isinstance(entry.state, InSlab):
            self._unquiesce(entry, entry.state)
            if now >= entry.refused_until:
                entry.state = LeavingSlab(entry.state.paused, entry.state.quiesced)
                self.out.append(commands.Suspend(entry.session, entry.run))
            else:
                self._pause(entry)
        elif not isinstance(entry.state, Present):
            # No state is here: the session is rebuilt from the log when it is wanted again.
            entry.refusal = None
            if entry.takes_slot:
                self.evict(entry)

    def _unquiesce(self, entry: SessionEntry, state: InSlab) -> None:
        if state.quiesced and entry.outgoing_migration is None:
            entry.state = replace(state, quiesced=False)
            self.out.append(commands.Unquiesce(entry.session, entry.run, entry.record.traceparent))

    def _pause(self, entry: SessionEntry) -> None:
        if isinstance(entry.state, InSlab) and not entry.state.paused:
            entry.state = replace(entry.state, paused=True)
            self.out.append(commands.PauseGeneration(entry.session, entry.run, entry.control_sent))

    def _publish(self, entry: SessionEntry, now: float) -> None:
        if now < entry.retry_at or entry.session in self.in_flight:
            return
        if entry.attempts and now - entry.tried_at >= RECHECK_S:
            entry.checked = None
            self._read_log_end(entry)
        elif entry.pending:
            index, ownership = entry.pending[0], entry.ownership
            began = index if entry.began is None else entry.began
            self.in_flight.add(entry.session)
            entry.tried_version = entry.record.version
            if entry.attempts == 0:
                entry.tried_at = now
            self.out.append(
                commands.PublishChunk(
                    entry.session,
                    entry.run,
                    index,
                    ownership,
                    began,
                    entry.contiguous_from,
                    entry.last_control,
                    entry.record.drop_buffer_seq,
                    entry.before if entry.attempts == 0 else None,
                )
            )
        elif entry.finished is not None:
            self.fail(entry, entry.finished)

    def _read_log_end(self, entry: SessionEntry) -> None:
        if not isinstance(entry.state, Present):
            # Latents belong before one chunk. The log's end may be another one.
            entry.state = Absent()
        entry.log_end_query = self.number()
        entry.expected = entry.doubted or entry.newest
        self.out.append(commands.ReadLogEnd(entry.session, entry.log_end_query, entry.expected))
