"""FastAPI dependencies that give the sender of a request, whom the middleware has identified."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from turboserve.gateway.auth.middleware import admitted
from turboserve.gateway.auth.service import Identity

_scheme = HTTPBearer(
    auto_error=False, scheme_name="apiKey", description="An API key. Required if the gateway has keys."
)


def _identity(
    connection: HTTPConnection,
    _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
) -> Identity:
    return admitted(connection.scope)


def _tenant(identity: Annotated[Identity, Depends(_identity)]) -> str:
    return identity.tenant


def _stream_tenant(
    identity: Annotated[Identity, Depends(_identity)],
    # The middleware reads this parameter. It is declared here for OpenAPI.
    _access_token: Annotated[
        str | None,
        Query(
            alias="access_token",
            description="The API key, for clients that cannot set the header Authorization.",
            examples=["KEY"],
        ),
    ] = None,
) -> str:
    return identity.tenant


Caller = Annotated[Identity, Depends(_identity)]
"""The sender's identity, from the Authorization header."""
Tenant = Annotated[str, Depends(_tenant)]
"""The sender's tenant, from the Authorization header."""
StreamTenant = Annotated[str, Depends(_stream_tenant)]
"""The sender's tenant, from the Authorization header or `?access_token=`."""
