"""NATS, Redis and Postgres from their wheels, as child processes on loopback ports."""

from turboserve.cli.embedded.layout import Layout
from turboserve.cli.embedded.nats import NatsServer
from turboserve.cli.embedded.nats_cluster import ClusterMember
from turboserve.cli.embedded.ports import Ports, PortTakenError
from turboserve.cli.embedded.postgres import PostgresServer
from turboserve.cli.embedded.redis import RedisServer
from turboserve.cli.embedded.server import (
    EmbeddedServer,
    NotReadyError,
    ServerFullError,
    ServerSetupError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)

__all__ = [
    "ClusterMember",
    "EmbeddedServer",
    "Layout",
    "NatsServer",
    "NotReadyError",
    "PortTakenError",
    "Ports",
    "PostgresServer",
    "RedisServer",
    "ServerFullError",
    "ServerSetupError",
    "ServerUnhealthyError",
    "ServerUnresponsiveError",
]
