"""What the supervisor and the tests need to know of a server."""

from __future__ import annotations

import abc
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from turboserve.cli.embedded import binaries


class NotReady(Exception):
    """The server does not answer yet."""


class ServerFailed(Exception):
    """A server's files could not be prepared; the message carries what its tool said."""


class EmbeddedServer(abc.ABC):
    """One server: how to prepare its files, start it under a guard, and ask whether it serves.

    `prepare` is repeated before every start and leaves existing data alone. `command` is the whole command
    line, guard included. `probe` makes a real connection and raises NotReady until the server does its work.
    """

    name: str
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    stop_grace_s: float = 5.0

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port

    @property
    def pid_file(self) -> Path:
        """Holds the process id of the server itself, not of its guard."""
        return self.directory / "server.pid"

    @abc.abstractmethod
    async def prepare(self) -> None:
        """Write configuration and, the first time, data. Raises ServerFailed."""

    @abc.abstractmethod
    def program(self) -> list[str]:
        """The server's own command line, with an absolute path first."""

    @abc.abstractmethod
    async def probe(self) -> None:
        """Connect and ask for something real; raises NotReady."""

    def stale_files(self) -> Sequence[Path]:
        """Files of an earlier run that may keep the server from starting; removed once nobody holds them."""
        return ()

    def owner(self) -> tuple[int, int] | None:
        """User and group ids to run as, when the current ones will not do."""
        return None

    def command(self) -> list[str]:
        return self.guarded(
            self.program(),
            "--lock",
            str(self.directory / "lock"),
            "--pid-file",
            str(self.pid_file),
            *(part for path in self.stale_files() for part in ("--remove", str(path))),
        )

    def guarded(self, program: Sequence[str], *options: str) -> list[str]:
        """`program` under a guard that runs it as the server's owner."""
        owner = self.owner()
        as_owner = [] if owner is None else ["--uid", str(owner[0]), "--gid", str(owner[1])]
        return [
            *(sys.executable, "-I", "-S", str(binaries.GUARD)),
            *("--stop-signal", str(int(self.stop_signal)), "--death-signal", str(int(self.death_signal))),
            *("--grace", str(self.stop_grace_s)),
            *as_owner,
            *options,
            "--",
            *program,
        ]


async def wait_ready(server: EmbeddedServer, limit_s: float) -> None:
    """Probe until the server serves; raises NotReady with the last reason after `limit_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        try:
            return await server.probe()
        except NotReady:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.03)
