"""The containers' files agree with the code and with each other."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import asyncpg
import pytest
import yaml
from pydantic import ValidationError

from tests.helpers.earlier_cluster import make_as_before
from turboserve.cli.embedded import Layout, Ports, PostgresServer, binaries
from turboserve.cli.embedded.binaries import nats_server
from turboserve.cli.embedded.postgres import DATABASE, ROLE, SUPERUSER
from turboserve.cli.embedded.running import running
from turboserve.gateway.auth import key_list
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.settings import Settings
from turboserve.subjects import SERVICES
from turboserve.worker.settings import Settings as WorkerSettings

ROOT = Path(__file__).resolve().parents[2]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"deploy/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compose_env = _script("compose_env")


def test_the_brokers_users_are_those_of_the_table_of_subjects() -> None:
    check = [sys.executable, str(ROOT / "deploy/nats/generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nats_server_takes_a_configuration_with_identities(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "deploy/nats/generate.py"), "--workers"]
    made = subprocess.run([*program, "wk0", "gpu1"], capture_output=True, text=True, check=True).stdout
    assert 'user: "worker.gpu1", password: $NATS_WORKER_GPU1_PASSWORD' in made
    assert 'user: "worker",' not in made
    file = tmp_path / "nats.conf"
    file.write_text(made)
    variables = dict.fromkeys(re.findall(r"\$(NATS_\w+)", made), "secret")
    variables["NATS_MAX_FILE_STORE"] = "1048576"
    check = [str(nats_server()), "-t", "-c", str(file)]
    assert subprocess.run(check, env={**os.environ, **variables}, capture_output=True).returncode == 0
    assert subprocess.run([*program, "no_identity"], capture_output=True).returncode != 0


def test_nats_server_takes_the_configuration_with_generated_passwords() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    given = compose["services"]["nats"]["environment"]
    made = compose_env.variables(compose_env.generate((ROOT / ".env.example").read_text()))
    passwords = {name: made[name] for name in given}
    # Created at the broker's start, for its watchdog alone.
    own = ("NATS_HEALTH_PASSWORD", "NATS_WATCHDOG_PASSWORD")
    assert all(f"\n{name}=$(password)\n" in (ROOT / "deploy/nats/entrypoint.sh").read_text() for name in own)
    passwords |= dict.fromkeys(own, "p0123456789abcdef")
    command = [str(nats_server()), "-t", "-c", str(ROOT / "deploy/nats/nats.conf")]
    done = subprocess.run(
        command, env={**os.environ, **passwords}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_in_compose_starts_with_a_secret_that_is_published() -> None:
    """Incident: every password had a default published in this repository, and keys could not be set."""
    text = (ROOT / "compose.yaml").read_text()
    example = compose_env.variables((ROOT / ".env.example").read_text())
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used == set(example)
    secret = {name for name, value in example.items() if value == compose_env.GENERATED}
    assert secret == {name for name in used if name.endswith("_PASSWORD")} | {
        "TURBOSERVE_API_KEYS",
        "WEBHOOK_KEY",
    }
    for name in secret:
        # Compose refuses to start if the variable is not set.
        assert set(re.findall(rf"\$\{{{name}(.[^}}]*)\}}", text)) <= {
            ":?make compose-env writes it to .env",
            "?make compose-env writes it to .env",
        }
    assert "development-" not in text


def test_env_is_made_once_for_its_owner_and_with_other_secrets_each_time(tmp_path: Path) -> None:
    example = (ROOT / ".env.example").read_text()
    made = []
    for name in ("a", "b"):
        path = tmp_path / name
        before = os.umask(0)
        try:
            assert compose_env.write(path, example)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o600
        made.append(compose_env.check(path, example))
        text = path.read_text()
        assert not compose_env.write(path, example)
        assert path.read_text() == text
    generated = [name for name, value in compose_env.variables(example).items() if value == "GENERATED"]
    secrets = [found[name] for found in made for name in generated]
    assert len(set(secrets)) == 2 * len(generated)
    assert all(re.fullmatch(r"[a-z][a-z0-9_=]{40,}", secret) for secret in secrets)
    # The gateway accepts the key, and its tenant is the operator.
    keys = Keys(key_list.parse(made[0]["TURBOSERVE_API_KEYS"]), [made[0]["TURBOSERVE_OPERATORS"]])
    found = keys.identify(compose_env.first_key(made[0]))
    assert found is not None
    assert found.operator


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("NATS_WORKER_PASSWORD=GENERATED", ""), "NATS_WORKER_PASSWORD"),
        (("POSTGRES_PASSWORD=GENERATED", "POSTGRES_PASSWORD="), "POSTGRES_PASSWORD"),
        (("REDIS_PASSWORD=GENERATED", "REDIS_PASSWORD=development-redis"), "REDIS_PASSWORD"),
        (("TURBOSERVE_API_KEYS=GENERATED", "TURBOSERVE_API_KEYS="), "TURBOSERVE_API_KEYS"),
    ],
)
def test_an_env_that_lacks_a_secret_is_refused(tmp_path: Path, change: tuple[str, str], named: str) -> None:
    example = (ROOT / ".env.example").read_text()
    path = tmp_path / ".env"
    compose_env.write(path, example.replace(*change))
    with pytest.raises(compose_env.EnvironmentFileError, match=named):
        compose_env.check(path, example)
    if named == "TURBOSERVE_API_KEYS":
        path.write_text(path.read_text().replace("KEYLESS=0", "KEYLESS=1"))
        assert compose_env.first_key(compose_env.check(path, example)) is None


def test_the_gateway_of_compose_requires_keys_or_an_explicit_opt_out() -> None:
    """With the values that compose sets if `.env` is empty, as both kinds of compose interpret them."""
    given = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["gateway"]["environment"]
    defaults = {
        name: re.sub(r"\$\{\w+(?::-([^}]*)|\??[^}]*)\}", lambda found: found[1] or "", str(value))
        for name, value in given.items()
    }
    settings = {name: value for name, value in defaults.items() if "PASSWORD" not in name}
    assert settings["TURBOSERVE_OPERATORS"] == " "
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with pytest.raises(ValidationError, match="lists no key"):
            Settings()
        patch.setenv("TURBOSERVE_ALLOW_KEYLESS", "1")
        assert Settings().key_set() is None
        patch.setenv("TURBOSERVE_API_KEYS", f"{compose_env.new_key()}=default")
        assert Settings().key_set() is not None


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


def test_decode_workers_of_compose_and_their_workers_know_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    text = (ROOT / "deploy/decode/compose.yaml").read_text()
    over = yaml.safe_load(text)["services"]
    decoders = {name: service for name, service in over.items() if name != "worker"}
    # Compose does not start without the key, and no key is published.
    assert set(re.findall(r"\$\{DECODE_KEY(.[^}]*)\}", text)) == {":?add it to .env"}
    addresses = over["worker"]["environment"]["TURBOSERVE_DECODE_WORKERS"].split(",")
    for (name, service), address in zip(decoders.items(), addresses, strict=True):
        own = service["environment"]
        assert address == f"tcp://{name}:{own['TURBOSERVE_TRANSFER_PORT']}"
        # The container's own name is that of its service, so that `hostname` is the address that workers use.
        assert (service["hostname"], own["TURBOSERVE_TRANSFER_HOST"]) == (name, "hostname")
        for part in ("image", "healthcheck", "restart", "security_opt", "cap_drop"):
            assert service[part] == base["worker"][part], part
        for variable in ("TURBOSERVE_NATS_PASSWORD", "TURBOSERVE_MODEL", "TURBOSERVE_NATS_URL"):
            assert own[variable] == base["worker"]["environment"][variable]
    both = base["worker"]["environment"] | over["worker"]["environment"]
    for given, wanted in ((both, "denoise"), (decoders["decode-worker"]["environment"], "decode")):
        assert given["TURBOSERVE_DECODE_KEY"] == "${DECODE_KEY:?add it to .env}"
        known = {f"TURBOSERVE_{name.upper()}" for name in WorkerSettings.model_fields}
        assert given.keys() <= known
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)))
            patch.setenv("TURBOSERVE_DECODE_KEY", "k" * 32)
            assert WorkerSettings().roles == wanted


def test_the_state_store_of_compose_is_no_superuser(tmp_path: Path) -> None:
    """Run the script of the Postgres container on a real cluster that an earlier version made."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    url = services["state-store"]["environment"]["TURBOSERVE_POSTGRES_URL"]
    assert url.startswith(f"postgresql://{ROLE}:${{POSTGRES_SERVICES_PASSWORD")
    psql = binaries.postgres("psql")
    layout = Layout(tmp_path / "data")
    layout.create()
    port = Ports(layout.ports).get("postgres")
    server = PostgresServer(layout.server("postgres"), port, "admin", "old", ("fsync=off",))

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
        asyncio.run(make_as_before(server))
        # By a descriptor, because the path of a socket file is limited to 107 bytes.
        folder = os.open(server.directory, os.O_PATH | os.O_DIRECTORY)
        environment = {
            "PATH": f"{psql.parent}:/usr/bin:/bin",
            "PGHOST": f"/proc/self/fd/{folder}",
            "PGPORT": str(port),
            "POSTGRES_PASSWORD": "admin",
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
