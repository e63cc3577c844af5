"""What the containers are made from agrees with what it is made for."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from turboserve.cli.embedded.binaries import nats_server
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
