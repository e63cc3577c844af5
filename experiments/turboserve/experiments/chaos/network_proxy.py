"""TCP proxies that make a network slow or lossy: delay, bandwidth, silence, resets.

A proxy works on bytes of a connection, above the kernel's TCP. So a lost packet is a delay here, as it is to
an application, and a connection that a firewall drops is one whose bytes stop.

All proxies run on one event loop in a thread of their own, so a busy caller delays no bytes.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

HOST = "127.0.0.1"
READ_BYTES = 65_536
HELD_BYTES = 262_144
"""Maximum of bytes that a proxy holds in each direction of a connection. More stay with the sender."""
TICK_S = 0.05
"""Interval at which a held direction looks at the conditions again, seconds."""
CLOSE_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class NetworkConditions:
    """The conditions of one proxy's connections. Times are in seconds, and are those of one direction."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Maximum of a random addition to each read's delay. Bytes stay in order."""
    bytes_per_s: float | None = None
    """Bandwidth of each connection in each direction. None: no limit."""
    stops_requests: bool = False
    """No byte of a client reaches the server. The connection stays open."""
    stops_answers: bool = False
    """No byte of the server reaches a client."""
    lifetime_s: float | None = None
    """Mean time after which a connection is reset, exponentially distributed. None: no resets."""
    refuses: bool = False
    """New connections are reset."""


UNDISTURBED = NetworkConditions()


class ConnectionProxy:
    """Relays connections from a port of its own to `target`, under `conditions`.

    `conditions` may change at any time, and applies to open connections as well. What is random depends on
    `seed` and on the number of the connection alone.
    """

    def __init__(self, target: Callable[[], tuple[str, int]], seed: int = 0) -> None:
        """`target` returns host and port. Each new connection calls it."""
        self._target, self._seed = target, seed
        self.conditions = UNDISTURBED
        self.connections = 0
        """Number of connections so far."""
        self.resets = 0
        """Number of connections that the proxy has reset."""
        self.port = 0
        self._open: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        self._listener = listener = socket.create_server((HOST, 0), backlog=256)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._spawn(self._accept(listener))

    async def stop(self) -> None:
        """Close the port and all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def reset(self) -> None:
        """Reset all connections, as when a firewall forgets them. Call it on the proxy's event loop."""
        for task in self._open.values():
            self.resets += 1
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            if self.conditions.refuses:
                _reset_on_close(client)
                client.close()
                continue
            self.connections += 1
            number = self.connections
            task = self._open[number] = self._spawn(self._relay(number, client))
            task.add_done_callback(partial(self._closed, number))

    def _closed(self, number: int, task: asyncio.Task[None]) -> None:
        del self._open[number]

    async def _relay(self, number: int, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server = socket.socket()
        chance = random.Random(f"{self._seed} {number}")
        ends, ended = (client, server), False
        try:
            for each in ends:
                each.setblocking(False)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(server, self._target())
            requests = _Direction(self, random.Random(chance.random()), lambda now: now.stops_requests)
            answers = _Direction(self, random.Random(chance.random()), lambda now: now.stops_answers)
            async with asyncio.TaskGroup() as group:
                age = group.create_task(self._age(chance))
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(requests.pump(client, server))
                    pumps.create_task(answers.pump(server, client))
                age.cancel()
            ended = True
        except* OSError:
            pass
        finally:
            for each in ends:
                if not ended:
                    _reset_on_close(each)
                each.close()

    async def _age(self, chance: random.Random) -> None:
        """Raise ConnectionResetError once the connection's time is over, if the conditions limit it."""
        left = chance.expovariate(1.0)
        while True:
            await asyncio.sleep(TICK_S)
            lifetime_s = self.conditions.lifetime_s
            if lifetime_s is not None and (left := left - TICK_S / lifetime_s) <= 0:
                self.resets += 1
                raise ConnectionResetError


class _Direction:
    """One direction of one connection: reads, holds bytes until they are due, writes."""

    def __init__(
        self, proxy: ConnectionProxy, chance: random.Random, stops: Callable[[NetworkConditions], bool]
    ) -> None:
        self._proxy, self._chance, self._stops = proxy, chance, stops
        self._held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Event()

    async def pump(self, source: socket.socket, target: socket.socket) -> None:
        """Relay until `source` ends, then end `target`'s input. Raises OSError."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(source))
            group.create_task(self._write(target))

    async def _read(self, source: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            data = await loop.sock_recv(source, READ_BYTES)
            now = self._proxy.conditions
            due_s = max(due_s, time.monotonic() + now.delay_s + self._chance.uniform(0.0, now.jitter_s))
            self._held.append((due_s, data))
            self._held_bytes += len(data)
            self._changed.set()
            if not data:
                return
            while self._held_bytes >= HELD_BYTES:
                await self._wait()

    async def _write(self, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._held:
                await self._wait()
            due_s, data = self._held[0]
            if self._stops(self._proxy.conditions):
                await asyncio.sleep(TICK_S)
                continue
            if (early_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
                continue
            self._held.popleft()
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            rate = self._proxy.conditions.bytes_per_s
            part = data if rate is None else data[: max(1, int(rate * TICK_S))]
            if len(part) < len(data):
                self._held.appendleft((due_s, data[len(part) :]))
            await loop.sock_sendall(target, part)
            self._held_bytes -= len(part)
            self._changed.set()
            if rate is not None:
                await asyncio.sleep(len(part) / rate)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class ProxiedNetwork:
    """Proxies by name, in a thread of their own from entry to exit. Methods may be called from any thread."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network proxies", daemon=True)
        self._proxies: dict[str, ConnectionProxy] = {}

    def __enter__(self) -> ProxiedNetwork:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for proxy in self._proxies.values():
            with suppress(TimeoutError):
                self._run(asyncio.wait_for(proxy.stop(), CLOSE_S))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, name: str, target: Callable[[], tuple[str, int]]) -> int:
        """Start a proxy to `target`, and return its port."""
        proxy = ConnectionProxy(target, self._seed + len(self._proxies))
        self._run(proxy.start())
        self._proxies[name] = proxy
        return proxy.port

    @property
    def names(self) -> list[str]:
        return [*self._proxies]

    def __getitem__(self, name: str) -> ConnectionProxy:
        return self._proxies[name]

    def set(self, conditions: NetworkConditions, *names: str) -> None:
        """Set the conditions of the proxies `names`, or of all."""
        for name in names or self._proxies:
            self._proxies[name].conditions = conditions

    def reset(self, *names: str) -> None:
        """Reset all connections of the proxies `names`, or of all."""
        for name in names or self._proxies:
            self._loop.call_soon_threadsafe(self._proxies[name].reset)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _reset_on_close(each: socket.socket) -> None:
    """Make `close` reset the connection (RST) instead of ending it in order."""
    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
