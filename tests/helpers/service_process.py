"""Services as processes (`python -m MODULE`) with their users' credentials, and a bus as any user."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from tests.helpers import forked_process
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings

LIMIT_S = 90.0


class Service:
    """One service: a module's name or file. Its output goes to `log`; `variables` is its environment."""

    starts = False
    """Whether the service's own `python` processes are forks, too."""

    def __init__(self, name: str, module: str, nats: NatsServer, log: Path, **variables: str) -> None:
        self.log = log
        self.variables = {
            **os.environ,
            "TURBOSERVE_NATS_URL": nats.address,
            "TURBOSERVE_NATS_USER": name,
            "TURBOSERVE_NATS_PASSWORD": nats.passwords[name],
            **variables,
        }
        self._command = [module] if module.endswith(".py") else ["-m", module]
        self._process: forked_process.Started | None = None

    def of_version(self, schemas: Path) -> Service:
        """Make the service a process of an earlier version: see `schema_peer.py`. Returns the service."""
        peer = str(Path(__file__).with_name("schema_peer.py"))
        self._command = [peer, str(schemas), self._command[-1]]
        return self

    def start(self, **variables: str) -> None:
        """Start the service, unless it runs; `variables` extend its environment for this start only."""
        if self._process is not None:
            return
        with self.log.open("ab") as log:
            environment = {**self.variables, **variables}
            output = log.fileno()
            self._process = forked_process.start(self._command, environment, output, starts=self.starts)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(LIMIT_S)
            self._process = None

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


def state_store(nats: NatsServer, log: Path, postgres_url: str, redis_url: str, **variables: str) -> Service:
    """Return the state store on these servers, not started yet."""
    return Service(
        "state-store",
        "turboserve.state_store",
        nats,
        log,
        TURBOSERVE_POSTGRES_URL=postgres_url,
        TURBOSERVE_REDIS_URL=redis_url,
        **variables,
    )


def readiness(port: int) -> dict[str, Any]:
    """Return the answer of /readyz at a health port; empty if the service does not answer at the moment."""
    with suppress(OSError):
        try:
            answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=LIMIT_S)
        except urllib.error.HTTPError as error:
            answer = error
        return dict(json.loads(answer.read()))
    return {}


async def connected(nats: NatsServer, name: str, request_deadline_s: float = 3.0) -> Bus:
    """Connect a bus as the service `name`, with its permissions. The caller closes it."""
    settings = Settings(
        nats_url=nats.address,
        nats_user=name,
        nats_password=SecretStr(nats.passwords[name]),
        request_deadline_s=request_deadline_s,
    )
    return await Bus.connect(name, settings)
