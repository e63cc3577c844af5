"""The embedded NATS servers of a stack: one, or a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from turboserve import subjects
from turboserve.broker_accounts import WORKER, worker_user
from turboserve.cli.embedded import ClusterMember, Layout, NatsServer, Ports
from turboserve.cli.stack.options import Options

SHORT_PING_S = 0.5
"""Interval at which the broker of a redundant stack pings its clients. One that does not answer two pings is
frozen, and gets no more requests."""


def nats_servers(
    options: Options, layout: Layout, ports: Ports, identities: Sequence[str]
) -> list[NatsServer]:
    """Return the servers, with one user for each service and for each of the workers' `identities`."""
    services = [service for service in subjects.SERVICES if service != WORKER]
    users = (*services, subjects.ADMIN, *map(worker_user, identities))
    passwords = {user: layout.secret(f"nats.{user}") for user in users}
    ping_s = SHORT_PING_S if options.redundant else None
    if options.nats == 1:
        return [NatsServer(layout.server("nats"), ports.get("nats"), passwords, ping_interval_s=ping_s)]
    numbers = range(1, options.nats + 1)
    routes = tuple(ports.get(f"nats.route.{number}") for number in numbers)
    secret = layout.secret("nats.route")
    # A cluster has folders of its own. It would delete the streams of a server that was alone.
    return [
        NatsServer(
            layout.server(f"nats-{number}-of-{options.nats}"),
            ports.get("nats" if number == 1 else f"nats-{number}"),
            passwords,
            ping_interval_s=ping_s,
            cluster=ClusterMember(number, routes, secret),
        )
        for number in numbers
    ]
