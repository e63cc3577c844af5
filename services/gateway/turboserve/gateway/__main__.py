"""Entry point of the gateway: `python -m turboserve.gateway`."""

from __future__ import annotations

import os

import turboserve.program_start  # noqa: F401
from turboserve import logs, service
from turboserve.gateway import exposure
from turboserve.gateway.app import create_app, start_gateway
from turboserve.gateway.auth import reload
from turboserve.gateway.broker_silence import send_viewers_on
from turboserve.gateway.server import Server
from turboserve.gateway.settings import Settings
from turboserve.host_port import host_port

log = logs.get("gateway")


async def start(runtime: service.Runtime) -> None:
    assert isinstance(runtime.settings, Settings)
    settings = runtime.settings
    gateway = await start_gateway(runtime, settings)
    app = create_app(gateway)
    server = Server(app, settings.gateway_host, settings.gateway_port, settings)
    runtime.check("http", lambda: server.started and not server.should_exit)
    if settings.api_keys_file is not None:
        runtime.spawn(reload.follow(gateway.keys, settings.api_keys_file), "api keys")
    if len(settings.gateway_urls) > 1:
        send_viewers_on(runtime, gateway.streams, settings.gateway_urls)
    await app.state.peers.listen(runtime.bus)
    await gateway.signer.listen()
    runtime.spawn(gateway.signer.run(), "signing keys")
    runtime.spawn(gateway.audit.run(), "audit log")
    await server.start()
    runtime.spawn(server.wait(), "http server")
    # Stop callbacks run in reverse order: viewers are asked to reconnect before the server stops listening.
    runtime.on_stop(server.stop)
    runtime.on_stop(gateway.streams.close)
    address = host_port(settings.gateway_host, server.port)
    log.info("listening", url=f"http://{address}/")
    log.info("open", **exposure.fields(settings, gateway.keys, server.port))
    if not gateway.keys:
        log.warning(exposure.KEYLESS, address=address)


def main() -> None:
    settings = service.load("gateway", Settings)
    # From here on the process needs only hashes. /proc/PID/environ still shows the keys: see
    # docs/how-to/api-keys.md.
    os.environ.pop("TURBOSERVE_API_KEYS", None)
    service.run("gateway", settings, start)


if __name__ == "__main__":
    main()
