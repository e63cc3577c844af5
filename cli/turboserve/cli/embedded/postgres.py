"""Postgres on a loopback TCP port with a password, also when the stack is run by root."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import asyncpg

from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.layout import write_private
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import EmbeddedServer, NotReady, ServerFailed

USER = "turboserve"
DATABASE = "turboserve"
UNPRIVILEGED = "nobody"
"""Postgres refuses to run as root. This user exists on every Linux, so none has to be made."""


class PostgresServer(EmbeddedServer):
    """`settings` are further server settings, such as `fsync=off` for data nobody will miss."""

    name = "postgres"
    stop_signal = signal.SIGINT  # Fast shutdown: SIGTERM would wait for every client to leave.
    death_signal = signal.SIGQUIT  # Immediate shutdown: the postmaster takes its children with it.
    stop_grace_s = 10.0

    def __init__(self, directory: Path, port: int, password: str, settings: Sequence[str] = ()) -> None:
        super().__init__(directory, port)
        self.password = password
        self.settings = settings

    def url(self, database: str = DATABASE) -> str:
        return f"postgresql://{USER}:{self.password}@{HOST}:{self.port}/{database}"

    @property
    def cluster(self) -> Path:
        return self.directory / "data"

    def owner(self) -> tuple[int, int] | None:
        if os.geteuid() != 0:
            return None
        entry = pwd.getpwnam(UNPRIVILEGED)
        return entry.pw_uid, entry.pw_gid

    def stale_files(self) -> Sequence[Path]:
        # Its process id may by now be somebody else's, which Postgres would take for itself still running.
        return (self.cluster / "postmaster.pid",)

    def program(self) -> list[str]:
        settings = [
            f"listen_addresses={HOST}",
            f"port={self.port}",
            # No socket file: its path would be limited to 107 bytes, and the data directory's is not ours.
            "unix_socket_directories=",
            "shared_buffers=32MB",
            "max_connections=60",
            "log_line_prefix=",
            # After a crash: one call for the file system instead of one for each of a thousand files.
            "recovery_init_sync_method=syncfs",
            *self.settings,
        ]
        command = [str(binaries.postgres("postgres")), "-D", str(self.cluster)]
        return command + [part for setting in settings for part in ("-c", setting)]

    async def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (self.cluster / "PG_VERSION").exists():
            return
        # In a place of its own first: half a cluster must not be taken for a whole one.
        fresh = self.directory / "initdb"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        password_file = fresh / "password"
        write_private(password_file, self.password)
        owner = self.owner()
        if owner is not None:
            os.chown(fresh, *owner)
            os.chown(password_file, *owner)
            os.chown(self.directory, *owner)
        await self._initdb(fresh / "data", password_file)
        (fresh / "data").rename(self.cluster)
        shutil.rmtree(fresh)

    async def _initdb(self, cluster: Path, password_file: Path) -> None:
        command = self.guarded(
            [
                str(binaries.postgres("initdb")),
                *("-D", str(cluster), "-U", USER, f"--pwfile={password_file}"),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-instructions"),
                "--no-sync",
            ]
        )
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise ServerFailed(f"postgres: initdb ended with status {process.returncode}: {output.decode()}")

    async def probe(self) -> None:
        """Connects, and makes the stack's database if it is not there yet."""
        # Asked first, since every connection refused during recovery would be logged as FATAL.
        if self._status() != "ready":
            raise NotReady("postgres: still starting")
        await ensure_database(self.url("postgres"), DATABASE)

    def _status(self) -> str:
        try:
            lines = (self.cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return ""
        return lines[7].strip() if len(lines) > 7 else ""


async def ensure_database(admin_url: str, database: str, template: str | None = None) -> None:
    """Make `database` (as a copy of `template`) unless it exists; raises NotReady while nobody answers."""
    try:
        connection = await asyncpg.connect(admin_url, timeout=5.0)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise NotReady(f"postgres: {error}") from error
    try:
        if not await connection.fetchval("select 1 from pg_database where datname = $1", database):
            source = f' template "{template}"' if template else ""
            await connection.execute(f'create database "{database}"{source}')
    finally:
        await connection.close()
