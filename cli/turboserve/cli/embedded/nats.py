"""NATS with JetStream on disk and one user per service."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nats.js import api

from turboserve import broker_accounts
from turboserve.cli.embedded import binaries
from turboserve.cli.embedded.nats_cluster import CLUSTER, ClusterMember
from turboserve.cli.embedded.nats_probe import (
    APPEND_ANSWER_S,
    HEALTH_ANSWER_S,
    HEALTH_INBOX,
    HEALTH_SUBJECT,
    HEALTH_USER,
    PROBE_STREAM,
    append,
    server_health,
)
from turboserve.cli.embedded.ports import HOST
from turboserve.cli.embedded.server import EmbeddedServer
from turboserve.subjects import ADMIN

MAX_PAYLOAD_BYTES = 8 * 2**20
"""Maximum size of a message. A chunk at 720p is well below it. Latents are sent raw."""
CONFIG_FILE = "nats.conf"
LIMIT_FILE = "max_file_store"
STORE_SHARE = 0.5
"""Share of the disk space that is free or already used by the log. A log with removed parts may need twice
its size on disk until the broker has compacted it."""
MAX_STORE_BYTES = 64 * 2**30
MIN_STORE_BYTES = 16 * 2**20
SYSTEM_ACCOUNT = "SYS"


class NatsServer(EmbeddedServer):
    """NATS with JetStream.

    `passwords` has one entry per user: `admin`, and services with the permissions of `broker_accounts`.

    There is no HTTP monitor, since it would show connections and subjects to every user of the machine.
    Health is requested in the system account. Its password is new in each process that prepares the server.
    """

    name = "nats"
    # On SIGTERM, nats-server notifies its clients and closes its files.
    stop_signal = signal.SIGTERM
    # The health request and the append have their own connections and limits.
    answer_s = 2 * HEALTH_ANSWER_S + 2 * APPEND_ANSWER_S

    def __init__(
        self,
        directory: Path,
        port: int,
        passwords: Mapping[str, str],
        max_store_bytes: int | None = None,
        ping_interval_s: float | None = None,
        cluster: ClusterMember | None = None,
    ) -> None:
        """Set the server up.

        Args:
            max_store_bytes: Storage limit of JetStream. None: a share of the disk.
            ping_interval_s: Interval of the pings to each client. After two pings without an answer, the
                server disconnects the client. None: the server's default.
            cluster: Its place in a cluster. None: it is alone.
        """
        super().__init__(directory, port)
        self._max_store_bytes = max_store_bytes
        self._ping_interval_s = ping_interval_s
        self._cluster = cluster
        if cluster is not None and cluster.number > 1:
            self.name = f"{NatsServer.name}-{cluster.number}"
        self.passwords = passwords
        self._health_password = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The URL without credentials. Each service adds its own user and password."""
        return f"nats://{HOST}:{self.port}"

    def url(self, user: str = ADMIN) -> str:
        return f"nats://{user}:{self.passwords[user]}@{HOST}:{self.port}"

    async def prepare(self) -> None:
        self.make_directory()
        self.write_config(CONFIG_FILE, self.config())

    def program(self) -> list[str]:
        return [str(binaries.nats_server()), "-c", f"{self.home}/{CONFIG_FILE}"]

    async def probe(self) -> None:
        """Check that the broker serves clients and that JetStream has recovered its streams.

        Only `alive` checks that appends work. On a full disk, an append may fail before the first probe, and
        the broker still serves requests that need no space.
        """
        await self.healthz(js_enabled_only=True)

    async def alive(self) -> None:
        """Request the health, then append to the supervisor's own stream.

        A stream whose file could not be written takes no appends any more, while other streams do: the health
        names it. An append reveals what the health does not, such as a store that has reached its limit.
        """
        if self._cluster is None:
            await self.healthz()
            await append(self.url(), PROBE_STREAM)
        else:
            # The health of a server depends on the others: on an election, for example. So does an append to
            # a stream that is not on this server alone.
            await self.healthz(js_enabled_only=True)
            await append(self.url(), self._own_stream())

    def _own_stream(self) -> api.StreamConfig:
        assert self._cluster is not None
        number = self._cluster.number
        return PROBE_STREAM.evolve(
            name=f"{PROBE_STREAM.name}_{number}",
            subjects=[f"supervisor.probe.{number}"],
            placement=api.Placement(cluster=CLUSTER, tags=[self._cluster.tag]),
            num_replicas=1,
        )

    @property
    def server_name(self) -> str:
        return "turboserve" if self._cluster is None else f"turboserve-{self._cluster.number}"

    async def healthz(self, *, js_enabled_only: bool = False) -> None:
        """Request the server's health on a new connection. Raises NotReadyError with the reason."""
        # Every server of a cluster gets the request, and only the named one answers.
        options: dict[str, Any] = {} if self._cluster is None else {"server_name": self.server_name}
        if js_enabled_only:
            options["js-enabled-only"] = True
        await server_health(self.address, self._health_password, options)

    def store_limit(self) -> int:
        """Return the storage limit of JetStream, bytes.

        The limit never becomes lower, since streams have reserved it. A broker with a lower limit would
        refuse every change of a stream.
        """
        if self._max_store_bytes is not None:
            return self._max_store_bytes
        known = self.directory / LIMIT_FILE
        before = int(known.read_text()) if known.exists() else 0
        held = sum(path.stat().st_size for path in (self.directory / "jetstream").rglob("*.blk"))
        servers = 1 if self._cluster is None else self._cluster.size
        share = int(STORE_SHARE / servers * (shutil.disk_usage(self.directory).free + held))
        limit = max(before, min(MAX_STORE_BYTES, max(MIN_STORE_BYTES, share)))
        self.write_config(LIMIT_FILE, str(limit))
        return limit

    def config(self) -> str:
        """Return the server's configuration. Strings are quoted as in JSON, which NATS can read."""
        accounts = broker_accounts.accounts({user: json.dumps(word) for user, word in self.passwords.items()})
        return f"""\
server_name: "{self.server_name}"
host: "{HOST}"
port: {self.port}
max_payload: {MAX_PAYLOAD_BYTES}
{self._pings()}{"" if self._cluster is None else self._cluster.config()}jetstream {{
  store_dir: {json.dumps(self.home)}
  max_file_store: {self.store_limit()}
}}
system_account: {SYSTEM_ACCOUNT}
accounts {{
  {SYSTEM_ACCOUNT} {{
    users = [
      {self._health_user()}
    ]
  }}
{accounts}}}
"""

    def _pings(self) -> str:
        if self._ping_interval_s is None:
            return ""
        return f'ping_interval: "{round(1000 * self._ping_interval_s)}ms"\nping_max: 2\n'

    def _health_user(self) -> str:
        return (
            f"{{user: {json.dumps(HEALTH_USER)}, password: {json.dumps(self._health_password)}, "
            f"permissions: {{publish: {{allow: [{json.dumps(HEALTH_SUBJECT)}]}}, "
            f'subscribe: {{allow: ["{HEALTH_INBOX}.>"]}}}}}}'
        )
