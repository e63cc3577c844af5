"""Every route declares the scope that it needs, and its OpenAPI names it."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi.params import Security
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute

from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.gateway.app import create_app, create_gateway
from turboserve.gateway.auth.middleware import AccessCheck
from turboserve.gateway.settings import Settings

WEBRTC = ("watch_over_webrtc", "webrtc_servers", "leave_webrtc")
CONSOLE = [
    f"/v1/pools/{{pool}}/{name}"
    for name in ("history", "decisions", "migrations", "workers", "cost", "queue")
]
"""Read by operators only: they show all tenants."""
APP = create_app(create_gateway(Settings(api_keys_store=True), object(), object(), dict))  # type: ignore[arg-type]


def guarded(routes: list[BaseRoute]) -> Iterator[APIRoute | APIWebSocketRoute]:
    """Yield the routes under /v1, also those of included routers."""
    for route in routes:
        if isinstance(route, APIRoute | APIWebSocketRoute):
            if route.path.startswith("/v1"):
                yield route
        elif hasattr(route, "original_router"):
            yield from guarded(route.original_router.routes)


def scopes(route: APIRoute | APIWebSocketRoute) -> list[str]:
    """Return the scopes that a route declares."""
    found = [
        one
        for one in route.dependencies
        if isinstance(one, Security) and isinstance(one.dependency, AccessCheck)
    ]
    return [scope for one in found for scope in one.scopes or ()]


def test_every_route_declares_one_scope() -> None:
    declared = {(route.path, route.name): scopes(route) for route in guarded(APP.routes)}
    assert len(declared) > 25
    assert {place: found for place, found in declared.items() if len(found) != 1} == {}
    assert {found[0] for found in declared.values()} == set(Scope)


def test_what_changes_something_needs_more_than_the_right_to_read() -> None:
    for route in guarded(APP.routes):
        # A ticket lets a browser's stream do what its sender may do, and changes nothing. To watch over
        # WebRTC is to read.
        reads = (
            isinstance(route, APIWebSocketRoute)
            or route.methods == {"GET"}
            or route.name == "create_ticket"
            or route.name in WEBRTC
        )
        found = scopes(route)
        if route.path in CONSOLE:
            assert found == [Scope.POOL_WRITE]
        elif route.path.startswith("/v1/webhooks"):
            assert found == [Scope.WEBHOOKS_WRITE]
        elif not route.path.startswith(("/v1/keys", "/v1/audit")):
            assert (found == [Scope.SESSIONS_READ]) == reads, (route.path, found)
        else:
            assert found == [Scope.ADMIN]


def test_a_link_opens_only_what_its_role_names() -> None:
    """The list is complete: a new route for holders of links is declared here."""
    shared: dict[Role, set[str]] = {role: set() for role in Role}
    for route in guarded(APP.routes):
        [check] = [
            one.dependency
            for one in route.dependencies
            if isinstance(one, Security) and isinstance(one.dependency, AccessCheck)
        ]
        if check.shared is not None:
            # A recording's own routes compare its session with the link's.
            assert "{session}" in route.path or route.path.startswith("/v1/recordings")
            shared[check.shared].add(route.name)
    assert shared == {
        Role.VIEWER: {
            *("read", "create_ticket", "stream_mp4", "not_a_socket", "stream", "events"),
            *WEBRTC,
            *("list_recordings", "video", "playlist", "init", "segment", "poster", "contact_sheet"),
        },
        Role.CONTROLLER: {"change", "prompt", "control", "pause", "resume", "start", "stop"},
    }


def test_the_document_names_the_scopes() -> None:
    for path, operations in APP.openapi()["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/v1"):
                [required] = operation["security"]
                [named] = required["apiKey"]
                assert named in set(Scope), (method, path)
                assert "403" in operation["responses"]
