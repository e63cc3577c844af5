"""Support for HEAD requests, which load balancers and monitors send as probes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_LASTING = ("/stream", "/stream.mp4", "/events")


def takes_head(path: str) -> bool:
    """Return whether the response at `path` is finite. Only finite responses support HEAD."""
    return not path.endswith(_LASTING)


class HeadAsGet:
    """ASGI middleware: handles HEAD like GET. The server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and takes_head(scope["path"]):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
