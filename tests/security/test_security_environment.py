"""Each process of a stack holds only its own settings and passwords in its environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.forked_process import InterpretedStack
from tests.helpers.tiny_workers import TINY_WORKERS
from turboserve import environment
from turboserve.cli.settings import SOURCES, names
from turboserve.cli.stack.background import BackgroundStack
from turboserve.cli.stack.run import unread_variables
from turboserve.worker.settings import Settings as WorkerSettings

API_KEY = "key-that-only-the-gateway-may-hold"
OTHER_SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "cloud-secret",
    "HF_TOKEN": "hub-secret",
    "MY_DATABASE": "dsn-secret",
}
MISSPELLED = "TURBOSERVE_API_KYES"
SERVERS = ("nats", "redis", "postgres")
LAUNCHED = {"TURBOSERVE_LIFELINE_FD", "TURBOSERVE_LIFELINE_PARENT", "TURBOSERVE_POOL_ID"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundStack]:
    """A whole stack of real processes, started by a user whose environment is full of secrets."""
    given = {
        "TURBOSERVE_API_KEYS": f"{API_KEY}=acme",
        "TURBOSERVE_OPERATORS": "acme",
        "TURBOSERVE_PRICES": '{"*": 1.25}',
        "TURBOSERVE_WORKER_MAX_SESSIONS": "3",
        MISSPELLED: f"{API_KEY}=acme",
        **OTHER_SECRETS,
        **TINY_WORKERS,
    }
    data = tmp_path_factory.mktemp("stack") / "data"
    with InterpretedStack(data, "--workers", "1", environment=given) as stack:
        yield stack


@pytest.fixture(scope="module")
def environments(stack: BackgroundStack) -> Mapping[str, list[dict[str, str]]]:
    """Return name of a service or server → environment of each process, its guard's and children's too."""
    record = stack.record
    roots = dict.fromkeys(record.worker_pids(), "worker")
    for name, process in record.processes.items():
        roots |= {process[key]: name for key in ("pid", "guard_pid") if process.get(key)}
    found: dict[str, list[dict[str, str]]] = {}
    for process in stack.descendants():
        # Postgres starts processes that soon end; an ended process has no environment.
        with suppress(psutil.NoSuchProcess, OSError):
            variables = environment_of(process.pid)
            ancestors = [process.pid, *(parent.pid for parent in process.parents())]
            service = next((roots[pid] for pid in ancestors if pid in roots), None)
            if variables and process.is_running():
                assert service is not None, process
                found.setdefault(service, []).append(variables)
    # Webhooks run only where they are asked for.
    assert set(found) == {*SERVERS, *SOURCES} - {"every service", "webhooks"}
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment as the kernel shows it to every process of the same user."""
    pairs = (entry.partition(b"=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return {name.decode(): value.decode(errors="replace") for name, _, value in pairs if name}


def holders(environments: Mapping[str, list[dict[str, str]]], secret: str) -> set[str]:
    """Return the names whose environment contains `secret`."""
    return {
        name
        for name, processes in environments.items()
        if any(secret in value for process in processes for value in process.values())
    }


def test_each_secret_is_held_only_by_those_who_need_it(
    stack: BackgroundStack, environments: Mapping[str, list[dict[str, str]]]
) -> None:
    passwords = json.loads((stack.data / "secrets.json").read_text())
    expected = {
        API_KEY: {"gateway"},
        passwords["redis"]: {"state-store"},
        passwords["nats.admin"]: set(),
        passwords["nats.gateway"]: {"gateway"},
        passwords["nats.scheduler"]: {"scheduler"},
        passwords["nats.autoscaler"]: {"autoscaler"},
        passwords["nats.state-store"]: {"state-store"},
        passwords["nats.recorder"]: {"recorder"},
        passwords["nats.webhooks"]: set(),
        **{secret: set() for secret in OTHER_SECRETS.values()},
    }
    assert {secret: holders(environments, secret) for secret in expected} == expected
    # Each worker holds the password of its own identity, and of no other.
    identities = {name: value for name, value in passwords.items() if name.startswith("nats.worker.")}
    assert "nats.worker" not in passwords
    by_hand = identities.pop("nats.worker.manual")
    assert holders(environments, by_hand) == set()
    assert all("autoscaler" in holders(environments, value) for value in identities.values())
    assert len(identities) >= len(environments["worker"]) > 0
    for process in environments["worker"]:
        user = process["TURBOSERVE_NATS_USER"]
        assert process["TURBOSERVE_WORKER_ID"].startswith(f"{user.removeprefix('worker.')}_")
        own = {name for name, value in identities.items() if any(value in text for text in process.values())}
        assert own == {f"nats.{user}"}
    held = {name: holders(environments, value) for name, value in passwords.items() if "postgres" in name}
    # No process has the administrator's password; the state store alone has that of the services' role.
    assert sorted(held.values(), key=len)[-1] == {"state-store"}
    assert all(who <= {"state-store"} for who in held.values())


def test_no_process_has_a_setting_that_it_does_not_declare(
    environments: Mapping[str, list[dict[str, str]]],
) -> None:
    for name, processes in environments.items():
        declared: frozenset[str] = frozenset() if name in SERVERS else names(name)
        if name == "autoscaler":
            declared |= environment.WORKER_SETTINGS
        for process in processes:
            own = {variable for variable in process if variable.startswith(environment.PREFIX)}
            assert own <= declared | LAUNCHED, (name, own - declared)
            if name in SERVERS:
                assert own <= LAUNCHED


def test_settings_reach_those_who_declare_them(environments: Mapping[str, list[dict[str, str]]]) -> None:
    def having(variable: str) -> set[str]:
        return {name for name, processes in environments.items() if any(variable in p for p in processes)}

    assert having("TURBOSERVE_OPERATORS") == {"gateway"}
    assert having("TURBOSERVE_PRICES") == {"state-store"}
    assert having("TURBOSERVE_WORKER_MAX_SESSIONS") == {"autoscaler", "worker"}
    assert having(MISSPELLED) == set()
    assert having("PATH") == set(environments)


def test_a_misspelled_variable_is_reported(stack: BackgroundStack) -> None:
    assert any(MISSPELLED in line and "misspelled" in line for line in stack.output.splitlines())
    assert "TURBOSERVE_API_KEYS" not in stack.output
    assert API_KEY not in stack.output
    assert unread_variables(["TURBOSERVE_DATA", "TURBOSERVE_POOL_SIZE", "turboserve_model", "PATH"]) == []


def test_no_secret_stands_on_a_command_line(stack: BackgroundStack) -> None:
    secrets = {*json.loads((stack.data / "secrets.json").read_text()).values(), API_KEY}
    lines = []
    for process in stack.descendants():
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    assert len(lines) > len(SERVERS)
    assert not [line for line in lines if any(secret in line for secret in secrets)]


def test_the_list_of_the_workers_settings_is_the_workers() -> None:
    """If this fails: put the setting into `turboserve.environment.WORKER_SETTINGS`, or take it out."""
    declared = environment.settings_of(WorkerSettings.model_fields) - names("every service")
    assert declared == environment.WORKER_SETTINGS


def test_what_a_child_gets_is_what_is_allowed_in_whatever_case() -> None:
    given = {
        "PATH": "/bin",
        "turboserve_nats_url": "n",
        "TURBOSERVE_API_KEYS": "k",
        "http_proxy": "p",
        "X": "x",
    }
    assert environment.child(given, environment.SERVICE, {"TURBOSERVE_NATS_URL"}) == {
        "PATH": "/bin",
        "TURBOSERVE_NATS_URL": "n",
        "http_proxy": "p",
    }
    # A base cannot let a setting through.
    assert environment.child(given, ("*",)) == {"PATH": "/bin", "http_proxy": "p", "X": "x"}
