"""A Postgres cluster with the state store's empty tables, which stacks of tests begin with.

A copy needs neither `initdb` nor a migration. An `InterpretedStack`, and a stack whose data folder is not
empty, make their own cluster. `python -m tests.helpers.prepared_cluster FOLDER` makes the cluster in FOLDER.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

from pydantic import SecretStr

from turboserve.cli.embedded import Layout, PostgresServer
from turboserve.cli.embedded.layout import write_private_json
from turboserve.cli.embedded.running import running
from turboserve.free_ports import any_free

ROOT = Path(__file__).parents[2]
NO_DURABILITY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
SECRET = "postgres"
"""Name of the superuser's password in a stack's `secrets.json`."""
PASSWORD = "password-of-the-prepared-superuser"

_folder: Path | None = None


def set_folder(folder: Path) -> None:
    """Let this process and its later forks keep one cluster in `folder`."""
    global _folder
    _folder = folder


def copy_cluster_to(data: Path) -> None:
    """Begin a stack's data folder with a copy of the cluster, unless the folder has files of a stack.

    Blocks, as the start of a stack does. The first call makes the cluster.
    """
    if _folder is None or (data.exists() and any(data.iterdir())):
        return
    layout = Layout(data)
    layout.create()
    write_private_json(layout.secrets, {SECRET: PASSWORD})
    server = _server(layout.server("postgres"))
    server.make_directory()
    subprocess.run(["cp", "--archive", str(_prepared(_folder)), str(server.cluster)], check=True)


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


def _prepared(folder: Path) -> Path:
    """Return the cluster's folder. The first process that needs the cluster makes it."""
    # It starts what this module prepares clusters for.
    from tests.helpers import forked_process

    cluster = folder / "cluster"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cluster.exists():
            # `running` needs a main thread outside any event loop. The caller may be in one.
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = forked_process.run(["-m", "tests.helpers.prepared_cluster", str(folder)], environment)
            assert done.returncode == 0, done.stderr
    return cluster


def _make(folder: Path) -> None:
    server = _server(folder / "server")
    with running([server], folder / "server.log"):
        asyncio.run(migrated(server.url()))
    server.cluster.rename(folder / "cluster")


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
