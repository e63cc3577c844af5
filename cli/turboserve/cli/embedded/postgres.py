"""Postgres, with a loopback TCP port for the services' role and a socket file for the supervisor."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import (
    EmbeddedServer,
    NotReadyError,
    ServerSetupError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)
from turboserve.environment import SYSTEM, child

SUPERUSER = "turboserve"
"""The role that created the cluster. It can only log in over the socket file in the server's folder."""
ROLE = "turboserve_services"
"""The services' role. It owns the services' databases, and has no rights beyond them."""
DATABASE = "turboserve"
PROBE_TABLE = "create table if not exists supervisor_probe (id int primary key, written timestamptz not null)"
PROBE_WRITE = (
    "insert into supervisor_probe values (1, now()) on conflict (id) do update set written = excluded.written"
)
HBA_FILE = "pg_hba.conf"
HBA = f"""\
# Written before every start.
local all {SUPERUSER} scram-sha-256
host all {SUPERUSER} all reject
host all {ROLE} {HOST}/32 scram-sha-256
"""

PROVISION_ROLE = """
do $$ begin
  if not exists (select from pg_roles where rolname = '{role}') then
    create role {role};
  end if;
end $$;
alter role {role} with login nosuperuser nocreatedb nocreaterole noreplication nobypassrls
  password {password};
revoke connect on database postgres from public;
revoke connect on database template1 from public;
"""

ADOPT_OBJECTS = f"""
do $$ declare made record; begin
  for made in
    select format('alter %s %s owner to {ROLE}',
                  case c.relkind when 'v' then 'view' when 'm' then 'materialized view'
                                 when 'S' then 'sequence' else 'table' end,
                  c.oid::regclass) as change
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = 'public' and pg_get_userbyid(c.relowner) = '{SUPERUSER}'
      and c.relkind in ('r', 'p', 'v', 'm', 'S')
      -- The sequence of a column goes with its table.
      and not exists (select from pg_depend d where d.objid = c.oid and d.deptype in ('a', 'i')
                                                and d.classid = 'pg_class'::regclass and c.relkind = 'S')
    union all
    select format('alter type %s owner to {ROLE}', t.oid::regtype)
    from pg_type t join pg_namespace n on n.oid = t.typnamespace
    where n.nspname = 'public' and pg_get_userbyid(t.typowner) = '{SUPERUSER}' and t.typtype in ('e', 'd')
    union all
    select format('alter routine %s owner to {ROLE}', p.oid::regprocedure)
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where n.nspname = 'public' and pg_get_userbyid(p.proowner) = '{SUPERUSER}'
  loop
    execute made.change;
  end loop;
end $$;
"""
"""Changes the owner of all objects that the superuser created before the services had their own role."""


