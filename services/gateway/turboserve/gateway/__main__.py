"""`python -m turboserve.gateway`."""

from __future__ import annotations

from turboserve import logs, service
from turboserve.gateway.app import create_app, create_gateway
from turboserve.gateway.server import Server
from turboserve.gateway.settings import Settings

log = logs.get("gateway")


async def start(runtime: service.Runtime) -> None:
    assert isinstance(runtime.settings, Settings)
    settings = runtime.settings
    gateway = create_gateway(settings, runtime.bus, runtime.clock, runtime.checks, runtime.warnings)
    server = Server(create_app(gateway), settings.gateway_host, settings.gateway_port)
    runtime.check("http", lambda: server.started and not server.should_exit)
    await gateway.pools.start()
    await server.start()
    runtime.spawn(server.wait(), "http server")
    runtime.spawn(gateway.timeline.run(), "timeline")
    # Last added, first called: viewers are told to come back before the server stops listening.
    runtime.on_stop(server.stop)
    runtime.on_stop(gateway.streams.close)
    log.info("listening", url=f"http://{settings.gateway_host}:{server.port}/")


if __name__ == "__main__":
    service.run("gateway", Settings(), start)
