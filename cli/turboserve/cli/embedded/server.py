"""The interface of an embedded server, for the supervisor and tests."""

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
"""User of the servers if this process runs as root. This user exists on every Linux."""


class NotReadyError(Exception):
    """The server does not answer yet. Retry."""


class ServerUnresponsiveError(NotReadyError):
    """The server accepts connections and does not answer: it hangs or is overloaded."""


class ServerUnhealthyError(NotReadyError):
    """The server answers that it cannot do its work. A restart may help."""


class ServerFullError(ServerUnhealthyError):
    """The server works and has reached its own storage limit. A restart does not help."""


class ServerSetupError(Exception):
    """A server's files could not be prepared. The message has the output of the server's tool."""


class EmbeddedServer(abc.ABC):
    """One server: how to prepare its files, start it under a guard, and check its health.

    - `prepare` runs before every start and keeps existing data.
    - `command` is the whole command line, guard included.
    - `probe` makes a real connection and raises NotReadyError until the server does its work.
    - `alive` checks the server from then on.
    """

    name: str
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    stop_grace_s: float = 5.0
    answer_s: float = 3.0
    """Time in which `alive` gets an answer from a healthy server, seconds."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port

    @property
    def pid_file(self) -> Path:
        """File with the process id of the server itself, not of its guard."""
        return self.directory / "server.pid"

    @abc.abstractmethod
    async def prepare(self) -> None:
        """Write the configuration and, the first time, the data. Raises ServerSetupError."""

    @abc.abstractmethod
    def program(self) -> list[str]:
        """Return the server's own command line. It begins with an absolute path."""

    @abc.abstractmethod
    async def probe(self) -> None:
        """Connect and make a real request. Raises NotReadyError."""

    @abc.abstractmethod
    async def alive(self) -> None:
        """Write something and wait for the acknowledgment.

        Raises NotReadyError if the server does not answer, ServerUnhealthyError if it answers that it cannot
        write, and ServerFullError if it has reached its own storage limit.
        """

    def stale_files(self) -> Sequence[Path]:
        """Return files of an earlier run that may prevent a start. The guard removes them under its lock."""
        return ()

    @property
    def home(self) -> str:
        """The path by which the server itself reaches `directory`: see `guard.enter`."""
        return f"/proc/self/fd/{FOLDER_FD}"

    def owner(self) -> tuple[int, int] | None:
        """Return the server's user and group id if this process runs as root. None: this process's own."""
        if os.geteuid() != 0:
            return None
        entry = pwd.getpwnam(UNPRIVILEGED)
        return entry.pw_uid, entry.pw_gid

    def make_directory(self) -> None:
        """Create the server's folder if it is missing, make it private, and give its files to the owner."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory.chmod(0o700)
        owner = self.owner()
        if owner is not None and self.directory.stat().st_uid != owner[0]:
            give_to(self.directory, owner)

    def write_config(self, name: str, text: str) -> None:
        """Replace a file of the server's folder. Only the server can read it.

        A file that already has this text is not rewritten, so that the server can start on a full disk.
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
        """Return the command line of a guard that runs `program` as the server's owner."""
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
    """Probe until the server serves. Raises NotReadyError with the last reason after `limit_s` seconds."""
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
    """Make `owner` the owner of `folder` and everything below it. Does not follow links."""
    for _, folders, files, descriptor in os.fwalk(folder, topdown=False):
        for name in (*folders, *files):
            os.chown(name, *owner, dir_fd=descriptor, follow_symlinks=False)
    # The folder comes last: its owner shows whether everything below was changed.
    os.chown(folder, *owner, follow_symlinks=False)
