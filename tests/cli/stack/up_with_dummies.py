"""`turboserve up` with stand-ins for the services: `up_with_dummies.py DATA [--workers N] [--port P]`."""

from __future__ import annotations

import os

import typer

from turboserve import environment
from turboserve.cli.embedded import NatsServer, PostgresServer, RedisServer
from turboserve.cli.stack import options, plan
from turboserve.cli.supervisor import health_checks, probe
from turboserve.cli.up import up

if __name__ == "__main__":
    options.MODULES.update(dict.fromkeys(options.MODULES, "dummy_service"))
    environment.SERVICE = (*environment.SERVICE, "DUMMY_*")
    if "DUMMY_IMPATIENCE" in os.environ:
        health_checks.ASK_EVERY_S = probe.ANSWER_S = float(os.environ["DUMMY_IMPATIENCE"])
    if "DUMMY_SERVER_IMPATIENCE" in os.environ:
        plan.SERVER_SILENT_LIMIT = 3
        plan.SERVER_ASK_EVERY_S = float(os.environ["DUMMY_SERVER_IMPATIENCE"])
    # A server that ends slowly on a busy machine is not killed.
    for server in (NatsServer, RedisServer, PostgresServer):
        server.stop_grace_s = 30.0
    typer.run(up)
