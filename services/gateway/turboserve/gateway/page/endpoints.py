"""Serves the static pages for viewers, operators and developers, with a strict content security policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.requests import HTTPConnection
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from turboserve.gateway.addresses import origins_of
from turboserve.gateway.stream import asyncapi

STATIC = Path(__file__).parent / "static"
NO_ONE = "'none'"
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors {NO_ONE}"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


def page_security(gateways: Sequence[str], ancestors: Sequence[str] = ()) -> dict[str, str]:
    """Return the headers of a page that calls the API of `gateways`, besides its own.

    Pages of the origins `ancestors` may show it in a frame.
    """
    found = [origin for url in gateways for origin in origins_of(url)]
    others = [*found, *(f"ws{origin.removeprefix('http')}" for origin in found)]
    policy = SECURITY["Content-Security-Policy"]
    policy = policy.replace("connect-src 'self'", " ".join(["connect-src 'self'", *others]))
    policy = policy.replace("frame-ancestors 'none'", f"frame-ancestors {' '.join(ancestors) or NO_ONE}")
    return {**SECURITY, "Content-Security-Policy": policy}


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(SECURITY)
        return response


@router.get("/")
async def index(connection: HTTPConnection) -> Response:
    gateways = connection.app.state.gateway.settings.gateway_urls
    return FileResponse(STATIC / "index.html", headers=page_security(gateways))


@router.get("/pool")
async def pool() -> Response:
    return FileResponse(STATIC / "pool.html", headers=SECURITY)


@router.get("/docs")
async def docs() -> Response:
    return FileResponse(STATIC / "docs.html", headers=SECURITY)


@router.get("/embed/{session}")
async def embed(session: str, connection: HTTPConnection) -> Response:
    # The page reads the session and the link from its own address, so that no server sees the link.
    settings = connection.app.state.gateway.settings
    headers = page_security(settings.gateway_urls, settings.frame_ancestors)
    return FileResponse(STATIC / "embed.html", headers=headers)


@router.get("/asyncapi.json")
async def asyncapi_document() -> Response:
    return Response(_asyncapi(), media_type="application/json")


@cache
def _asyncapi() -> bytes:
    return json.dumps(asyncapi.document(), ensure_ascii=False).encode()


def install(app: FastAPI) -> None:
    app.include_router(router)
    # The package carries the files of Swagger UI, which FastAPI's own page loads from another host.
    swagger_ui = resources.files("fastapi_offline") / "static"
    app.mount("/docs/swagger-ui", _PageFiles(directory=str(swagger_ui)), name="swagger-ui")
    # The JavaScript client of `sdk/js`, which the page itself uses. Applications may import it from here.
    app.mount("/page/client", _PageFiles(directory=STATIC / "client"), name="client")
    app.mount("/page", _PageFiles(directory=STATIC), name="page")