class PostgresServer(EmbeddedServer):
    """Postgres with a superuser for the supervisor and a role for the services.

    `settings` are additional server settings, such as `fsync=off` for temporary data. `password` is that of
    the services' role, `superuser_password` that of the supervisor. A cluster from a version whose services
    were superuser is converted at its next start.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # Fast shutdown. SIGTERM would wait for every client to disconnect.
    death_signal = signal.SIGQUIT  # Immediate shutdown. The postmaster ends its children, too.
    stop_grace_s = 10.0
    answer_s = 4.0

    def __init__(
        self,
        directory: Path,
        port: int,
        superuser_password: str,
        password: str,
        settings: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, port)
        self.superuser_password = superuser_password
        self.password = password
        self.settings = settings
        self._provisioned = False

    def url(self, database: str = DATABASE) -> str:
        """Return the URL of `database` for the services' role."""
        return f"postgresql://{ROLE}:{self.password}@{HOST}:{self.port}/{database}"

    @property
    def cluster(self) -> Path:
        return self.directory / "data"

    def stale_files(self) -> Sequence[Path]:
        # Its process id may belong to another process by now. Postgres would take that process for itself.
        return (self.cluster / "postmaster.pid",)

    def program(self) -> list[str]:
        settings = [
            f"listen_addresses={HOST}",
            f"port={self.port}",
            # The server's own short path, since the path of a socket file is limited to 107 bytes.
            f"unix_socket_directories={self.home}",
            "unix_socket_permissions=0700",
            f"hba_file={self.home}/{HBA_FILE}",
            "shared_buffers=32MB",
            "max_connections=60",
            "log_line_prefix=",
            # After a crash, sync the file system with one call instead of one call per file.
            "recovery_init_sync_method=syncfs",
            *self.settings,
        ]
        command = [str(binaries.postgres("postgres")), "-D", f"{self.home}/{self.cluster.name}"]
        return command + [part for setting in settings for part in ("-c", setting)]

    async def prepare(self) -> None:
        self.make_directory()
        self.write_config(HBA_FILE, HBA)
        self._provisioned = False
        if (self.cluster / "PG_VERSION").exists():
            return
        # In a temporary folder first, so that a partial cluster is never mistaken for a complete one.
        fresh = self.directory / "initdb"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        owner = self.owner()
        if owner is not None:
            os.chown(fresh, *owner)
        self.write_config("initdb/password", self.superuser_password)
        await self._initdb(f"{self.home}/initdb")
        (fresh / "data").rename(self.cluster)
        shutil.rmtree(fresh)

    async def _initdb(self, fresh: str) -> None:
        command = self.guarded(
            [
                str(binaries.postgres("initdb")),
                *("-D", f"{fresh}/data", "-U", SUPERUSER, f"--pwfile={fresh}/password"),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-instructions"),
                "--no-sync",
            ]
        )
        process = await asyncio.create_subprocess_exec(
            *command,
            env=child(os.environ, SYSTEM),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise ServerSetupError(
                f"postgres: initdb ended with status {process.returncode}: {output.decode()}"
            )

    async def probe(self) -> None:
        """Connect as the services do. Creates their role and database first, if they are missing."""
        # Check this first: Postgres logs each connection refused during recovery as FATAL.
        if self._status() != "ready":
            raise NotReadyError("postgres: still starting")
        if not self._provisioned:
            await self.provision()
            self._provisioned = True
        try:
            connection = await asyncpg.connect(self.url(), timeout=5.0)
        except TimeoutError as error:
            raise ServerUnresponsiveError("postgres: it does not answer") from error
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise NotReadyError(f"postgres: {error}") from error
        # An orderly close would wait for the server's answer.
        connection.terminate()

    async def provision(self) -> None:
        """Create the services' role and database, and give the role what earlier versions made as superuser.

        May be repeated. Raises NotReadyError while Postgres does not answer.
        """
        async with self.superuser() as connection:
            password = await connection.fetchval("select quote_literal($1)", self.password)
            await connection.execute(PROVISION_ROLE.format(role=ROLE, password=password))
        await self.ensure_database(DATABASE)
        async with self.superuser(DATABASE) as connection:
            await connection.execute(ADOPT_OBJECTS)
        # Before the first check, since Postgres would log the missing table as an error.
        async with self.superuser() as connection:
            await connection.execute(PROBE_TABLE)

    async def ensure_database(self, database: str) -> None:
        """Create `database` unless it exists, owned by the services' role. Raises NotReadyError."""
        async with self.superuser() as connection:
            owner = await connection.fetchval(
                "select pg_get_userbyid(datdba) from pg_database where datname = $1", database
            )
            if owner is None:
                await connection.execute(f'create database "{database}" owner {ROLE}')
            elif owner != ROLE:
                await connection.execute(f'alter database "{database}" owner to {ROLE}')

    @asynccontextmanager
    async def superuser(self, database: str = "postgres") -> AsyncIterator[asyncpg.Connection]:
        """Connect as superuser over the socket file. Raises NotReadyError while Postgres does not answer."""
        # Use a descriptor of the folder, since the path of a socket file is limited to 107 bytes.
        folder = os.open(self.directory, os.O_PATH | os.O_DIRECTORY)
        try:
            connection = await asyncpg.connect(
                host=f"/proc/self/fd/{folder}",
                port=self.port,
                user=SUPERUSER,
                password=self.superuser_password,
                database=database,
                timeout=5.0,
            )
        except TimeoutError as error:
            raise ServerUnresponsiveError("postgres: it does not answer") from error
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise NotReadyError(f"postgres: {error}") from error
        finally:
            os.close(folder)
        try:
            yield connection
        finally:
            await connection.close()

    async def alive(self) -> None:
        """Update a row in the supervisor's own table, and commit it to disk."""
        try:
            async with self.superuser() as connection:
                try:
                    await _write_probe(connection)
                except BaseException:
                    # An orderly close would wait for another answer.
                    connection.terminate()
                    raise
        except NotReadyError as error:
            if isinstance(error.__cause__, asyncpg.CannotConnectNowError):
                # Postgres recovers from the crash of one of its processes, which has no time limit.
                return
            if isinstance(error.__cause__, asyncpg.PostgresError):
                raise ServerUnhealthyError(str(error)) from error
            raise
        except asyncpg.PostgresError as error:
            raise ServerUnhealthyError(f"postgres: {error}") from error
        except (OSError, TimeoutError, asyncpg.InterfaceError) as error:
            raise NotReadyError(f"postgres: {error!r}") from error

    def _status(self) -> str:
        try:
            lines = (self.cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return ""
        return lines[7].strip() if len(lines) > 7 else ""


async def _write_probe(connection: asyncpg.Connection) -> None:
    try:
        await connection.execute(PROBE_WRITE)
    except asyncpg.UndefinedTableError:
        await connection.execute(PROBE_TABLE)
        await connection.execute(PROBE_WRITE)
