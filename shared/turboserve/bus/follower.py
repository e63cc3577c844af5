"""Follows one subject of a stream without gaps.

A follower gets stored messages by direct gets, and new messages as the stream republishes them. Each
republished message names the sequence before it on its subject. The follower thus notices a lost message and
fetches it, and needs no consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from nats.aio.msg import Msg as NatsMsg

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.feeds import BACKLOG as BACKLOG
from turboserve.bus.feeds import Backlog, StreamPosition
from turboserve.bus.log import Entry, next_entry
from turboserve.contracts.errors import UnavailableError

log = logs.get("bus")

LIVE = "live."
"""Prefix of the subject of a republished message."""
QUIET_S = 1.5
"""Silence after which a follower asks the log for missed messages. Doubles with every question in a row."""
QUIET_LIMIT_S = 6.0
"""Upper bound of that silence. A live message reveals a missed message at once."""


async def follow(
    bus: Bus,
    stream: str,
    subject: str,
    live: str,
    *,
    after_sequence: int = 0,
    on_lost: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Entry, None]:
    """Yield all messages on `subject` after stream sequence `after_sequence`, each once, in order, forever.

    `subject` and `live` may be patterns. A live message names the message before it on its own subject. A
    live message on another subject than the previous message is therefore read from the log.

    All followers of one `live` share one subscription. Each has a backlog and a position of its own, so a
    slow reader delays no other: it reads from the log what its backlog had no room for. Followers that ask
    the log for the same message at the same time, because of silence, share the question.

    Survives broker restarts and lost live messages. Messages that the stream no longer keeps are skipped, so
    readers of chunks check that indices are contiguous. A slow reader costs at most `BACKLOG` messages in
    memory, which it shares with the other followers.

    A stream counts as replaced if it was deleted and created again, if it is shorter than this reader's
    position, or if a new connection shows that it no longer has the newest message that was read: a broker
    lost its disk or the newest part of it. A replacement is noticed within a few seconds. `on_lost` is then
    awaited, and an exception from it ends the iteration. Afterwards the stream is read from its beginning,
    with sequences that start again. Messages stored before the replacement was noticed may come twice.
    """
    backlog: Backlog[Entry] = Backlog()
    place = StreamPosition(bus.incarnations, stream, after_sequence)
    cursor = Cursor(subject)
    checked = bus.connection
    """Connection over which the stream had the newest message that was read."""
    quiet_s = QUIET_S
    silent = False
    """Whether the next question is asked because of silence."""
    async with bus.feeds.joined(live, backlog, _entry):
        while True:
            connection = bus.connection
            lost = place.lost()
            if not lost and connection is not None and connection != checked:
                try:
                    lost = not await _has(bus, stream, subject, place.position, cursor.stamp)
                except UnavailableError:
                    await asyncio.sleep(0.2)
                    continue
                checked = connection
            if lost:
                log.warning("stream replaced: reading from its beginning", stream=stream, subject=subject)
                place.reach(0)
                cursor.rewind()
                backlog.clear()
                if on_lost is not None:
                    await on_lost()
            if cursor.asks(backlog, place.position):
                question = partial(next_entry, bus, stream, subject, place.position + 1)
                try:
                    if silent:
                        entry = await bus.feeds.shared((stream, subject, place.position), question)
                    else:
                        entry = await question()
                except UnavailableError:
                    await asyncio.sleep(0.2)
                    continue
                if bus.connection not in (None, checked):
                    continue
                silent = False
                cursor.read(entry)
                if entry is not None:
                    place.reach(entry.sequence)
                    quiet_s = QUIET_S
                    yield entry
                continue
            silent = False
            entry = await backlog.get(quiet_s)
            if entry is None:
                cursor.caught_up, silent, quiet_s = False, True, min(2 * quiet_s, QUIET_LIMIT_S)
                continue
            quiet_s = QUIET_S
            if bus.connection not in (None, checked):
                # The log has this message, unless it was lost: see above.
                cursor.caught_up = False
                continue
            if cursor.takes(entry, place.position):
                place.reach(entry.sequence)
                yield entry


class Cursor:
    """Decides which messages a follower yields: those of the log until it has caught up, then live ones.

    No I/O. The caller keeps the position, which is that of the last message that was yielded.
    """

    def __init__(self, subject: str) -> None:
        self._subject = self._newest = subject
        self._announced = 0
        """Sequence of the live message that made the follower read the log."""
        self.caught_up = False
        """Whether the log had no further message when it was last asked."""
        self._overlap = -1
        """Sequence of the newest message that came both from the log and live."""
        self.stamp: str | None = None
        """What tells the last message from another one of its sequence. None: no message yet."""

    def rewind(self) -> None:
        """Start again at the beginning of a replaced stream."""
        self.caught_up, self.stamp, self._announced, self._overlap = False, None, 0, -1

    def read(self, entry: Entry | None) -> None:
        """Note the log's next message, which is yielded; None: there is none."""
        if entry is None:
            self.caught_up = True
            return
        self._yielded(entry)
        self.caught_up = entry.sequence == self._announced

    def asks(self, backlog: Backlog[Entry], position: int) -> bool:
        """Decide the next step. True: ask the log for the next message. False: take the backlog's next one.

        Updates `caught_up`, and drops messages from the backlog that are not newer than the last one.
        """
        if backlog.dropped and not backlog:
            backlog.dropped = self.caught_up = False
        if not self.caught_up:
            # Over a slow connection, each question takes longer than the next message.
            self.caught_up = self._continued_by(backlog, position)
        return not self.caught_up

    def _continued_by(self, backlog: Backlog[Entry], position: int) -> bool:
        """Whether the backlog has the message after the last one. Drops older messages from the backlog.

        Only a backlog that has the last message, too, is known to have what follows: a message names the one
        before it on its own subject, and messages of other subjects may lie between.
        """
        while (entry := backlog.first) is not None and entry.sequence <= position:
            self._overlap = entry.sequence
            backlog.drop_first()
        return entry is not None and self._overlap == position and self._continues(entry, position)

    def _continues(self, entry: Entry, position: int) -> bool:
        """Whether no message is missing between the last one and this live message."""
        return int(entry.headers.get("Nats-Last-Sequence", "0")) <= position and entry.subject == self._newest

    def takes(self, entry: Entry, position: int) -> bool:
        """Whether to yield a live message. If messages before it are missing, the log is read again."""
        if entry.sequence <= position:
            return False
        if not self._continues(entry, position):
            # A message before this one may be lost in transit, or deleted: continue from the log.
            self.caught_up, self._announced = False, entry.sequence
            return False
        self._yielded(entry)
        return True

    def _yielded(self, entry: Entry) -> None:
        self.stamp, self._newest = _stamp(entry), entry.subject


def _entry(raw: NatsMsg) -> Entry:
    headers = raw.headers or {}
    return Entry(raw.subject.removeprefix(LIVE), int(headers["Nats-Sequence"]), raw.data, headers)


def _stamp(entry: Entry) -> str:
    """Return what differs between two messages of one sequence, before and after a loss."""
    return f"{entry.subject} {entry.headers.get('Nats-Msg-Id')}"


async def _has(bus: Bus, stream: str, subject: str, sequence: int, stamp: str | None) -> bool:
    """Whether the stream has the message of `sequence`, with `stamp` if that is known.

    False also if it was removed since. Reading from the beginning is right then, too. Raises
    UnavailableError.
    """
    if sequence == 0:
        return True
    entry = await next_entry(bus, stream, subject, sequence)
    return entry is not None and entry.sequence == sequence and stamp in (None, _stamp(entry))
