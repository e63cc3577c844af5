"""One stream: stored messages in one order, with the limits and checks of JetStream."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from turboserve.simulation.runtime.broker.formats import ApiError, ttl_seconds
from turboserve.simulation.runtime.broker.patterns import has_wildcard, matches
from turboserve.simulation.runtime.broker.stream_config import NS, complete, size_of, transform

EXPIRING_KEPT = 1_000
"""Times of expiry above twice the number of messages plus this many are searched for removed messages."""


class Stored:
    """A stored message."""

    __slots__ = ("data", "headers", "sequence", "size", "subject", "time")

    def __init__(
        self, sequence: int, subject: str, data: bytes, headers: Mapping[str, str], size: int, time: float
    ) -> None:
        self.sequence = sequence
        self.subject = subject
        self.data = data
        self.headers = headers
        self.size = size
        """Size that counts toward the stream's limit, in bytes."""
        self.time = time
        """Wall-clock time, in seconds."""


class Appended:
    """An accepted message; `stored` is None for a duplicate."""

    __slots__ = ("before", "sequence", "stored")

    def __init__(self, sequence: int, before: int = 0, stored: Stored | None = None) -> None:
        self.sequence = sequence
        self.before = before
        """Sequence of the previous message on its subject; 0 if there is none."""
        self.stored = stored


