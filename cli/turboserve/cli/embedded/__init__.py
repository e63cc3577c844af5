"""NATS, Redis and Postgres from their wheels, as child processes on loopback ports."""

from turboserve.cli.embedded.layout import Layout
from turboserve.cli.embedded.nats import NatsServer
from turboserve.cli.embedded.ports import Ports, PortTaken
from turboserve.cli.embedded.postgres import PostgresServer
from turboserve.cli.embedded.redis import RedisServer
from turboserve.cli.embedded.server import (
    EmbeddedServer,
    NotReady,
    RefusesError,
    ServerFailed,
    SilentError,
    UnhealthyError,
)

__all__ = [
    "EmbeddedServer",
    "Layout",
    "NatsServer",
    "NotReady",
    "PortTaken",
    "Ports",
    "PostgresServer",
    "RedisServer",
    "RefusesError",
    "ServerFailed",
    "SilentError",
    "UnhealthyError",
]
