"""The broker: its connections, its subscriptions, and its faults."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from turboserve.simulation.runtime.broker.client import MemoryClient
from turboserve.simulation.runtime.broker.jetstream import API, JetStream, Storage
from turboserve.simulation.runtime.broker.link import Interest, Link, LinkedClient
from turboserve.simulation.runtime.broker.messages import INBOX_PREFIX, Kind, Message
from turboserve.simulation.runtime.broker.network import Network
from turboserve.simulation.runtime.broker.patterns import PatternIndex
from turboserve.simulation.runtime.process import Process, current, enter

MAX_PAYLOAD_BYTES = 8 * 2**20
"""The limit in the configuration of the embedded broker."""
WALL_OFFSET_S = 1_700_000_000.0
NO_RESPONDERS = {"Status": "503"}
# Python 3.11 takes ten times as long for a member of an enumeration as for a global name.
_REQUEST, _ANSWER, _HINT = Kind.REQUEST, Kind.ANSWER, Kind.HINT


class MemoryBroker:
    """One nats-server with JetStream. It must be used on one event loop only."""

    def __init__(
        self,
        generator: random.Random | None = None,
        network: Network | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        max_payload: int = MAX_PAYLOAD_BYTES,
        max_store_bytes: int | None = None,
        wall_offset_s: float = WALL_OFFSET_S,
    ) -> None:
        """Create a broker.

        Args:
            loop: The running loop if None.
            max_store_bytes: Bytes that streams may reserve; None for no limit.
            wall_offset_s: Added to the loop's time, it gives the wall-clock times of messages and streams.
        """
        self.random = generator or random.Random(0)
        self.network = network or Network()
        self.loop = loop or asyncio.get_running_loop()
        self.max_payload = max_payload
        self.context: Context = copy_context()
        """Context of the broker's own callbacks, which belong to no process."""
        self.context.run(enter, None)
        self.slow_s, self.up, self.undisturbed = 0.0, True, True
        """Whether nothing has ever held or delayed a connection: no message waits for an earlier one."""
        self.jetstream = JetStream(self, max_store_bytes)
        self.on_message: Callable[[str, bytes], None] | None = None
        """Called with subject and data of each message that a client has published, except answers."""
        self._wall_offset_s = wall_offset_s
        self._frozen_until = 0.0
        self._cut_until: dict[LinkedClient | Process, float] = {}
        self._links: dict[Link, None] = {}
        self._silent_since: dict[Link, float] = {}
        self._interests: PatternIndex[Interest] = PatternIndex()

    def wall(self) -> float:
        """Return the seconds since the epoch."""
        return self.loop.time() + self._wall_offset_s

    # Clients

    async def connect(
        self, servers: object = None, *, process: Process | None = None, **options: Any
    ) -> MemoryClient:
        """Connect as `nats.connect`, for the running process or the given one; `servers` is not used."""
        client = MemoryClient(self, process or current())
        await client.connect(servers, **options)
        return client

    async def accept(self, client: MemoryClient, timeout_s: float) -> Link:
        """Open a connection. Raises ConnectionRefusedError, or TimeoutError if the broker does not answer."""
        await asyncio.sleep(2 * self._round_trip_s(client))
        now = self.loop.time()
        ready_at = max(self._frozen_until, self._cut_for(client))
        if ready_at > now:
            # The system accepts connections for a frozen process, and drops packets of one that is cut off.
            await asyncio.sleep(min(ready_at - now, timeout_s))
            if max(self._frozen_until, self._cut_for(client)) > self.loop.time():
                raise TimeoutError("the broker does not answer")
        if not self.up:
            raise ConnectionRefusedError("no broker listens")
        self._forget_dead()
        link = Link(self, client)
        self._links[link] = None
        return link

    def _round_trip_s(self, client: MemoryClient) -> float:
        return sum(self.network.delay(client, Kind.HINT, way) for way in (True, False)) + self.slow_s

    def disconnect(self, link: Link) -> None:
        """Remove a connection, with its subscriptions."""
        link.open_at_broker = False
        self._links.pop(link, None)
        self._silent_since.pop(link, None)
        for interest in link.interests.values():
            self._interests.remove(interest.pattern, interest)
        link.interests.clear()

    # What clients send

    def subscribe(self, interest: Interest) -> None:
        before = interest.link.interests.get(interest.sid)
        if before is not None:
            self._interests.remove(before.pattern, before)
        interest.link.interests[interest.sid] = interest
        self._interests.add(interest.pattern, interest)

    def unsubscribe(self, interest: Interest) -> None:
        interest.link.interests.pop(interest.sid, None)
        self._interests.remove(interest.pattern, interest)

    def publish(self, link: Link, message: Message) -> None:
        """Handle a message that a client published."""
        subject, reply = message.subject, message.reply
        answers = subject.startswith(INBOX_PREFIX)
        if self.on_message is not None and not answers:
            self.on_message(subject, message.data)
        kind = _REQUEST if reply else _ANSWER if answers else _HINT
        delivered = self.route(subject, message, kind)
        if subject.startswith(API):
            delivered = self.jetstream.request(message) or delivered
        elif stream := self.jetstream.capturing(subject):
            delivered = self.jetstream.append(stream, message) or delivered
        if not delivered and reply:
            self.route(reply, Message(reply, headers=NO_RESPONDERS), Kind.API_ANSWER)

    def captures(self, subject: str) -> bool:
        """Return whether a stream stores messages on `subject`."""
        return self.jetstream.capturing(subject) is not None

    def listens(self, subject: str) -> bool:
        """Return whether a client subscribes to `subject`."""
        for interest in self._interests.match(subject):  # noqa: SIM110
            if self._connected(interest.link):
                return True
        return False

    def route(self, subject: str, message: Message, kind: Kind) -> bool:
        """Deliver to every subscriber of `subject`, and to one member of each queue group.

        Returns whether there is a subscriber. The message names its own subject, which need not be `subject`.
        """
        found = self._interests.match(subject)
        if not found:
            return False
        delivered = False
        groups: dict[str, list[Interest]] | None = None
        at_once = self.network.at_once and self.undisturbed
        for interest in found:
            process = (link := interest.link).process
            if process is not None and not process.alive and not self._connected(link):
                continue
            if interest.queue:
                if groups is None:
                    groups = defaultdict(list)
                groups[interest.queue].append(interest)
            else:
                if interest.left is not None:
                    self._deliver(interest, message, kind)
                elif not at_once:
                    link.deliver(interest.sid, kind, message)
                elif link.open_at_client:
                    # As `Link.deliver`, without its frame.
                    link.client.take(link, interest.sid, message)
                delivered = True
        if groups is not None:
            for members in groups.values():
                index = self.random.randrange(len(members)) if len(members) > 1 else 0
                self._deliver(members[index], message, kind)
                delivered = True
        return delivered

    def _deliver(self, interest: Interest, message: Message, kind: Kind) -> None:
        if interest.left is not None:
            interest.left -= 1
            if interest.left <= 0:
                self.unsubscribe(interest)
        interest.link.deliver(interest.sid, kind, message)

    def _connected(self, link: Link) -> bool:
        """Return whether the broker has this connection.

        A killed process's connection ends, unless it is cut off.
        """
        process = link.process
        if process is None or process.alive or (self._cut_until and self._is_cut(link.client)):
            return True
        self.disconnect(link)
        return False

    def _forget_dead(self) -> None:
        for link in list(self._links):
            self._connected(link)

    # Faults

    def held_until(self, link: Link, to_broker: bool) -> float:
        """Return the time before which nothing arrives in this direction of the link."""
        until = self._frozen_until if to_broker else 0.0
        if self._cut_until:
            until = max(until, self._cut_for(link.client))
        return until

    def stop(self) -> None:
        """Kill the broker. Connections break and messages on their way to it are lost; streams are kept."""
        self.up = False
        self._frozen_until = 0.0
        for link in list(self._links):
            self.disconnect(link)
            link.end()
        self.jetstream.restarted()

    def start(self, *, lost_streams: bool = False, written_until: float | None = None) -> None:
        """Start the broker again. `lost_streams`: whether it starts on another disk.

        `written_until`: loop time from which on its disk has lost what it stored; None: it has lost none.
        """
        if lost_streams:
            self.jetstream.lose_streams()
        elif written_until is not None:
            self.jetstream.lose_after(written_until + self._wall_offset_s)
        self.up = True

    def freeze(self, seconds: float) -> None:
        """Freeze as with SIGSTOP, and SIGCONT after `seconds`: messages are then processed all at once."""
        self.undisturbed = False
        self._frozen_until = max(self._frozen_until, self.loop.time() + seconds)

    def slow_down(self, seconds: float) -> None:
        """Delay all messages on their way to the broker by `seconds` from now on."""
        self.undisturbed, self.slow_s = False, seconds

    @property
    def frozen_until(self) -> float:
        return self._frozen_until

    def cut_off(self, who: MemoryClient | Process, seconds: float) -> None:
        """Cut the broker off from a client, or from all clients of a process, for `seconds`.

        Connections stay until the client's pings time out. What a side has sent by then arrives afterwards.
        """
        self.undisturbed = False
        until = self.loop.time() + seconds
        self._cut_until[who] = max(self._cut_until.get(who, 0.0), until)

    def disconnect_client(self, client: MemoryClient) -> None:
        """Break the client's connection; the client connects again."""
        for link in list(self._links):
            if link.client is client:
                self.disconnect(link)
                link.end()

    def drop_silent(self, silence_s: float) -> None:
        """Disconnect clients that are frozen or cut off in every call within `silence_s`.

        So does a nats-server whose pings get no answer. Requests to their queue groups then reach others.
        """
        now = self.loop.time()
        if not self.up or self._frozen_until > now:
            return
        for link in list(self._links):
            frozen = link.process is not None and link.process.frozen_until > now
            if not frozen and not self._is_cut(link.client):
                self._silent_since.pop(link, None)
            elif now - self._silent_since.setdefault(link, now) >= silence_s:
                self.disconnect(link)
                link.end()

    def set_storage(self, storage: Storage) -> None:
        """Set what happens to appends. Core messages are not affected."""
        self.jetstream.storage = storage

    def repair(self) -> None:
        """End all faults of the broker: it runs, reaches every client, and stores."""
        self._frozen_until = min(self._frozen_until, self.loop.time())
        self._cut_until.clear()
        self.slow_s = 0.0
        self.jetstream.storage = Storage.STORES
        self.up = True
        for link in self._links:
            link.resume()

    def _cut_for(self, client: LinkedClient) -> float:
        cuts = self._cut_until
        until = cuts.get(client, 0.0)
        return max(until, cuts.get(client.process, 0.0)) if client.process is not None else until

    def _is_cut(self, client: LinkedClient) -> bool:
        return self._cut_for(client) > self.loop.time()
