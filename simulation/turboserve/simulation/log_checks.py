"""Invariants of the chunk log and of what viewers receive from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from turboserve.contracts.chunks import HEADER, ChunkHeader, Ownership
from turboserve.contracts.events import Event, event_from_bytes
from turboserve.gateway.auth.access import DEFAULT_TENANT
from turboserve.simulation.player import Player
from turboserve.simulation.runtime.broker.stream import Stored, Stream
from turboserve.simulation.runtime.device.contents import LOST, ChunkContents, begin, link
from turboserve.subjects import CANARY_EVENTS, CHUNK, EVENTS, OWN

CHUNKS_KEPT = 500
"""More newest chunks of a session than the log keeps."""
SUBJECTS_KEPT = 10_000


@dataclass(slots=True)
class Accepted:
    """A chunk that the log accepted."""

    index: int
    epoch: int
    contents: ChunkContents
    text: str
    """The chunk's header as the log has it: a parsed one takes four times the memory."""

    @property
    def header(self) -> ChunkHeader:
        return ChunkHeader.from_headers({HEADER: self.text})


@dataclass
class SessionLog:
    """Entries of one session that the log has accepted."""

    chunks: dict[int, Accepted] = field(default_factory=dict)
    last: Accepted | None = None
    owner: Ownership | None = None
    revision: int = 0
    """Sequence of the entry that names the owner; 0 without one."""
    lost: int = 0
    """Greatest revision of an owner that the broker accepted and lost."""
    fresh: bool = False
    """Whether the stream, or the end of it, was lost since the last chunk."""
    migrated: tuple[int, int] | None = None
    """Epoch under which the session was migrated, and the number of the migrated state."""

    def note_restart(self, own: Stored | None) -> None:
        """Note that the broker restarted, and that `own` is the newest entry left that names an owner."""
        revision = 0 if own is None else own.sequence
        if revision < self.revision:
            self.lost = max(self.lost, self.revision)
        self.owner = None if own is None else Ownership.from_bytes(own.data)
        self.revision, self.fresh = revision, True

    def repeats(self, ownership: Ownership) -> bool:
        """Return whether `ownership` may repeat the owner that the newest entry names.

        A copy of a lost entry that arrives late, or from another state store, gets a revision below the lost
        one, which a worker may still have. So the repair names the same owner once more, with a greater one.
        """
        return ownership == self.owner and self.revision <= self.lost


@dataclass
class SimulatedViewer:
    """A viewer of one session, who may leave and return."""

    name: str
    session: str
    tenant: str = DEFAULT_TENANT
    socket: bool = True
    """Whether the viewer uses a WebSocket, with reports of the playhead; otherwise one endless MP4."""
    next: int | None = None
    """Index of the next chunk; None if the viewer accepts any chunk as the first."""
    watching: bool = True
    over: bool = False
    """Whether the session has ended and all of it was seen."""
    seen: int = 0
    """Number of chunks received."""
    skips: int = 0
    """Number of times that the viewer discarded its video and skipped to a chunk."""
    end_s: float = 0.0
    """Media time up to which the viewer has video."""
    playhead_s: float = 0.0
    played_at: float = 0.0
    on_first: Callable[[], None] = lambda: None
    """Called with the viewer's first chunk."""
    on_chunk: Callable[[int, float], None] = lambda index, end_s: None
    """Called with each chunk: its index, and the media time at which it ends."""
    player: Player | None = None
    """Plays what `on_chunk` gives it. None: the viewer plays from its first report on."""


_subject_of = lru_cache(SUBJECTS_KEPT)(CHUNK.by)


class LogReports(Protocol):
    """Where the checks of the log report to."""

    def fail(self, name: str, message: str) -> None:
        """Report a violation of the invariant `name`."""

    def note(self, *what: object) -> None:
        """Write one line of the trace."""

    def result(self, name: str, contents: bytes, number: int = 0) -> None:
        """Add a result to the trace."""

    def seed_of(self, session: str) -> int | None:
        """Return the seed of a session; None if there is no such session."""

    def pinned(self, session: str) -> bool:
        """Return whether the session was created pinned."""

    def event_logged(self, event: Event) -> None:
        """Handle an event that the log has accepted."""


