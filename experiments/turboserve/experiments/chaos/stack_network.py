"""The network of a stack: proxies between services and servers, and between viewers and gateways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from turboserve.cli.embedded import Layout
from turboserve.cli.stack.options import MODULES, Options
from turboserve.cli.stack.plan import Plan
from turboserve.experiments.chaos.degradations import SECOND
from turboserve.experiments.chaos.network_proxy import NetworkConditions, ProxiedNetwork

BROKER, DATABASE, HOT_STORE = "nats", "postgres", "redis"
VIEWERS = "viewers"
WORKERS = "workers"
SERVERS = 3
"""Number of NATS servers of a stack with redundancy."""


class StackNetwork(ProxiedNetwork):
    """Proxies between the processes of the stack on folder `data`.

    Names of links: `PROCESS-nats` for each process of a service and for `workers`, `state-store-postgres`,
    `state-store-redis`, and `viewers`. A stack with redundancy has links of its second processes as well: for
    example `gateway-2-nats` and `viewers-2`. Enter it before the stack starts.
    """

    def __init__(self, data: Path, seed: int = 0, *, redundancy: bool = False) -> None:
        super().__init__(seed)
        self._data, self._redundancy = data, redundancy
        self._gateways: list[tuple[str, int]] = []
        self._links: dict[str, list[str]] = {}
        """Link → its proxies: one to each server of a cluster."""
        self.prefixes: dict[str, list[str]] = {}
        """Process of a service → words before its command, which give it the proxies' addresses."""
        self.worker_prefix: list[str] = []

    def __enter__(self) -> StackNetwork:
        super().__enter__()
        layout = Layout(self._data)
        layout.create()
        # The same ports and passwords as those of `turboserve up`, which finds them in the folder.
        plan = Plan(Options(data=self._data, nats=SERVERS if self._redundancy else 1), layout)
        urls = {"nats": plan.nats_address, "postgres": plan.postgres_url, "redis": plan.redis_url}
        second = [f"{service}-2" for service in SECOND] if self._redundancy else []
        for process in (*MODULES, *second, WORKERS):
            words = ["env", self._through(process, "nats", urls)]
            if process.startswith("state-store"):
                words += [self._through(process, server, urls) for server in ("postgres", "redis")]
            if process == WORKERS:
                self.worker_prefix = words
            else:
                self.prefixes[process] = words
        self._viewers = [
            self._add(link, number, lambda number=number: self._gateways[number])  # type: ignore[misc]
            for number, link in enumerate([VIEWERS, f"{VIEWERS}-2"][: 2 if self._redundancy else 1])
        ]
        return self

    def _add(self, link: str, number: int, target: Callable[[], tuple[str, int]]) -> int:
        name = f"{link}.{number}"
        self._links.setdefault(link, []).append(name)
        return self.add(name, target)

    def _through(self, process: str, server: str, urls: dict[str, str]) -> str:
        """Start a proxy to each of the servers, and return the variable that names them instead."""
        through: list[str] = []
        for number, address in enumerate(urls[server].split(",")):
            target = urlsplit(address)
            place = target.hostname or "", target.port or 0
            at = self._add(f"{process}-{server}", number, lambda place=place: place)  # type: ignore[misc]
            through.append(target._replace(netloc=f"{target.netloc.rpartition(':')[0]}:{at}").geturl())
        return f"TURBOSERVE_{server.upper()}_URL={','.join(through)}"

    @property
    def links(self) -> frozenset[str]:
        """Names of all links."""
        return frozenset(self._links)

    def degrade(self, link: str, conditions: NetworkConditions) -> None:
        """Set the conditions of a link."""
        self.set(conditions, *self._links[link])

    def serve_viewers_of(self, gateway_urls: Sequence[str]) -> list[str]:
        """Connect viewers to these gateways. Returns the URLs that viewers use."""
        parts = [urlsplit(url) for url in gateway_urls]
        self._gateways = [(one.hostname or "", one.port or 0) for one in parts]
        return [f"http://{one.hostname}:{at}" for one, at in zip(parts, self._viewers, strict=True)]
