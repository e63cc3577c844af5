"""REST: /v1/keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from starlette.requests import HTTPConnection

from turboserve.contracts.base import Id
from turboserve.contracts.keys import ListKeys, Scope
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.middleware import Caller, needs
from turboserve.gateway.keys.schemas import Key, KeyChanges, KeyList, NewKey, NewKeyText
from turboserve.gateway.keys.service import StoredKeys
from turboserve.gateway.paging import AfterNumber
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.sessions.parameters import idempotency_header


def _service_of(connection: HTTPConnection) -> StoredKeys:
    found: StoredKeys = connection.app.state.gateway.stored_keys
    return found


def _keys_are_stored(connection: HTTPConnection) -> None:
    _service_of(connection).check()


# Before the scope: at a gateway whose keys are elsewhere, no key could have it.
router = APIRouter(
    prefix="/v1/keys", tags=["keys"], dependencies=[Depends(_keys_are_stored)], route_class=AuditedRoute
)

Service = Annotated[StoredKeys, Depends(_service_of)]
KeyId = Annotated[str, Path(description="Id of the key.", examples=["2d06c5c4a1b2c3d4"])]
RepeatKey = Annotated[
    str | None,
    idempotency_header(
        "a second request with the same Idempotency-Key creates no second API key. Its answer has the row of "
        "the first one, and `key` is null. The same Idempotency-Key with another request is refused.",
        alias="Idempotency-Key",
    ),
]
LOCATION = {"headers": {"Location": {"schema": {"type": "string"}, "description": "Path of the key."}}}


@router.post(
    "",
    dependencies=[needs(Scope.ADMIN)],
    operation_id="create_key",
    status_code=201,
    summary="Create an API key",
    description="Only this answer has the text of the key. Every gateway accepts the key within two seconds. "
    "A repeat with the same Idempotency-Key creates no second key, and its `key` is null.",
    responses={201: LOCATION, **problems(*BODY, 401, 409)},
)
async def create(
    body: NewKey, response: Response, caller: Caller, keys: Service, idempotency_key: RepeatKey = None
) -> NewKeyText:
    made, text = await keys.create(caller.tenant, body, idempotency_key)
    response.headers["Location"] = f"/v1/keys/{made.key.id}"
    response.headers["Cache-Control"] = "no-store"
    return NewKeyText.created(made, text)


@router.get(
    "",
    dependencies=[needs(Scope.ADMIN)],
    operation_id="list_keys",
    summary="List API keys, newest first",
    description="The keys of all tenants, also revoked and expired ones, by page, without their texts.",
    responses=problems(401, 409, 422),
)
async def list_keys(
    keys: Service,
    tenant: Annotated[Id | None, Query(description="Only keys of this tenant.", examples=["acme"])] = None,
    limit: Annotated[
        int, Query(ge=1, le=1_000, description="Maximum number of keys on the page.", examples=[100])
    ] = 100,
    after: AfterNumber = None,
) -> KeyList:
    return KeyList.of(await keys.page(ListKeys(tenant=tenant, limit=limit, after=after)))


@router.get(
    "/{key}",
    dependencies=[needs(Scope.ADMIN)],
    operation_id="get_key",
    summary="Read an API key",
    description="The key without its text, which is not stored.",
    responses=problems(401, 404, 409),
)
async def read(key: KeyId, keys: Service) -> Key:
    return Key.of(await keys.get(key))


@router.patch(
    "/{key}",
    dependencies=[needs(Scope.ADMIN)],
    operation_id="change_key",
    summary="Change the limits of an API key",
    description="Sets the limits that the request has; what it leaves out stays, and `null` removes a limit. "
    "Every gateway applies the change within two seconds. Nothing that runs is ended. A repeat gets the same "
    "answer.",
    responses=problems(*BODY, 401, 404, 409),
)
async def change(key: KeyId, body: KeyChanges, keys: Service) -> Key:
    return Key.of(await keys.change(key, body))


@router.delete(
    "/{key}",
    dependencies=[needs(Scope.ADMIN)],
    operation_id="revoke_key",
    summary="Revoke an API key",
    description="Every gateway refuses the key within two seconds and ends the streams that it has opened. A "
    "repeat gets the same answer.",
    responses=problems(401, 404, 409),
)
async def revoke(key: KeyId, keys: Service) -> Key:
    return Key.of(await keys.revoke(key))
