"""A NATS server's place in a cluster on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass

from turboserve.cli.embedded.ports import HOST

CLUSTER = "turboserve"
ROUTE_USER = "route"
ROUTE_PING = "500ms"
"""Interval of the pings between the servers of a cluster. Two without an answer end a route."""


@dataclass(frozen=True)
class ClusterMember:
    """One server's place in a cluster."""

    number: int
    """1 for the first server."""
    ports: tuple[int, ...]
    """Ports for routes, of all servers in their order."""
    password: str
    """Password of the routes."""

    @property
    def size(self) -> int:
        return len(self.ports)

    def config(self) -> str:
        """Return the section `cluster` of the server's configuration, and its tag."""
        user = f"{ROUTE_USER}:{self.password}"
        routes = ", ".join(json.dumps(f"nats-route://{user}@{HOST}:{port}") for port in self.ports)
        return f"""\
server_tags: [{json.dumps(self.tag)}]
cluster {{
  name: "{CLUSTER}"
  host: "{HOST}"
  port: {self.ports[self.number - 1]}
  authorization {{user: {ROUTE_USER}, password: {json.dumps(self.password)}}}
  routes: [{routes}]
  # Services know all servers by their settings. So a proxy between them and a server is not bypassed.
  no_advertise: true
  ping_interval: "{ROUTE_PING}"
  ping_max: 2
}}
"""

    @property
    def tag(self) -> str:
        """Tag by which a stream is placed on this server."""
        return f"server:{self.number}"
