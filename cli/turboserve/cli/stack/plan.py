"""The plan of a stack: its processes, the order of their start and stop, and their settings."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import cached_property

from pydantic import SecretStr

from turboserve import environment
from turboserve.broker_accounts import worker_user
from turboserve.cli.embedded import (
    EmbeddedServer,
    Layout,
    NatsServer,
    Ports,
    PortTakenError,
    PostgresServer,
    RedisServer,
)
from turboserve.cli.embedded.ports import HOST, next_free
from turboserve.cli.stack.brokers import nats_servers
from turboserve.cli.stack.decode_pool import DECODE, DECODE_WORKER, DecodePool
from turboserve.cli.stack.inherited import inherited
from turboserve.cli.stack.options import DEFAULT_PORT, WEBHOOKS, Options
from turboserve.cli.supervisor.core import Member
from turboserve.cli.supervisor.probe import healthz, readyz
from turboserve.cli.supervisor.spec import ProcessSpec
from turboserve.config import Settings
from turboserve.failover import Failover
from turboserve.free_ports import is_free

SERVER_WAVE, STORE_WAVE, SERVICE_WAVE = range(3)
SILENT_LIMIT = 6
"""Unanswered health checks in a row, seconds apart, after which a service counts as hung."""
SERVER_SILENT_LIMIT = 4
"""The same for servers. Lower, since all services wait for servers: a hung one is replaced in 20 to 25 s."""
SERVER_FAILING_LIMIT = 3
SERVER_ASK_EVERY_S = 1.5
MANUAL = "manual"
"""Identity of a worker that is started by hand. The autoscaler does not have its password."""
RECORDINGS_URL = "TURBOSERVE_RECORDINGS_URL"
GATEWAY_URLS = "TURBOSERVE_GATEWAY_URLS"
FAILOVER = "TURBOSERVE_FAILOVER"
WEBHOOK_KEY = "TURBOSERVE_WEBHOOK_KEY"
STOP_ORDER = (
    "gateway",
    "autoscaler",
    "workers",
    DECODE_WORKER,
    "scheduler",
    "recorder",
    "webhooks",
    "state-store",
    "servers",
)


@dataclass(frozen=True)
class Plan:
    """The processes of one stack. Each port is chosen when it is first read."""

    options: Options
    layout: Layout

    @cached_property
    def port(self) -> int:
        """The gateway's port. Raises PortTakenError if the requested port is in use."""
        wanted = self.options.port
        if wanted is None:
            return next_free(DEFAULT_PORT)
        if not is_free(wanted):
            raise PortTakenError(wanted)
        return wanted

    @cached_property
    def gateway_ports(self) -> dict[str, int]:
        """The port of each gateway's process. The first one is `port`, the others are free ones behind it."""
        ports = {"gateway": self.port}
        for instance in self._instances("gateway")[1:]:
            ports[instance] = next_free(max(ports.values()) + 1)
        return ports

    @property
    def url(self) -> str:
        return self.gateway_urls[0]

    @property
    def gateway_urls(self) -> list[str]:
        return [f"http://{HOST}:{port}" for port in self.gateway_ports.values()]

    @property
    def identities(self) -> list[str]:
        """Broker identities of workers, twice as many as the maximum of workers.

        A draining worker and its replacement need one each.
        """
        return [f"wk{number}" for number in range(max(2, 2 * self.options.workers.high))]

    @cached_property
    def nats_servers(self) -> list[NatsServer]:
        """The embedded NATS servers; none if the broker is external."""
        if self.options.external.nats_url is not None:
            return []
        identities = (*self.identities, *self.decode_pool.identities, MANUAL)
        return nats_servers(self.options, self.layout, self._ports, identities)

    @property
    def nats(self) -> NatsServer | None:
        """The first embedded NATS server."""
        return self.nats_servers[0] if self.nats_servers else None

    @property
    def nats_address(self) -> str:
        """The URLs of the embedded NATS servers without credentials, for services."""
        return ",".join(server.address for server in self.nats_servers)

    @cached_property
    def redis(self) -> RedisServer | None:
        if self.options.external.redis_url is not None:
            return None
        return RedisServer(self.layout.server("redis"), self._ports.get("redis"), self.layout.secret("redis"))

    @cached_property
    def postgres(self) -> PostgresServer | None:
        if self.options.external.postgres_url is not None:
            return None
        return PostgresServer(
            self.layout.server("postgres"),
            self._ports.get("postgres"),
            self.layout.secret("postgres"),
            self.layout.secret("postgres.services"),
        )

    @property
    def nats_url(self) -> str:
        """The broker's URL for tools and tests, with the admin's credentials if the broker is embedded."""
        return self.nats.url() if self.nats is not None else self.options.external.nats_url or ""

    def broker_settings(self, user: str) -> Settings:
        """Return the settings by which this process connects to the broker as `user`."""
        if self.nats is None:
            return Settings()
        password = SecretStr(self.nats.passwords[user])
        return Settings(nats_url=self.nats_address, nats_user=user, nats_password=password)

    @property
    def redis_url(self) -> str:
        external = self.options.external.redis_url
        return self.redis.url if self.redis is not None else external.get_secret_value() if external else ""

    @property
    def postgres_url(self) -> str:
        external = self.options.external.postgres_url
        if self.postgres is not None:
            return self.postgres.url()
        return external.get_secret_value() if external else ""

    @property
    def workers_rank(self) -> int:
        return STOP_ORDER.index("workers")

    def processes(self) -> list[ProcessSpec]:
        modules = self.options.modules | (WEBHOOKS if self.options.webhooks else {})
        modules |= DECODE if self.options.decode_workers else {}
        servers = [server for server in (*self.nats_servers, self.redis, self.postgres) if server is not None]
        return [
            *(self._server(server) for server in servers),
            *(
                self._service(instance, name, module)
                for name, module in modules.items()
                for instance in self._instances(name)
            ),
        ]

    def _instances(self, service: str) -> list[str]:
        """Return the names of the service's processes. The first one has the service's name."""
        options = self.options
        counts = {
            "scheduler": options.schedulers,
            "gateway": options.gateways,
            "state-store": options.state_stores,
            "autoscaler": options.autoscalers,
            DECODE_WORKER: options.decode_workers,
        }
        return [service, *(f"{service}-{number}" for number in range(2, counts.get(service, 1) + 1))]

    @cached_property
    def decode_pool(self) -> DecodePool:
        """The decode workers."""
        return DecodePool(self._instances(DECODE_WORKER)[: self.options.decode_workers], self._ports)

    @cached_property
    def _ports(self) -> Ports:
        return Ports(self.layout.ports)

    def _server(self, server: EmbeddedServer) -> ProcessSpec:
        return ProcessSpec(
            # The guard has its own grace period. This one is for a guard that hangs.
            member=Member(
                server.name,
                wave=SERVER_WAVE,
                rank=STOP_ORDER.index("servers"),
                grace_s=server.stop_grace_s + 2.0,
                silent_limit=SERVER_SILENT_LIMIT,
                failing_limit=SERVER_FAILING_LIMIT,
            ),
            kind="server",
            command=[*self.options.prefixes.get(server.name, []), *server.command()],
            probe=server.probe,
            alive=server.alive,
            ask_every_s=SERVER_ASK_EVERY_S,
            answer_s=server.answer_s,
            directory=server.directory,
            prepare=server.prepare,
            environment=environment.child(os.environ, environment.SYSTEM),
            port=server.port,
            pid_file=server.pid_file,
        )

    def _service(self, instance: str, name: str, module: str) -> ProcessSpec:
        health_port = self._ports.get(f"health.{instance}")
        return ProcessSpec(
            member=Member(
                instance,
                wave=STORE_WAVE if name == "state-store" else SERVICE_WAVE,
                rank=STOP_ORDER.index(name),
                grace_s=10.0,
                silent_limit=SILENT_LIMIT,
            ),
            kind="service",
            command=[*self.options.prefix(instance, name), sys.executable, "-m", module],
            probe=readyz(health_port),
            alive=healthz(health_port),
            environment={
                **inherited(name),
                **self._common(self.decode_pool.users.get(instance, name)),
                **self.options.model_settings(name),
                **self._own(name, instance),
                "TURBOSERVE_HEALTH_PORT": str(health_port),
            },
            port=health_port,
        )

    def _common(self, name: str) -> dict[str, str]:
        common = {
            "PYTHONUNBUFFERED": "1",
            # The supervisor renders text itself, because it knows which worker wrote a line.
            "TURBOSERVE_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        if self.options.redundant and FAILOVER not in os.environ:
            common[FAILOVER] = Failover.SHORT.value
        if self.nats is not None:
            common["TURBOSERVE_NATS_URL"] = self.nats_address
            common["TURBOSERVE_NATS_USER"] = name
            common["TURBOSERVE_NATS_PASSWORD"] = self.nats.passwords[name]
        return common

    def _own(self, name: str, instance: str) -> dict[str, str]:
        """Return the settings that only this service gets."""
        if name == "gateway":
            own = {
                "TURBOSERVE_GATEWAY_HOST": HOST,
                "TURBOSERVE_GATEWAY_PORT": str(self.gateway_ports[instance]),
            }
            if len(self.gateway_ports) > 1 and GATEWAY_URLS not in os.environ:
                own[GATEWAY_URLS] = ",".join(self.gateway_urls)
            return own | ({"TURBOSERVE_API_KEYS_STORE": "1"} if self.options.auth else {})
        if name == "state-store":
            own = {"TURBOSERVE_POSTGRES_URL": self.postgres_url, "TURBOSERVE_REDIS_URL": self.redis_url}
            if self.nats is not None:
                own["TURBOSERVE_LOG_DIRECTORY"] = str(self.nats.directory)
                own["TURBOSERVE_LOG_REPLICAS"] = str(len(self.nats_servers))
            return own
        if name == "recorder":
            return {} if RECORDINGS_URL in os.environ else {RECORDINGS_URL: f"file:{self.layout.recordings}"}
        if name == "webhooks":
            return {} if WEBHOOK_KEY in os.environ else {WEBHOOK_KEY: self.layout.secret("webhooks")}
        if name == "autoscaler":
            low, high = str(self.options.workers.low), str(self.options.workers.high)
            own = {
                "TURBOSERVE_POOL_SIZE": low,
                "TURBOSERVE_POOL_MIN": low,
                "TURBOSERVE_POOL_MAX": high,
                "TURBOSERVE_POOL_SHARED": str(int(self.options.autoscalers > 1)),
            }
            if self.options.decode_workers:
                own |= self.decode_pool.worker_settings(self.layout.secret("decode"))
            if self.nats is not None:
                own["TURBOSERVE_POOL_SCOPE"] = self.nats_address
                passwords = {name: self.nats.passwords[worker_user(name)] for name in self.identities}
                own["TURBOSERVE_WORKER_IDENTITIES"] = json.dumps(passwords)
            return own
        if name == DECODE_WORKER:
            return self.decode_pool.settings(instance, self.layout.secret("decode"))
        return {}
