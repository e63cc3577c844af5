"""The tenant of a request, as FastAPI dependencies."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from turboserve.gateway.auth.service import bearer
from turboserve.gateway.context import Gateway, gateway_of

_scheme = HTTPBearer(
    auto_error=False, scheme_name="apiKey", description="An API key; needed only if the gateway has any."
)


def _from_header(
    connection: HTTPConnection,
    gateway: Annotated[Gateway, Depends(gateway_of)],
) -> str:
    return gateway.keys.tenant_of(bearer(connection.headers.get("authorization")))


def _header_in_openapi(
    tenant: Annotated[str, Depends(_from_header)],
    _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
) -> str:
    return tenant


def _from_header_or_query(
    connection: HTTPConnection,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    _credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)],
    access_token: Annotated[
        str | None, Query(description="The API key, where a browser cannot set headers.")
    ] = None,
) -> str:
    return gateway.keys.tenant_of(bearer(connection.headers.get("authorization")) or access_token)


Tenant = Annotated[str, Depends(_header_in_openapi)]
"""From the Authorization header."""
StreamTenant = Annotated[str, Depends(_from_header_or_query)]
"""From the Authorization header or `?access_token=`."""
