"""The network of a stack: one proxy for each service and server, and one between viewers and the gateway."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from turboserve.cli.embedded import Layout
from turboserve.cli.stack.options import MODULES, Options
from turboserve.cli.stack.plan import Plan
from turboserve.experiments.chaos.network_proxy import ProxiedNetwork

BROKER, DATABASE, HOT_STORE = "nats", "postgres", "redis"
VIEWERS = "viewers"
WORKERS = "workers"


class StackNetwork(ProxiedNetwork):
    """Proxies between the processes of the stack on folder `data`, which has one NATS server.

    Names of the proxies: `SERVICE-nats` for each service and for `workers`, `state-store-postgres`,
    `state-store-redis`, and `viewers`. Enter it before the stack starts.
    """

    def __init__(self, data: Path, seed: int = 0) -> None:
        super().__init__(seed)
        self._data = data
        self._gateway: tuple[str, int] | None = None
        self.prefixes: dict[str, list[str]] = {}
        """Service → words before its command, which give it the proxies' addresses."""
        self.worker_prefix: list[str] = []

    def __enter__(self) -> StackNetwork:
        super().__enter__()
        layout = Layout(self._data)
        layout.create()
        # The same ports and passwords as those of `turboserve up`, which finds them in the folder.
        plan = Plan(Options(data=self._data), layout)
        urls = {"nats": plan.nats_address, "postgres": plan.postgres_url, "redis": plan.redis_url}
        for service in (*MODULES, WORKERS):
            words = ["env", self._through(service, "nats", urls)]
            if service == "state-store":
                words += [self._through(service, server, urls) for server in ("postgres", "redis")]
            if service == WORKERS:
                self.worker_prefix = words
            else:
                self.prefixes[service] = words
        self._viewers = self.add(VIEWERS, self._gateway_address)
        return self

    def _through(self, service: str, server: str, urls: dict[str, str]) -> str:
        """Start a proxy, and return the variable that names it instead of the server."""
        target = urlsplit(urls[server])
        host, port = target.hostname or "", target.port or 0
        at = self.add(f"{service}-{server}", lambda: (host, port))
        url = target._replace(netloc=f"{target.netloc.rpartition(':')[0]}:{at}").geturl()
        return f"TURBOSERVE_{server.upper()}_URL={url}"

    def serve_viewers_of(self, gateway_url: str) -> str:
        """Connect viewers to this gateway. Returns the URL that viewers use."""
        parts = urlsplit(gateway_url)
        self._gateway = parts.hostname or "", parts.port or 0
        return f"http://{parts.hostname}:{self._viewers}"

    def _gateway_address(self) -> tuple[str, int]:
        assert self._gateway is not None, "the stack has not started"
        return self._gateway
