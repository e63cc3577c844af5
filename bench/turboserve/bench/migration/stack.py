"""Servers, a state store and two workers as processes. The benchmark is the scheduler and the viewer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turboserve import subjects
from turboserve.bench.paced.device import PacedDevice
from turboserve.bench.report import BenchError
from turboserve.bus import Bus
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer
from turboserve.cli.embedded.running import running
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.lifeline import FD_VARIABLE, PARENT_VARIABLE
from turboserve.subjects import LIST_WORKERS, LOAD

START_LIMIT_S = 300.0
DATABASE = "bench"
WORKERS = ("wrk_one", "wrk_two")
WORKER = "turboserve.bench.paced.worker"
STORE = "turboserve.state_store"


@dataclass(eq=False)
class MigrationStack:
    """The running stack: its bus, its workers' load reports and health ports."""

    bus: Bus
    loads: dict[str, LoadReport] = field(default_factory=dict)
    health: dict[str, int] = field(default_factory=dict)

    def metric(self, worker: str, name: str) -> float:
        """Return the sum of a worker's samples whose names begin with `name`."""
        url = f"http://127.0.0.1:{self.health[worker]}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@dataclass(frozen=True)
class Processes:
    """Addresses of the running processes."""

    nats_url: str
    health: dict[str, int]
    logs: Path


@dataclass(frozen=True)
class ServerProcesses:
    """Running servers and a state store, to which workers can be added."""

    nats_url: str
    worker_nats_url: str
    layout: Layout
    ports: Ports
    environment: dict[str, str]
    """What the processes have in common."""
    lifeline: int
    store: subprocess.Popen[Any]
    """The state store."""

    def start(
        self, module: str, environment: Mapping[str, str], log: Path, *arguments: str
    ) -> subprocess.Popen[Any]:
        """Start a process with this environment beside the common one. Pass it to `end_process` later."""
        return _start(module, {**self.environment, **environment}, log, self.lifeline, *arguments)

    def worker_environment(self, worker: str) -> dict[str, str]:
        """What a worker of this name needs."""
        return {
            "TURBOSERVE_NATS_URL": self.worker_nats_url,
            "TURBOSERVE_WORKER_ID": worker,
            "TURBOSERVE_HEALTH_PORT": str(self.ports.get(worker)),
        }


@contextmanager
def processes(
    folder: Path, worker_environment: Mapping[str, str], device: PacedDevice
) -> Iterator[Processes]:
    """Start everything in an empty folder, and stop it again, also if this process is killed.

    Must be called outside any event loop.
    """
    with server_processes(folder) as servers, ExitStack() as stack:
        for worker in WORKERS:
            environment = {**servers.worker_environment(worker), **worker_environment}
            log = servers.layout.logs / f"{worker}.log"
            stack.callback(end_process, servers.start(WORKER, environment, log, device.to_json()))
        health = {worker: servers.ports.get(worker) for worker in WORKERS}
        yield Processes(servers.nats_url, health, servers.layout.logs)


@contextmanager
def server_processes(
    folder: Path, store_module: str = STORE, store_environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcesses]:
    """Start servers and a state store in an empty folder, and stop them again, also if this process is
    killed.

    Must be called outside any event loop. `store_environment`: what the state store gets beside what all
    processes have in common.
    """
    layout = Layout(folder)
    layout.create()
    ports = Ports(layout.ports)
    users = {user: layout.secret(f"nats.{user}") for user in (*subjects.SERVICES, "admin")}
    nats = NatsServer(layout.server("nats"), ports.get("nats"), users)
    redis = RedisServer(layout.server("redis"), ports.get("redis"), layout.secret("redis"))
    postgres = PostgresServer(
        layout.server("postgres"),
        ports.get("postgres"),
        layout.secret("postgres"),
        layout.secret("postgres.services"),
    )
    lifeline, held = os.pipe()
    with ExitStack() as stack:
        for end in (lifeline, held):
            stack.callback(os.close, end)
        stack.enter_context(running([nats, redis, postgres], layout.logs / "servers.log"))
        asyncio.run(postgres.ensure_database(DATABASE))
        shared = {
            **os.environ,
            "TURBOSERVE_REDIS_URL": redis.url,
            "TURBOSERVE_POSTGRES_URL": postgres.url(DATABASE),
            "OMP_NUM_THREADS": "1",
            FD_VARIABLE: str(lifeline),
            PARENT_VARIABLE: str(os.getpid()),
        }
        environment = {**shared, **(store_environment or {}), "TURBOSERVE_NATS_URL": nats.url("state-store")}
        store = _start(store_module, environment, layout.logs / "store.log", lifeline)
        stack.callback(end_process, store)
        yield ServerProcesses(nats.url(), nats.url("worker"), layout, ports, shared, lifeline, store)


@asynccontextmanager
async def connected(to: Processes) -> AsyncIterator[MigrationStack]:
    """Connect to the stack and wait until both workers serve. Raises `BenchError`."""
    bus = await Bus.connect("bench", Settings(nats_url=to.nats_url))
    try:
        found = MigrationStack(bus, health=to.health)

        async def loaded(load: LoadReport, _: bytes) -> None:
            found.loads[load.worker] = load

        await bus.subscribe(LOAD, "*", loaded)
        await _joined(bus, to)
        yield found
    finally:
        await bus.close()


async def _joined(bus: Bus, to: Processes) -> None:
    end = asyncio.get_running_loop().time() + START_LIMIT_S
    while True:
        try:
            page = await bus.call(LIST_WORKERS, ListWorkers())
            ready = {record.id for record in page.workers if record.phase is WorkerPhase.READY}
            if ready >= set(WORKERS):
                return
        except TurboServeError:
            pass
        if asyncio.get_running_loop().time() > end:
            log = (to.logs / f"{WORKERS[0]}.log").read_text(errors="replace")[-2_000:]
            raise BenchError(f"the workers did not serve within {START_LIMIT_S:g} s:\n{log}")
        await asyncio.sleep(0.2)


def _start(
    module: str, environment: Mapping[str, str], log: Path, lifeline: int, *arguments: str
) -> subprocess.Popen[Any]:
    with log.open("ab") as output:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command, env=dict(environment), stdout=output, stderr=output, pass_fds=(lifeline,)
        )


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a process, by force after 10 s."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