class Stream:
    """The messages of one stream. Expired messages are removed whenever the stream is used.

    `now` returns wall-clock seconds.
    """

    def __init__(self, config: dict[str, Any], now: Callable[[], float]) -> None:
        self.created = now()
        self.on_removed: Callable[[Stored], None] = lambda _stored: None
        self.last_sequence = max(0, int(config.get("first_seq") or 0) - 1)
        self.last_time: float | None = None
        self.bytes = 0
        self._now = now
        self._messages: dict[int, Stored] = {}
        self._first = 0
        self._subjects: dict[str, list[int]] = {}
        """Sequences by subject, oldest first."""
        self._subjects_below: dict[str, dict[str, None]] = {}
        """Subjects by the part before their last token."""
        self._live: dict[str, str | None] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._id_order: deque[tuple[float, str]] = deque()
        self._expiring: list[tuple[float, int]] = []
        self.configure(config)

    # Configuration

    def configure(self, config: dict[str, Any]) -> None:
        """Apply a configuration. Raises ApiError for limits that the server does not accept."""
        self.config = complete(config)
        self.name: str = self.config["name"]
        self.subjects: list[str] = self.config["subjects"]
        self.allow_direct = bool(self.config["allow_direct"])
        self._max_bytes = int(self.config["max_bytes"])
        self._max_messages = int(self.config["max_msgs"])
        self._max_per_subject = int(self.config["max_msgs_per_subject"])
        self._max_age_s = self.config["max_age"] / NS
        self._discards_new = self.config["discard"] == "new"
        self._new_per_subject = bool(self.config.get("discard_new_per_subject"))
        self._window_s = self.config["duplicate_window"] / NS
        self._republish: dict[str, Any] | None = self.config.get("republish")
        self._live.clear()
        self.expire()
        if self._max_per_subject > 0:
            for subject in [s for s, known in self._subjects.items() if len(known) > self._max_per_subject]:
                self.keep_newest(subject, self._max_per_subject)
        self._discard_old()

    @property
    def republishes_headers_only(self) -> bool:
        return self._republish is not None and bool(self._republish.get("headers_only"))

    def live_subject(self, subject: str) -> str | None:
        """Return the subject on which a message stored on `subject` is republished; None if it is not."""
        if self._republish is None:
            return None
        if subject not in self._live:
            source = self._republish.get("src") or ">"
            if not matches(source, subject):
                self._live[subject] = None
            else:
                self._live[subject] = transform(source, self._republish["dest"], subject)
        return self._live[subject]

    # Appending

    def append(self, subject: str, data: bytes, headers: Mapping[str, str]) -> Appended:
        """Store a message.

        Raises ApiError if a condition of the headers does not hold, or a limit refuses the message.
        """
        now = self._now()
        self._expire(now)
        ttl_s = 0.0
        message_id = ""
        if headers:
            ttl_s = self._check(subject, headers)
            message_id = headers.get("Nats-Msg-Id", "")
            if message_id and (known := self._ids.get(message_id)) and now - known[1] < self._window_s:
                return Appended(known[0])
        size = size_of(subject, data, headers)
        sequences = self._subjects.get(subject)
        at_limit = 0 < self._max_per_subject <= len(sequences or ())
        self._check_room(size, sequences[0] if at_limit and sequences else None)
        self.last_sequence += 1
        self.last_time = now
        sequence = self.last_sequence
        stored = Stored(sequence, subject, data, headers, size, now)
        self._messages[sequence] = stored
        self.bytes += size
        before = 0
        if sequences is None:
            self._subjects[subject] = [sequence]
            self._subjects_below.setdefault(subject.rpartition(".")[0], {})[subject] = None
        else:
            before = sequences[-1]
            sequences.append(sequence)
        if message_id:
            self._remember(message_id, sequence, now)
        if ttl_s > 0.0:
            self._expire_at(now + ttl_s, sequence)
        if at_limit and sequences is not None:
            while len(sequences) > self._max_per_subject:
                self.remove(sequences[0])
        self._discard_old()
        return Appended(sequence, before, stored)

    def _check(self, subject: str, headers: Mapping[str, str]) -> float:
        """Check the conditions in the headers, in the server's order.

        Returns the time to live; 0 for no end.
        """
        expected = headers.get("Nats-Expected-Stream")
        if expected and expected != self.name:
            raise ApiError(400, 10060, "expected stream does not match")
        ttl_s = 0.0
        if (text := headers.get("Nats-TTL")) is not None:
            ttl = ttl_seconds(text)
            if ttl is None:
                raise ApiError(400, 10165, "invalid per-message TTL")
            if not self.config["allow_msg_ttl"]:
                raise ApiError(400, 10166, "per-message TTL is disabled")
            ttl_s = ttl
        if (text := headers.get("Nats-Expected-Last-Subject-Sequence")) is not None:
            fenced = headers.get("Nats-Expected-Last-Subject-Sequence-Subject") or subject
            newest = self.newest_sequence(fenced)
            if not text.isdigit() or int(text) != newest:
                raise ApiError(400, 10071, f"wrong last sequence: {newest}")
        text = headers.get("Nats-Expected-Last-Sequence")
        if text is not None and (not text.isdigit() or int(text) != self.last_sequence):
            raise ApiError(400, 10071, f"wrong last sequence: {self.last_sequence}")
        return ttl_s

    def _check_room(self, size: int, replaced: int | None) -> None:
        """Check the limits; `replaced` is the message that this one removes by the limit of its subject."""
        if not self._discards_new:
            return
        if replaced is not None and self._new_per_subject:
            raise ApiError(503, 10077, "maximum messages per subject exceeded")
        if 0 <= self._max_messages <= len(self._messages) and replaced is None:
            raise ApiError(503, 10077, "maximum messages exceeded")
        if 0 <= self._max_bytes < self.bytes + size and (
            replaced is None or self._messages[replaced].size < size
        ):
            raise ApiError(503, 10077, "maximum bytes exceeded")

    def _discard_old(self) -> None:
        if self._discards_new:
            return
        while self._messages and (
            0 <= self._max_bytes < self.bytes or 0 <= self._max_messages < len(self._messages)
        ):
            self.remove(self.first_sequence)

    def _expire_at(self, at: float, sequence: int) -> None:
        expiring, messages = self._expiring, self._messages
        heapq.heappush(expiring, (at, sequence))
        if len(expiring) > 2 * len(messages) + EXPIRING_KEPT:
            # The limit of a subject removes most messages long before they expire.
            expiring[:] = [each for each in expiring if each[1] in messages]
            heapq.heapify(expiring)

    def _remember(self, message_id: str, sequence: int, now: float) -> None:
        order = self._id_order
        while order and now - order[0][0] >= self._window_s:
            at, old = order.popleft()
            if self._ids.get(old, (0, -1.0))[1] == at:
                del self._ids[old]
        self._ids[message_id] = (sequence, now)
        order.append((now, message_id))

    # Reading

    @property
    def first_sequence(self) -> int:
        """Sequence of the oldest message; one more than the last if there is none, and 0 in a new stream."""
        if not self._messages:
            return self.last_sequence + 1 if self.last_sequence else 0
        while self._first not in self._messages:
            self._first += 1
        return self._first

    @property
    def count(self) -> int:
        return len(self._messages)

    @property
    def subject_count(self) -> int:
        return len(self._subjects)

    def get(self, sequence: int) -> Stored | None:
        return self._messages.get(sequence)

    def sequences(self, subject: str) -> Sequence[int]:
        """Return the sequences of the messages on one subject, oldest first."""
        return self._subjects.get(subject, ())

    def count_from(self, sequence: int) -> int:
        """Count the messages from `sequence` on."""
        if sequence <= self.first_sequence:
            return len(self._messages)
        return sum(1 for _ in self.from_sequence(sequence))

    def newest_sequence(self, pattern: str) -> int:
        """Return the newest sequence on the subjects that `pattern` names; 0 if there is none."""
        if not has_wildcard(pattern):
            sequences = self._subjects.get(pattern)
            return sequences[-1] if sequences else 0
        return max((known[-1] for _, known in self._matching(pattern)), default=0)

    def next_sequence(self, pattern: str, at_least: int) -> int | None:
        """Return the first sequence from `at_least` on among `pattern`'s subjects; None if there is none."""
        found: list[int] = []
        for _, sequences in self._matching(pattern):
            index = bisect_left(sequences, at_least)
            if index < len(sequences):
                found.append(sequences[index])
        return min(found, default=None)

    def from_sequence(self, sequence: int) -> Iterator[Stored]:
        """Yield all messages from `sequence` on. The stream must not change meanwhile."""
        messages = self._messages
        for number in range(max(sequence, self.first_sequence), self.last_sequence + 1):
            if (stored := messages.get(number)) is not None:
                yield stored

    def counts(self, pattern: str) -> dict[str, int]:
        """Count the messages by subject."""
        return {subject: len(known) for subject, known in sorted(self._matching(pattern))}

    def _matching(self, pattern: str) -> Iterable[tuple[str, list[int]]]:
        if pattern == ">":
            return self._subjects.items()
        if not has_wildcard(pattern):
            known = self._subjects.get(pattern)
            return [] if known is None else [(pattern, known)]
        above, _, last = pattern.rpartition(".")
        if last == "*" and not has_wildcard(above):
            return [(subject, self._subjects[subject]) for subject in self._subjects_below.get(above, ())]
        return [item for item in self._subjects.items() if matches(pattern, item[0])]

    # Removing

    def remove(self, sequence: int) -> bool:
        stored = self._messages.pop(sequence, None)
        if stored is None:
            return False
        self.bytes -= stored.size
        sequences = self._subjects[stored.subject]
        del sequences[bisect_left(sequences, sequence)]
        if not sequences:
            del self._subjects[stored.subject]
            above = stored.subject.rpartition(".")[0]
            del self._subjects_below[above][stored.subject]
            if not self._subjects_below[above]:
                del self._subjects_below[above]
        self.on_removed(stored)
        return True

    def keep_newest(self, pattern: str, keep: int) -> int:
        """Remove all but the newest `keep` messages on the subjects of `pattern`.

        Returns the number removed.
        """
        sequences = sorted(number for _, known in self._matching(pattern) for number in known)
        return self._remove_all(sequences[: max(0, len(sequences) - keep)])

    def remove_before(self, pattern: str, sequence: int) -> int:
        """Remove messages older than `sequence` on the subjects of `pattern`. Returns the number removed."""
        chosen = [known[: bisect_left(known, sequence)] for _, known in self._matching(pattern)]
        return self._remove_all(sorted(number for known in chosen for number in known))

    def lose_after(self, time: float) -> None:
        """Lose all messages later than `time`, wall-clock seconds, as a disk does without its unwritten data.

        Their sequences and message ids are used again.
        """
        lost = [stored.sequence for stored in self._messages.values() if stored.time > time]
        if not lost:
            return
        first = min(lost)
        self._remove_all(sorted(lost))
        self.last_sequence = first - 1
        self._ids = {name: known for name, known in self._ids.items() if known[0] < first}
        self._expiring = [(at, number) for at, number in self._expiring if number < first]
        heapq.heapify(self._expiring)
        self.last_time = max((stored.time for stored in self._messages.values()), default=None)

    def _remove_all(self, sequences: list[int]) -> int:
        return sum(self.remove(sequence) for sequence in sequences)

    def expire(self) -> None:
        """Remove the messages whose age or time to live is exceeded."""
        if self._expiring or self._max_age_s > 0.0:
            self._expire(self._now())

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            self.remove(heapq.heappop(self._expiring)[1])
        if self._max_age_s > 0.0:
            while self._messages and self._messages[self.first_sequence].time + self._max_age_s <= now:
                self.remove(self._first)
