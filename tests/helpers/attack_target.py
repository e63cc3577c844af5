"""The target of attacks: every service as its own process, with keys for each role."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.pool_harness import DRAWN_WORKER, Pool
from tests.helpers.stored_keys import StoredKeyText, store_keys
from turboserve.contracts.keys import Scope
from turboserve.gateway.auth.hashing import OPERATOR_SCOPES, TENANT_SCOPES

KEYS = {
    "alice": "key-of-alice-1111111111",
    "bob": "key-of-bob-2222222222222",
    "operator": "key-of-operator-33333333",
    "admin": "key-of-admin-44444444444",
    "hooks": "key-of-hooks-55555555555",
}
SCOPES: dict[str, list[str]] = {
    "operator": sorted(OPERATOR_SCOPES),
    "admin": [Scope.ADMIN],
    "hooks": [Scope.SESSIONS_READ, Scope.WEBHOOKS_WRITE],
}
"""Scopes of the keys that have others than a tenant's."""
SPARE_KEY = "spare"
"""Id of a key that no test uses for a request."""
PATIENCE_S = 120.0


class Target:
    """The stack under attack. `url` is a gateway's."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        keys = [StoredKeyText(one, one, KEYS[one], SCOPES.get(one, sorted(TENANT_SCOPES))) for one in KEYS]
        keys.append(StoredKeyText(SPARE_KEY, "acme", SPARE_KEY, [Scope.ADMIN]))
        asyncio.run(store_keys(pool.nats, keys))
        pool.start("webhooks", "turboserve.webhooks", {"TURBOSERVE_WEBHOOK_KEY": "a key of these tests"})
        self.url: str = pool.gateway(
            "attacked",
            TURBOSERVE_API_KEYS_STORE="1",
            # Thousands of wrong keys come from one address. The throttle has tests of its own.
            TURBOSERVE_KEY_FAILURES_PER_MINUTE="10000",
            # Attacks open thousands of streams with one ticket.
            TURBOSERVE_TICKET_LIFETIME_S="600",
            DRAWN_KEY=KEYS["alice"],
        )
        self.services = ("attacked", "state-store", "scheduler", "autoscaler")

    def client(self, tenant: str | None = None, **options: Any) -> httpx.Client:
        """Return a client with the tenant's key."""
        headers = {} if tenant is None else {"Authorization": f"Bearer {KEYS[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, **options)

    def session(self, tenant: str = "alice", **more: Any) -> str:
        """Create a session of the tenant and wait until a worker runs it. Returns its id."""
        with self.client(tenant) as client:
            answer = client.post("/v1/sessions", json={"prompt": "a red circle", **more})
            assert answer.status_code == 201, answer.text
            name: str = answer.json()["id"]
            deadline = time.monotonic() + PATIENCE_S
            while (row := client.get(f"/v1/sessions/{name}").json())["phase"] != "active":
                assert time.monotonic() < deadline, f"it is not placed: {row}"
                if row["activity"] == "idle":
                    client.post(f"/v1/sessions/{name}/resume")
                time.sleep(0.05)
        return name

    def end(self, *names: str, tenant: str = "alice") -> None:
        with self.client(tenant) as client:
            for name in names:
                client.delete(f"/v1/sessions/{name}")

    def marks(self) -> dict[str, int]:
        """Return the length of each service's log, in bytes."""
        return {service: self._log(service).stat().st_size for service in self.services}

    def logged_since(self, service: str, mark: int) -> bytes:
        """Return what a service has logged since its log was `mark` bytes long."""
        with self._log(service).open("rb") as log:
            log.seek(mark)
            return log.read()

    def _log(self, service: str) -> Path:
        path: Path = self.pool.layout.logs / f"{service}.log"
        return path

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.pool._processes.items()}

    def alive(self) -> bool:
        """Return whether all started processes still run."""
        return all(process.poll() is None for process in self.pool._processes.values())


class ScaledPool(Pool):
    """A pool whose worker an autoscaler starts."""

    def start_worker(self) -> None:
        self.start(
            "autoscaler",
            "turboserve.autoscaler",
            {
                "TURBOSERVE_POOL_WORKER_COMMAND": json.dumps([sys.executable, str(DRAWN_WORKER)]),
                "TURBOSERVE_POOL_STOP_WITH_AUTOSCALER": "1",
                "TURBOSERVE_POOL_MAX": "2",
                "TURBOSERVE_WORKER_NATS_USER": "worker",
                "TURBOSERVE_WORKER_NATS_PASSWORD": self.nats.passwords["worker"],
                "TURBOSERVE_POOL_WORKER_VARIABLES": "DRAWN_CAPACITY",
                "DRAWN_CAPACITY": "64",
            },
        )


@contextmanager
def running_target(directory: Path) -> Iterator[Target]:
    """Run servers, state store, scheduler, gateway, and an autoscaler with one worker of its own."""
    pool = ScaledPool(directory)
    with pool.running():
        yield Target(pool)
