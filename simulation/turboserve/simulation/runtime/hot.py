"""The hot store in memory: keys with a time to live, a file synced once a second, faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turboserve.simulation.runtime.process import current
from turboserve.state_store.ports.hot import DEADLINE_S, RETRIES, HotRefusedError, HotUnavailableError
from turboserve.static_frozen import statically_frozen

T = TypeVar("T")

SYNC_S = 1.0
"""Interval at which Redis syncs its append-only file. A power loss discards later writes."""
PROBE_KEY = "write-probe"
PROBE_TTL_S = 60


@dataclass
class RedisBehavior:
    """Latencies of Redis. Fields may change during a run."""

    random: random.Random = field(default_factory=lambda: random.Random(0))
    command_s: float = 0.0
    """Time of one round trip: the mean of an exponential distribution if `varied`."""
    varied: bool = True
    immediate: bool = False
    """Whether a command without a delay is executed while it is sent, so that its client is not suspended."""

    def delay_s(self) -> float:
        """Return the time of one round trip."""
        if self.command_s <= 0.0 or not self.varied:
            return self.command_s
        return self.random.expovariate(1.0 / self.command_s)


@statically_frozen()
class _Value:
    """The value of a key: hash fields, chunks, or one number."""

    fields: Mapping[str, float] = field(default_factory=dict)
    chunks: Mapping[int, bytes] = field(default_factory=dict)
    epoch: int = -1
    """Epoch of the newest owner that wrote chunks."""
    begins: int = 0
    """Index of that owner's first chunk."""
    number: float | None = None
    expires_at: float = float("inf")


class _LateError(Exception):
    """The client waited `DEADLINE_S` without an answer. The server may still execute the command."""


