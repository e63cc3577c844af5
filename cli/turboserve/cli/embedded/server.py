"""What the supervisor and the tests need to know of a server."""

from __future__ import annotations

import abc
import asyncio
import os
import pwd
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.guard import FOLDER_FD
from turboserve.cli.embedded.layout import write_private

UNPRIVILEGED = "nobody"
"""Whom servers run as under root. This user exists on every Linux, so none has to be made."""


class NotReadyError(Exception):
    """The server does not answer yet."""


class ServerUnresponsiveError(NotReadyError):
    """The server accepts connections and does not answer: it stands still, or it is overloaded."""


class ServerUnhealthyError(NotReadyError):
    """The server answers that it cannot do its work; a restart may help."""


class ServerFullError(ServerUnhealthyError):
    """The server is well and has no room for what it is given by its own limits: a restart does not help."""


class ServerSetupError(Exception):
    """A server's files could not be prepared; the message carries what its tool said."""


class EmbeddedServer(abc.ABC):
    """One server: how to prepare its files, start it under a guard, and ask whether it serves.

    `prepare` is repeated before every start and leaves existing data alone. `command` is the whole command
    line, guard included. `probe` makes a real connection and raises NotReadyError until the server does its
    work. `alive` is for as long as the server runs after that.
    """

    name: str
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    stop_grace_s: float = 5.0
    answer_s: float = 3.0
    """Seconds within which `alive` has an answer from a server that is well."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port

    @property
    def pid_file(self) -> Path:
        """Holds the process id of the server itself, not of its guard."""
        return self.directory / "server.pid"

    @abc.abstractmethod
    async def prepare(self) -> None:
        """Write configuration and, the first time, data. Raises ServerSetupError."""

    @abc.abstractmethod
    def program(self) -> list[str]:
        """The server's own command line, with an absolute path first."""

    @abc.abstractmethod
    async def probe(self) -> None:
        """Connect and ask for something real; raises NotReadyError."""

    @abc.abstractmethod
    async def alive(self) -> None:
        """Write something and see it acknowledged.

        Raises NotReadyError if the server does not answer, ServerUnhealthyError if it answers that it cannot
        write, ServerFullError if it is full by its own limits.
        """

    def stale_files(self) -> Sequence[Path]:
        """Files of an earlier run that may keep the server from starting; removed once nobody holds them."""
        return ()

    @property
    def home(self) -> str:
        """The path by which the server itself reaches `directory`: see `guard.enter`."""
        return f"/proc/self/fd/{FOLDER_FD}"

    def owner(self) -> tuple[int, int] | None:
        """User and group ids to run as: under root those of an unprivileged user, else the current ones."""
        if os.geteuid() != 0:
            return None
        entry = pwd.getpwnam(UNPRIVILEGED)
        return entry.pw_uid, entry.pw_gid

    def make_directory(self) -> None:
        """Make the server's folder if it is missing, for its owner alone; its files become the owner's."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory.chmod(0o700)
        owner = self.owner()
        if owner is not None and self.directory.stat().st_uid != owner[0]:
            give_to(self.directory, owner)

    def write_config(self, name: str, text: str) -> None:
        """Replace a file of the server's folder, readable by the server alone.

        One that has this text already is left alone: on a full disk the server must start all the same.
        """
        path = self.directory / name
        if path.is_symlink() or not path.exists() or path.read_text() != text:
            write_private(path, text, self.owner())

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
            *("--folder", str(self.directory)),
            *as_owner,
            *options,
            "--",
            str(binaries.reachable(Path(program[0]), owner)),
            *program[1:],
        ]


async def wait_ready(server: EmbeddedServer, limit_s: float) -> None:
    """Probe until the server serves; raises NotReadyError with the last reason after `limit_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        try:
            return await server.probe()
        except NotReadyError:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.03)


def give_to(folder: Path, owner: tuple[int, int]) -> None:
    """Make `owner` the owner of `folder` and of all below it, following no link."""
    for _, folders, files, descriptor in os.fwalk(folder, topdown=False):
        for name in (*folders, *files):
            os.chown(name, *owner, dir_fd=descriptor, follow_symlinks=False)
    # Last: its owner tells whether all of it was given.
    os.chown(folder, *owner, follow_symlinks=False)
