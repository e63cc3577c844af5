"""The broker's streams: one order, the fence by expected sequence, message ids, readers of one subject."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turboserve.bench.simulate.kernel import Awaited, Program, sleep
from turboserve.bench.simulate.network import DEADLINE_S, Network
from turboserve.bus.log import Ack
from turboserve.contracts.errors import DeadlineError, FencedError

DUPLICATE_WINDOW_S = 45.0
"""For this long a repeated message id is recognised. Real: 120 s; more than the worker's RECHECK_S."""
BACKLOG = 4
QUIET_S = 1.0
RETRY_S = 0.2


@dataclass(frozen=True)
class Entry:
    """One accepted message."""

    sequence: int
    subject: str
    body: Any
    before: int
    """Sequence of the one before it on its subject; 0: none."""
    message_id: str


class Stream:
    """As a JetStream stream does it (the design, "The fence")."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.entries: list[Entry] = []
        self.by_subject: dict[str, list[Entry]] = {}
        self.on_append: Callable[[Entry], None] = lambda _entry: None
        """Called with each accepted message, before anybody hears of it."""
        self.muted: dict[str, float] = {}
        """Programs whose acknowledgements are lost until then."""
        self._network = network
        self._kernel = network.kernel
        self._ids: dict[str, tuple[int, float]] = {}
        self._live: dict[str, list[tuple[Program, Callable[[Entry], None]]]] = {}

    def last(self, subject: str) -> Entry | None:
        entries = self.by_subject.get(subject)
        return entries[-1] if entries else None

    def append(self, subject: str, body: Any, message_id: str, expect: tuple[str, int] | None) -> Ack:
        """What the broker does at the moment the message arrives. Raises FencedError."""
        now = self._kernel.now
        known = self._ids.get(message_id)
        if known is not None and now - known[1] < DUPLICATE_WINDOW_S:
            return Ack(known[0], duplicate=True)
        if expect is not None:
            newest = self.last(expect[0])
            if (newest.sequence if newest else 0) != expect[1]:
                raise FencedError(f"{subject}: wrong last sequence", field=expect[0])
        before = self.last(subject)
        entry = Entry(len(self.entries) + 1, subject, body, before.sequence if before else 0, message_id)
        self.entries.append(entry)
        self.by_subject.setdefault(subject, []).append(entry)
        self._ids[message_id] = (entry.sequence, now)
        self.on_append(entry)
        for program, receive in self._live.get(subject, ()):
            self._republish(entry, program, receive)
        return Ack(entry.sequence, duplicate=False)

    # From a program's side

    def publish(
        self,
        source: Program,
        subject: str,
        body: Any,
        message_id: str,
        expect: tuple[str, int] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Awaited[Ack]:
        """Append over the network. Fails with FencedError, or DeadlineError: append the same again."""

        def arrive() -> Ack:
            return self.append(subject, body, message_id, expect)

        return self._ask(source, arrive, deadline_s, writes=True)

    def read_last(self, source: Program, subject: str) -> Awaited[Entry | None]:
        return self._ask(source, lambda: self.last(subject), DEADLINE_S)

    def read_next(self, source: Program, subject: str, sequence: int) -> Awaited[Entry | None]:
        """The first entry on `subject` at or after `sequence`."""

        def find() -> Entry | None:
            entries = self.by_subject.get(subject, [])
            return next((entry for entry in entries if entry.sequence >= sequence), None)

        return self._ask(source, find, DEADLINE_S)

    def _ask(
        self, source: Program, work: Callable[[], Any], deadline_s: float, writes: bool = False
    ) -> Awaited[Any]:
        outcome: Awaited[Any] = Awaited()
        kernel, network, faults = self._kernel, self._network, self._network.faults
        late = DeadlineError(f"{self.name} does not answer within {deadline_s} s", retry_after_s=0.2)
        sent_at = kernel.now
        kernel.at(deadline_s, lambda: outcome.settle(error=late))
        if not network.reaches(source) or kernel.chance(faults.lost_request):
            return outcome
        transit_s = network.delay()
        if writes and kernel.chance(faults.late_request):
            transit_s = deadline_s * kernel.random.uniform(0.5, 2.5)

        def arrive() -> None:
            if not network.up:
                return
            value, error = None, None
            try:
                value = work()
            except FencedError as refused:
                error = refused
            if kernel.chance(faults.lost_answer) or not network.reaches(source):
                return
            if writes and kernel.now < self.muted.get(source.name, 0.0):
                return
            kernel.at(network.delay(), lambda: outcome.settle(value, error))

        assert sent_at <= kernel.now
        kernel.at(transit_s, arrive)
        return outcome

    # Following one subject

    def subscribe(self, program: Program, subject: str, receive: Callable[[Entry], None]) -> None:
        """Republished messages of one subject; they may be lost and doubled."""
        self._live.setdefault(subject, []).append((program, receive))

    def unsubscribe(self, subject: str, receive: Callable[[Entry], None]) -> None:
        self._live[subject] = [pair for pair in self._live.get(subject, []) if pair[1] is not receive]

    def _republish(self, entry: Entry, program: Program, receive: Callable[[Entry], None]) -> None:
        network, kernel = self._network, self._kernel
        if kernel.chance(network.faults.lost_hint):
            return

        def arrive() -> None:
            if program.up and network.reaches(program):
                program.after(0.0, lambda: receive(entry))

        for _ in range(1 + kernel.chance(network.faults.doubled_hint)):
            kernel.at(kernel.random.expovariate(1.0 / network.faults.lag_s), arrive)


class Follower:
    """`turboserve.bus.log.follow` as a task: all messages of one subject, each once, in order."""

    def __init__(
        self, stream: Stream, program: Program, subject: str, after: int, take: Callable[[Entry], None]
    ) -> None:
        self._stream, self._program, self._subject = stream, program, subject
        self._take = take
        self._position = after
        self._queue: deque[Entry] = deque()
        self._dropped = False
        self._wake: Awaited[bool] | None = None
        self._over = False

    def start(self) -> None:
        self._stream.subscribe(self._program, self._subject, self._receive)
        self._program.spawn(self._run())

    def stop(self) -> None:
        self._over = True
        self._stream.unsubscribe(self._subject, self._receive)
        if self._wake is not None:
            self._wake.settle(False)

    def _receive(self, entry: Entry) -> None:
        if len(self._queue) >= BACKLOG:
            self._dropped = True
            return
        self._queue.append(entry)
        if self._wake is not None:
            self._wake.settle(True)

    async def _run(self) -> None:
        caught_up = False
        while not self._over:
            if not caught_up:
                try:
                    entry = await self._stream.read_next(self._program, self._subject, self._position + 1)
                except DeadlineError:
                    await sleep(RETRY_S)
                    continue
                if entry is None:
                    caught_up = True
                else:
                    self._deliver(entry)
                continue
            if self._dropped and not self._queue:
                self._dropped = caught_up = False
                continue
            if not self._queue:
                self._wake = Awaited()
                self._program.kernel.at(QUIET_S, self._quiet(self._wake))
                woken = await self._wake
                self._wake = None
                if not woken:
                    caught_up = False
                    continue
            live = self._queue.popleft()
            if live.sequence <= self._position:
                continue
            if self.misses(live):
                caught_up = False
                continue
            self._deliver(live)

    def misses(self, live: Entry) -> bool:
        """Whether one before this was lost on the way: read on from the log."""
        return live.before > self._position

    def _quiet(self, wake: Awaited[bool]) -> Callable[[], None]:
        return lambda: wake.settle(False)

    def _deliver(self, entry: Entry) -> None:
        if not self._over:
            self._position = entry.sequence
            self._take(entry)