class MemoryRedis:
    """One server. It belongs to no process."""

    def __init__(
        self, behavior: RedisBehavior | None = None, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.behavior = behavior or RedisBehavior()
        self.loop = loop or asyncio.get_running_loop()
        self.values: dict[str, _Value] = {}
        self.down = False
        self.refuses_writes = False
        """Whether writes fail, as with a full disk or memory. Reads are still answered."""
        self.run = 1
        self._frozen_until = 0.0
        self._slow_until, self._slow_s = 0.0, 0.0
        self._unsynced: list[tuple[float, str, _Value | None]] = []
        """Time of each recent write, its key, and the value before it."""
        self._context = Context()

    # Faults

    def crash(self, *, power_loss: bool = False) -> None:
        """Crash as with `kill -9`, which loses nothing.

        With `power_loss`, discard the writes of the last second.
        """
        self.down = True
        if power_loss:
            horizon = self.loop.time() - SYNC_S
            for at, key, before in reversed(self._unsynced):
                if at >= horizon:
                    self._set(key, before)
        self._unsynced.clear()

    def start(self, *, empty: bool = False) -> None:
        """Accept connections again, as another run of the server.

        With `empty`, start without the earlier data.
        """
        self.down = False
        self.run += 1
        if empty:
            self.values.clear()

    def freeze(self, seconds: float) -> None:
        """Freeze as with SIGSTOP: answer nothing for `seconds`, then execute what was sent."""
        self._frozen_until = max(self._frozen_until, self.loop.time() + seconds)

    def slow_down(self, seconds: float, command_s: float) -> None:
        """For `seconds`, each round trip takes `command_s` longer."""
        self._slow_until, self._slow_s = self.loop.time() + seconds, command_s

    # Commands

    def send(self, command: Callable[[], T], future: asyncio.Future[T]) -> None:
        """Send a client's command; `future` receives its answer."""
        delay_s = self.behavior.delay_s()
        if self._slow_until > self.loop.time():
            delay_s += self._slow_s
            self._limit(future)
        if delay_s > 0.0:
            self.loop.call_later(delay_s, self._arrive, command, future, context=self._context)
        else:
            self.loop.call_soon(self._arrive, command, future, context=self._context)

    @property
    def executes_at_once(self) -> bool:
        """Whether a command that is sent now is executed now."""
        behavior = self.behavior
        if not behavior.immediate or behavior.command_s > 0.0 or self.down:
            return False
        return max(self._slow_until, self._frozen_until) <= self.loop.time()

    def _limit(self, future: asyncio.Future[T]) -> None:
        """Set the client's deadline for a command that may take long."""
        self.loop.call_later(DEADLINE_S, _give_up, future, context=self._context)

    def _arrive(self, command: Callable[[], T], future: asyncio.Future[T]) -> None:
        if not self.down and self._frozen_until > self.loop.time():
            self._limit(future)
            self.loop.call_at(self._frozen_until, self._arrive, command, future, context=self._context)
            return
        try:
            if self.down:
                raise HotUnavailableError("connection refused")
            result = command()
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def get(self, key: str) -> _Value | None:
        """Return the value, or None if it is absent or expired."""
        value = self.values.get(key)
        return value if value is not None and value.expires_at > self.loop.time() else None

    def put(self, key: str, value: _Value | None) -> None:
        """Set the value, or delete it if `value` is None. Raises HotRefusedError."""
        if self.refuses_writes:
            raise HotRefusedError("MISCONF writes are refused: the disk is full")
        now = self.loop.time()
        if len(self._unsynced) > 1_000:
            self._unsynced = [entry for entry in self._unsynced if entry[0] >= now - SYNC_S]
        self._unsynced.append((now, key, self.values.get(key)))
        self._set(key, value)

    def _set(self, key: str, value: _Value | None) -> None:
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value


class MemoryHotStore:
    """`ports.hot.HotStore` of one process."""

    def __init__(self, server: MemoryRedis) -> None:
        self._server, self._process = server, current()

    async def keep_latents(
        self, key: str, index: int, epoch: int, value: bytes, *, kept: int, ttl_s: int
    ) -> None:
        def run() -> None:
            before = self._server.get(key) or _Value()
            if epoch < before.epoch:
                if before.begins - kept < index < before.begins and index not in before.chunks:
                    chunks = {**before.chunks, index: value}
                    self._server.put(key, replace(before, chunks=chunks))
                return
            new_owner = epoch > before.epoch
            chunks = {
                old: kept_value
                for old, kept_value in {**before.chunks, index: value}.items()
                if (old <= 0 or old > index - kept) and not (new_owner and old > index)
            }
            begins = index if new_owner else before.begins
            expires_at = self._expires_at(ttl_s)
            self._server.put(key, _Value(chunks=chunks, epoch=epoch, begins=begins, expires_at=expires_at))

        await self._execute(run)

    async def latents(self, key: str, index: int) -> bytes | None:
        def run() -> bytes | None:
            value = self._server.get(key)
            return None if value is None else value.chunks.get(index)

        return await self._execute(run)

    async def write(self, hashes: Mapping[str, Mapping[str, float]], *, ttl_s: int) -> None:
        def run() -> None:
            for key, fields in hashes.items():
                before = self._server.get(key)
                merged = {**before.fields, **fields} if before is not None else dict(fields)
                self._server.put(key, _Value(fields=merged, expires_at=self._expires_at(ttl_s)))

        await self._execute(run)

    async def read(self, keys: Sequence[str], fields: Sequence[str]) -> list[list[float | None]]:
        def run() -> list[list[float | None]]:
            values = [self._server.get(key) for key in keys]
            return [[None if value is None else value.fields.get(f) for f in fields] for value in values]

        return await self._execute(run)

    async def first(self, key: str, value: float, *, ttl_s: int) -> float:
        def run() -> float:
            before = self._server.get(key)
            number = value if before is None or before.number is None else before.number
            self._server.put(key, _Value(number=number, expires_at=self._expires_at(ttl_s)))
            return number

        return await self._execute(run)

    async def run_id(self) -> str:
        return await self._execute(lambda: f"run{self._server.run}")

    async def delete(self, key: str) -> None:
        await self._execute(lambda: self._server.put(key, None))

    async def probe(self) -> None:
        value = _Value(number=1.0, expires_at=self._expires_at(PROBE_TTL_S))
        await self._execute(lambda: self._server.put(PROBE_KEY, value))

    async def close(self) -> None:
        """Do nothing: there are no connections to close."""

    def _expires_at(self, ttl_s: int) -> float:
        return self._server.loop.time() + ttl_s

    async def _execute(self, command: Callable[[], T]) -> T:
        for _ in range(1 + RETRIES):
            if self._process is not None:
                self._process.check_alive()
            if self._server.executes_at_once:
                return command()
            future: asyncio.Future[T] = self._server.loop.create_future()
            self._server.send(command, future)
            with suppress(_LateError):
                return await future
        raise HotUnavailableError("no answer in time")


def _give_up(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(_LateError())
