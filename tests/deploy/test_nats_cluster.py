"""compose's cluster of NATS servers: real servers, their watchdog's probe, and what compose gives them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.waiting import eventually_blocking
from turboserve.cli.embedded.binaries import nats_server
from turboserve.free_ports import any_free
from turboserve.subjects import SERVICES

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "deploy/nats/nats-cluster.conf").read_text()
PROBE = ROOT / "deploy/nats/probe.py"
WRITTEN, SILENT = 0, 2
IN_A_ROW = 3
"""Answers that the store fails after which a watchdog ends its server."""
PATIENCE_S = 60.0


class Cluster:
    """The servers with compose's configuration, except for their folders, hosts and ports."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"turboserve-{number}" for number in (1, 2, 3)]
        self.ports = {name: any_free() for name in self.names}
        self._routes = {name: any_free() for name in self.names}
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, name: str) -> dict[str, str]:
        variables = dict.fromkeys(re.findall(r"\$(NATS_\w+)", CONFIG), "secret")
        own = {"NATS_MAX_FILE_STORE": str(2**26), "NATS_SERVER_NAME": name}
        for number, port in enumerate(self._routes.values(), 1):
            own[f"NATS_ROUTE_{number}"] = f"nats-route://route:secret@127.0.0.1:{port}"
        return {**os.environ, **variables, **own, "NATS_PORT": str(self.ports[name])}

    def start(self, name: str) -> None:
        text = CONFIG.replace('"/data"', f'"{self._folder / name}"')
        text = text.replace("port: 4222", f"port: {self.ports[name]}")
        text = text.replace("port: 6222", f"port: {self._routes[name]}")
        file = self._folder / f"{name}.conf"
        file.write_text(text)
        with (self._folder / f"{name}.log").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [str(nats_server()), "-c", str(file)], env=self.environment(name), stderr=output
            )

    def probe(self, name: str) -> int:
        command = [sys.executable, "-I", "-S", str(PROBE)]
        done = subprocess.run(command, env=self.environment(name), capture_output=True, timeout=PATIENCE_S)
        return done.returncode

    def has_stream(self, name: str) -> bool:
        # The broker creates and removes folders while they are searched.
        with suppress(FileNotFoundError):
            return any((self._folder / name).rglob(f"WATCHDOG-{name}/msgs/*.blk"))
        return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        for name in made.names:
            made.start(name)
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


def test_a_watchdog_judges_its_own_server(cluster: Cluster) -> None:
    """Otherwise the watchdogs of two healthy servers would end them for the fault of the third."""

    def works(name: str) -> bool:
        # The cluster creates the stream once it has a leader; the routes need their password for that.
        return cluster.probe(name) == WRITTEN and cluster.has_stream(name)

    for name in cluster.names:
        eventually_blocking(partial(works, name))
    frozen, *others = cluster.names

    def others_go_on() -> bool:
        deadline_s, rounds = time.monotonic() + 6.0, 0
        failed = dict.fromkeys(others, 0)
        while time.monotonic() < deadline_s or rounds < 2 * IN_A_ROW:
            rounds += 1
            for name in others:
                # On a busy machine an answer may be late. A watchdog ends its server after several of them.
                failed[name] = 0 if cluster.probe(name) == WRITTEN else failed[name] + 1
                if failed[name] == IN_A_ROW:
                    return False
        return True

    for _ in range(3):
        os.kill(cluster.processes[frozen].pid, signal.SIGSTOP)
        if others_go_on():
            break
        # A busy machine may be slow for as long, but not each time.
        os.kill(cluster.processes[frozen].pid, signal.SIGCONT)
        for name in cluster.names:
            eventually_blocking(partial(works, name))
    else:
        pytest.fail("the others do not write while one is frozen")
    assert cluster.probe(frozen) == SILENT


def test_compose_gives_every_service_all_servers_and_three_replicas() -> None:
    base = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    over = yaml.safe_load((ROOT / "deploy/nats/compose.yaml").read_text())
    services: dict[str, dict[str, Any]] = over["services"]
    names = ["nats", "nats-2", "nats-3"]
    assert services.keys() == {*names, *SERVICES}
    urls = ",".join(f"nats://{name}:4222" for name in names)
    for service in SERVICES:
        assert base[service]["environment"]["TURBOSERVE_NATS_URL"] == "nats://nats:4222"
        assert services[service]["environment"]["TURBOSERVE_NATS_URL"] == urls
    assert services["state-store"]["environment"]["TURBOSERVE_LOG_REPLICAS"] == str(len(names))
    needed = set(re.findall(r"\$(NATS_\w+)", CONFIG)) - {"NATS_HEALTH_PASSWORD", "NATS_WATCHDOG_PASSWORD"}
    folders = set()
    for name in names:
        server = services[name]
        own = server["environment"]
        assert server["hostname"] == name
        number = names.index(name) + 1
        assert own["NATS_SERVER_NAME"] == f"turboserve-{number}"
        assert own[f"NATS_ROUTE_{number}"].endswith(f"@{name}:6222")
        assert own.keys() == needed
        folders |= {volume for volume in server["volumes"] if volume.endswith(":/data")}
    # A server that was alone would delete its streams as a member of the cluster.
    assert {folder.partition(":")[0] for folder in folders} == set(over["volumes"])
    assert not set(over["volumes"]) & set(yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"])
