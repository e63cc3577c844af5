"""Real servers, state store, scheduler and gateway, each its own process, with a worker that draws.

As a program, it serves the player page for development until Ctrl-C: `python -m tests.helpers.pool_harness
8090`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import httpx

from tests.helpers import forked_process, prepared_cluster
from turboserve import subjects
from turboserve.cli.embedded import Layout, NatsServer, Ports, PostgresServer, RedisServer
from turboserve.cli.embedded.running import running

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
"""Time limit of a stop and of an answer, long enough for a busy machine."""
DRAWN_WORKER = Path(__file__).with_name("drawn_worker.py")

# Operations that exceed the production defaults are stuck; on a busy machine they may only be slow.
COMMON_DEADLINES = {"TURBOSERVE_CANARY_TIMEOUT_S": "15", "TURBOSERVE_MIGRATION_TIMEOUT_S": "300"}
STORE_DEADLINES = {"TURBOSERVE_TRANSACTION_DEADLINE_S": "20", "TURBOSERVE_REQUEST_DEADLINE_S": "30"}
SCHEDULER_DEADLINES = {
    "TURBOSERVE_LEADER_LEASE_S": "20",
    "TURBOSERVE_LEADER_TIMEOUT_S": "25",
    # Rarer than by default: each renewal is a transaction of the store, also while tests wait.
    "TURBOSERVE_LEADER_RENEW_S": "2",
}
GATEWAY_DEADLINES = {
    "TURBOSERVE_REQUEST_DEADLINE_S": "30",
    "TURBOSERVE_HEADER_TIMEOUT_S": "60",
    "TURBOSERVE_BODY_TIMEOUT_S": "60",
    # A client's library may reuse a connection at the moment at which the gateway closes it as idle.
    "TURBOSERVE_KEEP_ALIVE_S": "60",
    "TURBOSERVE_REPORT_TIMEOUT_S": "60",
}


class Pool:
    """The services behind a gateway. `gateway` starts the gateways one by one."""

    def __init__(
        self,
        directory: Path,
        store: Mapping[str, str] | None = None,
        scheduler: Mapping[str, str] | None = None,
    ) -> None:
        """`store` and `scheduler` are additional environment variables of these services.

        By default one tenant may fill the pool, because the tests' tenants share one. An unwatched session is
        suspended after 15 s. Sessions migrate only when a test requests it. Deadlines are longer than by
        default.
        """
        self._store = {**STORE_DEADLINES, "TURBOSERVE_TENANT_SLOTS_FACTOR": "0", **(store or {})}
        defaults = {"TURBOSERVE_IDLE_AFTER_S": "15", "TURBOSERVE_REBALANCE": "0"}
        self._scheduler = {**SCHEDULER_DEADLINES, **defaults, **(scheduler or {})}
        prepared_cluster.copy_cluster_to(directory)
        self.layout = Layout(directory)
        self.layout.create()
        self._ports = Ports(self.layout.ports)
        users = (*subjects.SERVICES, "admin")
        self.nats = NatsServer(
            self.layout.server("nats"),
            self._ports.get("nats"),
            {user: self.layout.secret(f"nats.{user}") for user in users},
        )
        redis, postgres = self.layout.secret("redis"), self.layout.secret("postgres")
        services = self.layout.secret("postgres.services")
        self.redis = RedisServer(self.layout.server("redis"), self._ports.get("redis"), redis)
        self.postgres = PostgresServer(
            self.layout.server("postgres"), self._ports.get("postgres"), postgres, services, ("fsync=off",)
        )
        self._processes: dict[str, forked_process.Started] = {}
        self.unforked: set[str] = set()
        """Names of processes whose own command line and environment are in /proc."""

    @contextmanager
    def running(self) -> Iterator[Pool]:

        with (
            running([self.nats, self.redis, self.postgres], self.layout.logs / "servers.log"),
            ExitStack() as stack,
        ):
            stack.callback(self.stop_all)
            self.start_store()
            self.start_scheduler()
            self.start_worker()
            yield self

    def start_store(self) -> None:
        self.start(
            "state-store",
            "turboserve.state_store",
            {
                "TURBOSERVE_POSTGRES_URL": self.postgres.url("turboserve"),
                "TURBOSERVE_REDIS_URL": self.redis.url,
                **self._store,
            },
        )

    def start_scheduler(self) -> None:
        self.start("scheduler", "turboserve.scheduler", self._scheduler)

    def start_worker(self) -> None:
        self.start("worker", str(DRAWN_WORKER))

    def start(
        self,
        name: str,
        program: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        user: str | None = None,
        descriptors: int | None = None,
    ) -> None:
        """Start one process; `user` is the service whose permissions it has, by default `name`.

        `descriptors` limits its open files; None: the same limit as this process.
        """
        user = user or name
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **COMMON_DEADLINES,
            "TURBOSERVE_NATS_URL": self.nats.address,
            "TURBOSERVE_NATS_USER": user,
            "TURBOSERVE_NATS_PASSWORD": self.nats.passwords[user],
            **environment,
        }
        command = [program] if program.endswith(".py") else ["-m", program]
        with (self.layout.logs / f"{name}.log").open("ab") as log:
            self._processes[name] = forked_process.start(
                command,
                variables,
                log.fileno(),
                new_session=True,
                descriptors=descriptors,
                forked=name not in self.unforked,
            )

    def stop(self, name: str, sign: signal.Signals = signal.SIGTERM) -> int:
        """Stop one process and wait for it. Returns its exit status."""
        process = self._processes.pop(name)
        process.send_signal(sign)
        try:
            return process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def stop_all(self) -> None:
        """Stop every process. If one does not stop, the others are stopped before the error is raised."""
        with ExitStack() as stack:
            for name in self._processes:
                stack.callback(self.stop, name)

    def log(self, name: str) -> str:
        return (self.layout.logs / f"{name}.log").read_text()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def gateway(
        self, name: str = "gateway", port: int = 0, descriptors: int | None = None, **environment: str
    ) -> str:
        """Start a gateway and wait until sessions can be created through it. Returns its URL.

        `DRAWN_KEY` is the key used for waiting. It is not passed to the gateway.
        """
        port = port or self._ports.get(name)
        key = environment.pop("DRAWN_KEY", None)
        environment = {"TURBOSERVE_GATEWAY_PORT": str(port), **GATEWAY_DEADLINES, **environment}
        self.start(name, "turboserve.gateway", environment, user="gateway", descriptors=descriptors)
        url = f"http://127.0.0.1:{port}"
        self.wait_for(name, url, key)
        return url

    def wait_for(self, name: str, url: str, key: str | None = None) -> None:
        """Wait until the gateway `name` at `url` is ready and a worker has joined.

        Raises RuntimeError, with the ends of all logs, if that takes too long or the gateway has ended.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        deadline = time.monotonic() + START_LIMIT_S
        seen = "nothing"
        while time.monotonic() < deadline:
            try:
                ready = httpx.get(f"{url}/readyz", timeout=STOP_LIMIT_S)
                models = httpx.get(f"{url}/v1/models", headers=headers, timeout=STOP_LIMIT_S)
                seen = f"{ready.text} {models.text}"
                if ready.status_code == 200 and models.json().get("models"):
                    return
            except httpx.HTTPError as error:
                seen = repr(error)
            if (status := self._processes[name].poll()) is not None:
                seen = f"it has ended with status {status}"
                break
            time.sleep(0.1)
        logs = "\n".join(f"{one}: {self.log(one)[-2000:]}" for one in self._processes)
        raise RuntimeError(f"{name} at {url} is not ready: {seen}\n{logs}")


def _serve(port: int) -> None:
    with tempfile.TemporaryDirectory() as directory, Pool(Path(directory)).running() as pool:
        print(pool.gateway(port=port), pool.layout.logs, flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _serve(int(sys.argv[1]) if len(sys.argv) > 1 else 8090)
