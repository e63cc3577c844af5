"""A Postgres cluster with the state store's empty tables, which stacks of tests begin with.

To copy one takes a tenth of the CPU time of a new cluster with all migrations. A stack that starts its own
interpreters (`InterpretedStack`) still makes its own cluster.
"""

from __future__ import annotations

import asyncio
import fcntl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import SecretStr

from turboserve.cli.embedded import Layout, PostgresServer
from turboserve.cli.embedded.layout import write_private_json
from turboserve.cli.embedded.running import running
from turboserve.free_ports import any_free

NO_DURABILITY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
SECRET = "postgres"
"""Name of the superuser's password in a stack's `secrets.json`."""
PASSWORD = "password-of-the-prepared-superuser"

_folder: Path | None = None


def keep_in(folder: Path) -> None:
    """Let this process and its later forks keep one cluster in `folder`."""
    global _folder
    _folder = folder


def provide(data: Path) -> None:
    """Begin a stack's data folder with a copy of the cluster, unless the folder has files of a stack."""
    if _folder is None or (data.exists() and any(data.iterdir())):
        return
    layout = Layout(data)
    layout.create()
    write_private_json(layout.secrets, {SECRET: PASSWORD})
    server = _server(layout.server("postgres"))
    server.make_directory()
    subprocess.run(["cp", "--archive", str(_made(_folder)), str(server.cluster)], check=True)


async def migrated(url: str) -> None:
    """Bring a database to the newest schema."""
    # Most runs of a few tests need neither.
    from turboserve.state_store.database import PostgresDatabase
    from turboserve.state_store.settings import Settings

    settings = Settings(postgres_url=SecretStr(url), transaction_deadline_s=60.0, request_deadline_s=90.0)
    database = PostgresDatabase(settings)
    await database.migrate()
    await database.close()


def _server(directory: Path) -> PostgresServer:
    return PostgresServer(directory, any_free(), PASSWORD, "password-of-the-services", NO_DURABILITY)


def _made(folder: Path) -> Path:
    """Return the cluster's folder. The first process that needs the cluster makes it."""
    cluster = folder / "cluster"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cluster.exists():
            # The caller may be in an event loop.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_make, folder, cluster).result()
    return cluster


def _make(folder: Path, cluster: Path) -> None:
    server = _server(folder / "server")
    with running([server], folder / "server.log"):
        asyncio.run(migrated(server.url()))
    server.cluster.rename(cluster)
