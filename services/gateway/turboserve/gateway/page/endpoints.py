"""Serves the static pages for viewers and operators, with a strict content security policy."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(SECURITY)
        return response


@router.get("/")
async def index() -> Response:
    return FileResponse(STATIC / "index.html", headers=SECURITY)


@router.get("/pool")
async def pool() -> Response:
    return FileResponse(STATIC / "pool.html", headers=SECURITY)


def install(app: FastAPI) -> None:
    app.include_router(router)
    app.mount("/page", _PageFiles(directory=STATIC), name="page")
