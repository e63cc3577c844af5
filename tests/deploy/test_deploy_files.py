"""What the containers are made from agrees with what it is made for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import asyncpg
import pytest
import yaml

from turboserve.cli.embedded import Layout, Ports, PostgresServer, binaries
from turboserve.cli.embedded.binaries import nats_server
from turboserve.cli.embedded.postgres import DATABASE, ROLE, SUPERUSER
from turboserve.cli.embedded.running import running
from turboserve.subjects import SERVICES

ROOT = Path(__file__).resolve().parents[2]


def test_the_brokers_users_are_those_of_the_table_of_subjects() -> None:
    check = [sys.executable, str(ROOT / "deploy/nats/generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nats_server_takes_the_configuration_with_composes_passwords() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    given = compose["services"]["nats"]["environment"]
    # ${NAME:-default} → default
    passwords = {name: value.split(":-", 1)[1].rstrip("}") for name, value in given.items()}
    # Made where the broker starts, for its watchdog alone.
    own = ("NATS_HEALTH_PASSWORD", "NATS_WATCHDOG_PASSWORD")
    assert all(f"\n{name}=$(password)\n" in (ROOT / "deploy/nats/entrypoint.sh").read_text() for name in own)
    passwords |= dict.fromkeys(own, "p0123456789abcdef")
    command = [str(nats_server()), "-t", "-c", str(ROOT / "deploy/nats/nats.conf")]
    done = subprocess.run(
        command, env={**os.environ, **passwords}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_compose_has_every_service_with_the_password_of_its_own_user() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"nats", "redis", "postgres", *SERVICES}
    for name in SERVICES:
        service = services[name]
        assert service["image"].startswith(f"turboserve-{name}:")
        assert service["healthcheck"]["test"] == ["CMD", "probe"]
        variable = f"NATS_{name.upper().replace('-', '_')}_PASSWORD"
        password = service["environment"]["TURBOSERVE_NATS_PASSWORD"]
        assert password == services["nats"]["environment"][variable]
        assert f"{variable}=" in (ROOT / ".env.example").read_text()


def test_the_state_store_of_compose_is_no_superuser(tmp_path: Path) -> None:
    """Runs the script of the Postgres container against a real cluster that an earlier version made."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    url = services["state-store"]["environment"]["TURBOSERVE_POSTGRES_URL"]
    assert url.startswith(f"postgresql://{ROLE}:${{POSTGRES_SERVICES_PASSWORD")
    psql = binaries.postgres("psql")
    layout = Layout(tmp_path / "data")
    layout.create()
    port = Ports(layout.ports).get("postgres")
    server = PostgresServer(layout.server("postgres"), port, "admin", "old", ("fsync=off",))

    async def as_before() -> None:
        async with server.superuser() as connection:
            await connection.execute(f'drop database "{DATABASE}"')
            await connection.execute(f"drop role {ROLE}")
            await connection.execute(f'create database "{DATABASE}"')
        async with server.superuser(DATABASE) as connection:
            await connection.execute(
                "create table sessions (n bigint generated always as identity primary key, x int);"
                "insert into sessions (x) values (7)"
            )

    async def after() -> None:
        connection = await asyncpg.connect(server.url().replace(":old@", ":new@"))
        try:
            assert await connection.fetchval("select x from sessions") == 7
            await connection.execute("alter table sessions add column y int")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute("copy (select 1) to program 'true'")
        finally:
            await connection.close()

    with running([server], tmp_path / "log"):
        asyncio.run(as_before())
        # By a descriptor: the path of a socket file is limited to 107 bytes.
        folder = os.open(server.directory, os.O_PATH | os.O_DIRECTORY)
        environment = {
            "PATH": f"{psql.parent}:/usr/bin:/bin",
            "PGHOST": f"/proc/self/fd/{folder}",
            "PGPORT": str(port),
            "PGPASSWORD": "admin",
            "PGDATA": str(tmp_path),
            "POSTGRES_USER": SUPERUSER,
            "POSTGRES_DB": DATABASE,
            "POSTGRES_SERVICES_PASSWORD": "new",
        }
        (tmp_path / "pg_hba.conf").write_text("host all all all scram-sha-256\n")
        for _ in range(2):
            script = ["sh", str(ROOT / "deploy/postgres_role.sh")]
            done = subprocess.run(
                script, env=environment, capture_output=True, text=True, check=False, pass_fds=[folder]
            )
            assert done.returncode == 0, done.stderr
        os.close(folder)
        asyncio.run(after())
    lines = (tmp_path / "pg_hba.conf").read_text().splitlines()
    assert lines == [f"host all {SUPERUSER} all reject", "host all all all scram-sha-256"]


def test_images_install_what_the_distributions_name_and_only_the_workers_has_torch() -> None:
    for name in SERVICES:
        folder = f"services/{name}"
        command = [sys.executable, "deploy/requirements.py", "shared", folder]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        listed = set(printed.split())
        named = {
            requirement
            for place in ("shared", folder)
            for requirement in tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"][
                "dependencies"
            ]
        }
        assert listed == {requirement for requirement in named if not requirement.startswith("turboserve-")}
        assert ("torch" in listed) == (name == "worker")
        without = subprocess.run(
            [*command[:2], "--without", "torch", *command[2:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert set(without.split()) == listed - {"torch"}
