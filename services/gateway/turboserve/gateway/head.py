"""HEAD: what probes of load balancers and monitors ask with."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_LASTING = ("/stream", "/stream.mp4", "/events")


def takes_head(path: str) -> bool:
    """Whether the resource at `path` has an end, so that its headers can be had without it."""
    return not path.endswith(_LASTING)


class HeadAsGet:
    """ASGI middleware: HEAD is answered as GET is; the server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and takes_head(scope["path"]):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
