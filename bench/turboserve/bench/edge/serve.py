"""`python -m turboserve.bench.edge.serve KIND PORT [DESCRIPTORS]`: the application on one kind of server."""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

from turboserve.bench.edge.application import application

KINDS = ("gateway", "uvicorn", "uvicorn-h11", "hypercorn", "granian")
"""The gateway's own server, and others.

uvicorn runs as the gateway ran it before it had limits, with both of its parsers. The other two have their
own timeouts.
"""
MESSAGE_BYTES = 1 << 20
HEADER_S = 10


def serve(kind: str, port: int) -> None:
    """Serve until the process ends. Raises ImportError if the server is not installed."""
    if kind == "gateway":
        asyncio.run(_gateway(port))
    elif kind.startswith("uvicorn"):
        import uvicorn

        uvicorn.run(
            application,
            host="127.0.0.1",
            port=port,
            http="h11" if kind == "uvicorn-h11" else "httptools",
            ws="websockets-sansio",
            loop="asyncio",
            lifespan="off",
            log_level="error",
            ws_per_message_deflate=False,
            ws_max_size=MESSAGE_BYTES,
        )
    elif kind == "hypercorn":
        from hypercorn.asyncio import serve as run
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"127.0.0.1:{port}"]
        config.read_timeout = HEADER_S
        config.websocket_max_message_size = MESSAGE_BYTES
        app: Any = application
        asyncio.run(run(app, config))
    else:
        from granian import Granian
        from granian.constants import Interfaces
        from granian.http import HTTP1Settings

        Granian(
            "turboserve.bench.edge.application:application",
            address="127.0.0.1",
            port=port,
            interface=Interfaces.ASGI,
            log_access=False,
            http1_settings=HTTP1Settings(header_read_timeout=HEADER_S * 1000, max_buffer_size=65_536),
        ).serve()


async def _gateway(port: int) -> None:
    from turboserve.gateway.server import Server
    from turboserve.gateway.serving.settings import ServerSettings

    app: Any = application
    server = Server(app, "127.0.0.1", port, ServerSettings())
    await server.start()
    await server.wait()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]),) * 2)
    serve(sys.argv[1], int(sys.argv[2]))