class LogChecks:
    """Checks each entry that the broker accepts, and each chunk that a viewer receives."""

    def __init__(self, reports: LogReports) -> None:
        self._reports = reports
        self.sessions: dict[str, SessionLog] = {}
        self.kept = CHUNKS_KEPT
        """Newest chunks per session that are compared with what viewers receive."""
        self.chunks = 0
        self.lowered = 0
        """Number of chunks below the best configuration."""

    def of(self, session: str) -> SessionLog:
        found = self.sessions.get(session)
        if found is None:
            found = self.sessions[session] = SessionLog()
        return found

    def forget(self, session: str) -> None:
        """Drop the chunks of a session that has ended and has no viewer, except what describes the last."""
        log = self.of(session)
        log.chunks.clear()

    def streams_lost(self) -> None:
        """Note that the broker restarted without its streams."""
        for log in self.sessions.values():
            log.note_restart(None)

    def tail_lost(self, stream: Stream | None) -> None:
        """Note that the broker restarted without the end of the chunk log, which is `stream` now."""
        for session, log in self.sessions.items():
            own = None if stream is None else stream.get(stream.newest_sequence(OWN.of(session)))
            log.note_restart(own)

    def appended(self, stream: Stream, stored: Stored) -> None:
        """Check an entry that the broker has accepted."""
        if CHUNK.takes(stored.subject):
            self._chunk(CHUNK.token(stored.subject), stored)
        elif OWN.takes(stored.subject):
            self._fence(OWN.token(stored.subject), stored)
        elif stream.name == EVENTS and not CANARY_EVENTS.takes(stored.subject):
            self._reports.event_logged(event_from_bytes(stored.data))

    def _fence(self, session: str, stored: Stored) -> None:
        log, ownership = self.of(session), Ownership.from_bytes(stored.data)
        self._reports.note(OWN.of(session), f"e{ownership.epoch}", ownership.worker, f"at {stored.sequence}")
        last = log.owner
        if last is not None and last.epoch >= ownership.epoch and not log.repeats(ownership):
            self._reports.fail("epochs_increase", f"own of {session}: {last.epoch}, then {ownership.epoch}")
        log.owner, log.revision = ownership, stored.sequence

    def _chunk(self, session: str, stored: Stored) -> None:
        header = ChunkHeader.of_entry(session, stored.headers, len(stored.data))
        contents = ChunkContents.of_payload(stored.data)
        log = self.of(session)
        last = log.last
        self.chunks += 1
        self._reports.note(
            stored.subject, f"#{header.index} e{header.epoch} {header.worker} c{header.control_seq}"
        )
        self._reports.result(stored.subject, stored.headers[HEADER].encode(), header.index)
        owner = log.owner
        wrote = header.epoch, header.worker, _subject_of(session, header.worker)
        if owner is None or (owner.epoch, owner.worker, stored.subject) != wrote:
            self._reports.fail(
                "one_executor",
                f"{header.worker} at {header.epoch} wrote chunk {header.index} of {session}, "
                f"which is {owner and (owner.worker, owner.epoch)}'s",
            )
        following = 0 if last is None else last.index + 1
        contiguous = header.index == following or (log.fresh and header.index <= following)
        if not contiguous:
            self._reports.fail(
                "chunks_contiguous", f"{session}: chunk {header.index} in place of {following}"
            )
        fidelity = header.fidelity
        self.lowered += fidelity is not None
        if fidelity is not None and fidelity.quality != 1.0 and self._reports.pinned(session):
            self._reports.fail(
                "pinned_is_best", f"{session}: chunk {header.index} has quality {fidelity.quality}"
            )
        accepted = Accepted(header.index, header.epoch, contents, stored.headers[HEADER])
        self._chained(log, header, contents, log.chunks.get(header.index - 1))
        log.last, log.fresh = accepted, False
        log.chunks[header.index] = accepted
        log.chunks.pop(header.index - self.kept, None)

    def _chained(
        self, log: SessionLog, header: ChunkHeader, contents: ChunkContents, last: Accepted | None
    ) -> None:
        migrated, log.migrated = log.migrated, None
        if migrated is not None and migrated[0] == header.epoch and migrated[1] != contents.parent:
            self._reports.fail(
                "verified_before_flip",
                f"{header.session}: chunk {header.index} is generated from another state",
            )
        if header.index == 0:
            seed = self._reports.seed_of(header.session)
            if seed is not None and contents.parent != begin(seed):
                self._reports.fail(
                    "chunks_contiguous",
                    f"{header.session}: the first chunk is not generated from the initial state",
                )
        elif last is not None and not self._follows(header, contents.parent, last):
            self._reports.fail(
                "chunks_contiguous",
                f"{header.session}: chunk {header.index} is not generated from the previous one",
            )

    @staticmethod
    def _follows(header: ChunkHeader, parent: int, last: Accepted) -> bool:
        """Return whether the chunk may be made from the state of number `parent`.

        It is made from the state of the chunk before it or, under a new owner that found no latents, from a
        state without context.
        """
        if parent == last.contents.number:
            return True
        return header.epoch != last.epoch and parent == link(LOST, header.index)

    def index_of(self, session: str, fragment: bytes) -> int:
        """Return the index of the chunk with this fragment; -1 if the log never accepted it."""
        # Nearly always it is one of the newest.
        for index, accepted in reversed(self.of(session).chunks.items()):
            if accepted.contents.to_bytes() == fragment:
                return index
        return -1

    def delivered(self, viewer: SimulatedViewer, index: int, fragment: bytes) -> None:
        """Check a chunk that a viewer received."""
        self._reports.result(viewer.name, fragment, index)
        accepted = self.of(viewer.session).chunks.get(index)
        stands = accepted is not None and accepted.contents.to_bytes() == fragment
        if not stands or viewer.next not in (None, index):
            self._reports.fail(
                "client_sees_prefix", f"{viewer.name} of {viewer.session} gets {index}, not {viewer.next}"
            )

    def skipped(self, viewer: SimulatedViewer, index: int) -> None:
        """Check that a viewer skips as a client asked: to the next chunk, the first under a prompt."""
        chunks = self.of(viewer.session).chunks
        here, before = chunks.get(index), chunks.get(index - 1)
        asked = here is not None and here.header.drops_buffer
        first = here is not None and (before is None or before.header.control_seq < here.header.control_seq)
        if not (asked and first) or viewer.next not in (None, index):
            self._reports.fail(
                "client_sees_prefix",
                f"{viewer.name} of {viewer.session} skips to {index}, and expects {viewer.next}",
            )
