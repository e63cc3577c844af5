"""Connections between the workers of one host, and a group of two with each.

Every worker has a socket in one directory, which only the workers' user may enter. Of two workers, the one
with the smaller id connects. The peer's user id, which the kernel reports, authenticates it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from turboserve.contracts.errors import InvalidInputError
from turboserve.worker.engine.sequence_parallel import Exchange
from turboserve.worker.sequence_parallel.frames import VERSION, Greeting, PeerChannel
from turboserve.worker.sequence_parallel.group import GlooGroup, Group, NcclGroup
from turboserve.worker.transfer import rendezvous
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import AuthenticationError, TransferProtocolError

CONNECT_S = 5.0
"""Longest time in which a group must be ready, seconds."""
SUFFIX = ".sock"
_PATH_LIMIT = 107
"""Longest path of a Unix socket, bytes."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Identity:
    """What a worker tells its peers of itself."""

    worker: str
    model: str
    """See `Greeting.model`."""
    device: torch.device
    limit_s: float
    """Longest time of one exchange, seconds."""


class PeerGroup(Exchange, Protocol):
    """A group of two workers (`group.Group`)."""

    kind: str

    def one_forward(self) -> AbstractContextManager[None]:
        """Let all exchanges in the context together take at most as long as one may alone.

        So a donor's own sessions wait no longer for a home that is slow in each exchange.
        """
        ...

    def close(self) -> None:
        """Close the group. The other worker notices at its next exchange."""
        ...


@dataclass(eq=False)
class Peer:
    """Another worker of the host."""

    worker: str
    channel: PeerChannel
    group: PeerGroup

    def close(self) -> None:
        """Close connection and group."""
        self.channel.abort()
        self.group.close()


class PeerNetwork(Protocol):
    """How the workers of one host reach each other (`HostDirectory`)."""

    async def listen(self, serve: Callable[[PeerChannel], object]) -> None:
        """Listen from now on. `serve` gets each connection of a worker of this host, and closes it."""
        ...

    def later(self) -> list[str]:
        """Workers to which this one connects: those with a greater id."""
        ...

    async def connect(self, worker: str) -> PeerChannel:
        """Connect to a worker. Raises `OSError` and `AuthenticationError`."""
        ...

    async def group(self, channel: PeerChannel, own: Identity, agreed: Greeting, *, first: bool) -> PeerGroup:
        """Create the group on which the two ends of a channel have agreed. `first`: this one has connected.

        Raises `PartnerLostError`, and the errors of the channel.
        """
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class HostDirectory:
    """See `PeerNetwork`: the sockets of one host's workers, and groups of torch.distributed."""

    def __init__(self, directory: Path, worker: str) -> None:
        """Create the directory. Raises `InvalidInputError` where another user may enter it, and `OSError`."""
        self._directory, self._own = directory, directory / f"{worker}{SUFFIX}"
        if len(os.fsencode(self._own)) > _PATH_LIMIT:
            raise InvalidInputError(
                f"sequence_parallel_directory: {self._own} exceeds {_PATH_LIMIT} bytes",
                field="sequence_parallel_directory",
                limit=_PATH_LIMIT,
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidInputError(
                f"sequence_parallel_directory: {directory} must belong to the worker's user, with mode 700",
                field="sequence_parallel_directory",
                limit="0700",
            )
        self._server: asyncio.Server | None = None

    async def listen(self, serve: Callable[[PeerChannel], object]) -> None:
        """Listen from now on. `serve` gets each connection of this user, and closes it. Raises `OSError`."""

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = PeerChannel(reader, writer)
            if _same_user(writer):
                serve(channel)
            else:
                channel.abort()

        self._own.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(connected, self._own)

    def later(self) -> list[str]:
        """Workers to which this one connects: those with a greater id."""
        names = {path.name.removesuffix(SUFFIX) for path in self._directory.glob(f"*{SUFFIX}")}
        return sorted(name for name in names if name > self._own.name.removesuffix(SUFFIX))

    async def connect(self, worker: str) -> PeerChannel:
        """Connect to a worker. Raises `OSError`, and `AuthenticationError` for a process of another user."""
        path = self._directory / f"{worker}{SUFFIX}"
        # A refused connection leaves the path: its worker may be about to listen.
        reader, writer = await asyncio.open_unix_connection(path)
        channel = PeerChannel(reader, writer)
        if not _same_user(writer):
            channel.abort()
            raise AuthenticationError(f"{path}: served by another user")
        return channel

    async def group(self, channel: PeerChannel, own: Identity, agreed: Greeting, *, first: bool) -> Group:
        """See `PeerNetwork.group`. A thread creates it: that blocks until both ends do so."""
        store = rendezvous.new_store(CONNECT_S)
        key, rank = bytes.fromhex(agreed.key), 0 if first else 1

        def make() -> Group:
            if own.device.type == "cuda":
                return NcclGroup(store, rank, key, agreed.group, CONNECT_S, own.limit_s, own.device)
            return GlooGroup(store, rank, key, agreed.group, CONNECT_S, own.limit_s)

        making = asyncio.ensure_future(asyncio.to_thread(make))
        try:
            await rendezvous.exchange(channel, store, making, Deadline(2 * CONNECT_S))
        except BaseException:
            making.add_done_callback(_drop)
            raise
        return making.result()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        self._own.unlink(missing_ok=True)


def _same_user(writer: asyncio.StreamWriter) -> bool:
    """Whether a process of this user is at the other end."""
    connection = writer.get_extra_info("socket")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.getuid())


async def meet(network: PeerNetwork, channel: PeerChannel, own: Identity, *, first: bool) -> Peer:
    """Exchange greetings and create the group. `first`: this worker has connected.

    Raises `TransferProtocolError` for a worker of another model, and the errors of channel and group.
    """
    greeting = Greeting(
        worker=own.worker,
        model=own.model,
        device=own.device.type,
        key=secrets.token_hex(32),
        group=secrets.token_hex(32),
    )
    if first:
        await channel.post(greeting, CONNECT_S)
    found = await channel.next(CONNECT_S)
    if not isinstance(found, Greeting):
        raise TransferProtocolError(f"{found.type}: the first frame is a greeting")
    wanted = (VERSION, own.model, own.device.type)
    if (found.version, found.model, found.device) != wanted:
        raise TransferProtocolError(f"{found.worker}: version, weights or device differ")
    if not first:
        await channel.post(greeting, CONNECT_S)
    agreed = greeting if first else found
    return Peer(found.worker, channel, await network.group(channel, own, agreed, first=first))


def _drop(made: asyncio.Future[Group]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
