"""Every route with every verb, for no key, a wrong key, a foreign tenant, the owner and an operator.

The routes come from the gateway itself. A route that is not in the table below fails the test, so that the
access to a new route must be declared here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, auto
from typing import Any, NamedTuple

import httpx
import pytest
import websockets
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from websockets.sync.client import connect

from tests.helpers.attack_target import KEYS, PATIENCE_S, SPARE_KEY, Target
from tests.helpers.waiting import eventually_blocking
from tests.helpers.whep_client import an_offer
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role
from turboserve.gateway.app import create_app, create_gateway
from turboserve.gateway.settings import Settings


class Access(Enum):
    """Callers of a route."""

    PUBLIC = auto()
    """Everyone, without a key."""
    TENANT = auto()
    """Every tenant; each sees only its own data."""
    SESSION = auto()
    """The session's tenant. For all others the session does not exist."""
    SESSION_OR_OPERATOR = auto()
    OPERATOR = auto()
    """Keys with the scope `pool:write`."""
    ADMIN = auto()
    """Keys with the scope `admin`."""
    WEBHOOK = auto()
    """Keys with the scope `webhooks:write`, for the webhooks of their own tenant."""
    RECORDING = auto()
    """The recording's tenant. For all others the recording does not exist."""
    UPGRADE = auto()
    """Every tenant. The answer says only that a WebSocket is needed, and is the same for every session id."""


P, T, S, SO, O, A, W, R, U = Access  # noqa: E741
SESSION = "/v1/sessions/{session}"
WHEP = f"{SESSION}/whep"
POOL = "/v1/pools/{pool}"
RECORDING = "/v1/recordings/{recording}"
WEBHOOK = "/v1/webhooks/{webhook}"
TABLE: dict[tuple[str, str], Access] = {
    ("GET", "/"): P,
    ("GET", "/pool"): P,
    ("GET", "/page"): P,
    ("GET", "/page/client"): P,
    ("GET", "/openapi.json"): P,
    ("GET", "/asyncapi.json"): P,
    ("GET", "/docs"): P,
    ("GET", "/embed/{session}"): P,
    ("GET", "/docs/swagger-ui"): P,
    ("GET", "/healthz"): P,
    ("GET", "/readyz"): P,
    ("GET", "/metrics"): P,
    ("GET", "/v1/models"): T,
    ("GET", "/v1/workers"): T,
    ("GET", "/v1/pools"): T,
    ("GET", POOL): T,
    ("GET", f"{POOL}/orders"): T,
    ("GET", f"{POOL}/history"): O,
    ("GET", f"{POOL}/decisions"): O,
    ("GET", f"{POOL}/migrations"): O,
    ("GET", f"{POOL}/workers"): O,
    ("GET", f"{POOL}/cost"): O,
    ("GET", f"{POOL}/queue"): O,
    ("GET", "/v1/cost"): T,
    ("GET", "/v1/usage"): T,
    ("GET", "/v1/usage.csv"): T,
    ("GET", "/v1/sessions"): T,
    ("POST", "/v1/sessions"): T,
    ("PUT", f"{POOL}/override"): O,
    ("DELETE", f"{POOL}/override"): O,
    ("PUT", f"{POOL}/dry-run"): O,
    ("DELETE", f"{POOL}/dry-run"): O,
    ("PUT", f"{POOL}/profile"): O,
    ("DELETE", f"{POOL}/profile"): O,
    ("POST", "/v1/cost/corrections"): O,
    ("GET", "/v1/audit"): A,
    ("GET", "/v1/keys"): A,
    ("POST", "/v1/keys"): A,
    ("GET", "/v1/keys/{key}"): A,
    ("PATCH", "/v1/keys/{key}"): A,
    ("DELETE", "/v1/keys/{key}"): A,
    ("GET", "/v1/webhooks"): W,
    ("POST", "/v1/webhooks"): W,
    ("GET", WEBHOOK): W,
    ("PATCH", WEBHOOK): W,
    ("DELETE", WEBHOOK): W,
    ("POST", f"{WEBHOOK}/secret"): W,
    ("POST", f"{WEBHOOK}/test"): W,
    ("GET", f"{WEBHOOK}/deliveries"): W,
    ("POST", f"{WEBHOOK}/deliveries/{{event}}/redeliver"): W,
    ("GET", SESSION): S,
    ("PATCH", SESSION): S,
    ("DELETE", SESSION): S,
    ("POST", f"{SESSION}/prompts"): S,
    ("POST", f"{SESSION}/controls"): S,
    ("POST", f"{SESSION}/pause"): S,
    ("POST", f"{SESSION}/resume"): S,
    ("POST", f"{SESSION}/migrate"): SO,
    ("GET", f"{SESSION}/decisions"): S,
    ("GET", f"{SESSION}/chunks/{{index}}"): S,
    ("POST", f"{SESSION}/tickets"): S,
    ("GET", f"{SESSION}/links"): S,
    ("POST", f"{SESSION}/links"): S,
    ("DELETE", f"{SESSION}/links/{{link}}"): S,
    ("POST", f"{SESSION}/recording"): S,
    ("DELETE", f"{SESSION}/recording"): S,
    ("GET", "/v1/recordings"): T,
    ("GET", RECORDING): R,
    ("DELETE", RECORDING): R,
    ("GET", f"{RECORDING}/video.mp4"): R,
    ("GET", f"{RECORDING}/playlist.m3u8"): R,
    ("GET", f"{RECORDING}/inits/{{part}}.mp4"): R,
    ("GET", f"{RECORDING}/segments/{{chunk}}.m4s"): R,
    ("GET", f"{RECORDING}/poster.jpg"): R,
    ("GET", f"{RECORDING}/contact-sheet.jpg"): R,
    ("GET", f"{SESSION}/events"): S,
    ("GET", f"{SESSION}/stream.mp4"): S,
    ("GET", f"{SESSION}/stream"): U,
    ("WEBSOCKET", f"{SESSION}/stream"): S,
    ("POST", WHEP): S,
    ("OPTIONS", WHEP): S,
    ("DELETE", f"{WHEP}/{{peer}}"): S,
}
FILES = {"/page": "/pool.css", "/page/client": "/index.js", "/docs/swagger-ui": "/swagger-ui.css"}
"""Folder of static files → one of them."""
LASTING = {f"{SESSION}/events", f"{SESSION}/stream.mp4"}
BODIES: dict[str, Any] = {
    "/v1/sessions": {"prompt": "a blue square"},
    f"{SESSION}/prompts": {"prompt": "a green square"},
    f"{SESSION}/controls": {"name": "steer", "value": "left"},
    f"{SESSION}/migrate": {},
    f"{POOL}/override": {"workers": 1},
    f"{POOL}/dry-run": {"dry_run": False},
    "/v1/cost/corrections": {"gpu_seconds": 1.0, "reason": "a test"},
    "/v1/keys": {"tenant": "acme", "scopes": ["sessions:read"]},
    "/v1/webhooks": {"url": "https://hooks.example.com/x"},
    WEBHOOK: {"label": "x"},
}
REQUEST_ID = "x-request-id"
VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
NOT_A_KEY = {
    "no key": {},
    "an unknown key": {"Authorization": "Bearer key-of-nobody-0000000000"},
    "an empty key": {"Authorization": "Bearer"},
    "another scheme": {"Authorization": f"Basic {KEYS['alice']}"},
    "a key and more": {"Authorization": f"Bearer {KEYS['alice']} x"},
    "a part of a key": {"Authorization": f"Bearer {KEYS['alice'][:-1]}"},
    "bytes": {"Authorization": b"Bearer \xff\xfe"},
    "a tenant's name": {"Authorization": "Bearer alice"},
}


def routes() -> set[tuple[str, str]]:
    """Return every verb and path of the application, also those absent from its OpenAPI."""
    settings = Settings()
    app = create_app(create_gateway(settings, object(), object(), dict))  # type: ignore[arg-type]
    return {pair for route in app.routes for pair in taken_by(route)}


def taken_by(route: BaseRoute, prefix: str = "") -> set[tuple[str, str]]:
    if isinstance(route, Mount):
        return {("GET", prefix + route.path)}
    if isinstance(route, WebSocketRoute):
        return {("WEBSOCKET", prefix + route.path)}
    if isinstance(route, Route):
        return {(method, prefix + route.path) for method in route.methods or () if method != "HEAD"}
    # FastAPI keeps the routes of an included router in that router. Their paths have its prefix, and not
    # those of the routers around it.
    router = route.original_router  # type: ignore[attr-defined]
    found: set[tuple[str, str]] = set()
    for inner in router.routes:
        found |= taken_by(
            inner, prefix if isinstance(inner, Route | WebSocketRoute) else prefix + router.prefix
        )
    return found


@pytest.fixture(scope="module")
def session(target: Target) -> Iterator[str]:
    """A session of alice."""
    name = target.session()
    yield name
    target.end(name)


@pytest.fixture(scope="module")
def unknown(session: str) -> str:
    """Return an id of no session, as long as a session's."""
    return session[:-6] + "".join("x" if letter != "x" else "y" for letter in session[-6:])


def of(access: Access) -> list[tuple[str, str]]:
    return sorted(key for key, value in TABLE.items() if value is access and key[0] != "WEBSOCKET")


def sessions_of(path: str, *names: str) -> tuple[str, ...]:
    """Return the names, or one of them if the path has none: the requests would be the same."""
    return names if "{session}" in path else names[:1]


def ask(
    client: httpx.Client, verb: str, path: str, session: str, headers: Any = (), **options: Any
) -> httpx.Response:
    """Send one request, with the body that the route accepts. Of an endless answer only the head is read."""
    if path in BODIES and verb not in ("GET", "HEAD", "TRACE"):
        options.setdefault("json", BODIES[path])
    elif path == SESSION and verb == "PATCH":
        options.setdefault("json", {"max_lead_s": 2.0})
    elif path == "/v1/keys/{key}" and verb == "PATCH":
        options.setdefault("json", {"limits": {"slots": 3}})
    elif path == f"{POOL}/profile" and verb == "PUT":
        options.setdefault("json", profile())
    elif path == WHEP and verb == "POST" and "content" not in options:
        options["content"], headers = an_offer(), {"Content-Type": "application/sdp", **dict(headers)}
    address = path + FILES.get(path, "")
    for name, value in (
        ("{session}", session),
        ("{pool}", "local"),
        ("{key}", SPARE_KEY),
        ("{link}", "lnk_none"),
        ("{peer}", "peer_none"),
        ("{index}", "0"),
        ("{recording}", "rec_none"),
        ("{webhook}", "wh_none"),
        ("{event}", "ev_none"),
        ("{part}", "1"),
        ("{chunk}", "0"),
    ):
        address = address.replace(name, value)
    request = client.build_request(verb, address, headers=dict(headers), **options)
    answer = client.send(request, stream=True)
    try:
        if answer.status_code != 200 or path not in LASTING:
            answer.read()
    finally:
        answer.close()
    return answer


def profile() -> Any:
    from turboserve.autoscaler.control.policy import default_table

    return json.loads(default_table().to_file())


def shown(answer: httpx.Response, *names: str) -> tuple[int, dict[str, str], str]:
    """Return everything that a client sees of an answer but the time and the ids of session and request."""
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", REQUEST_ID)}
    text = answer.text.replace(answer.headers[REQUEST_ID], "REQUEST")
    for name in names:
        text = text.replace(name, "ID")
    return answer.status_code, headers, text


def test_every_route_is_in_the_table(target: Target) -> None:
    assert routes() == set(TABLE)
    with target.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    told = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs}
    assert told <= set(TABLE)
    untold = {(verb, path) for verb, path in set(TABLE) - told if path.startswith("/v1")}
    assert untold == {("GET", f"{SESSION}/stream"), ("WEBSOCKET", f"{SESSION}/stream")}


@pytest.mark.parametrize(("verb", "path"), of(Access.PUBLIC))
def test_public_routes_reveal_no_session(target: Target, session: str, verb: str, path: str) -> None:
    with target.client() as client:
        answer = ask(client, verb, path, session)
    assert answer.status_code == 200
    assert session not in answer.text


@pytest.mark.parametrize(("verb", "path"), of(Access.UPGRADE))
def test_a_socket_address_is_the_same_for_every_session(
    target: Target, session: str, unknown: str, verb: str, path: str
) -> None:
    """Owner, another tenant and an operator get one answer, for existing and for unknown sessions."""
    seen = []
    for tenant in KEYS:
        with target.client(tenant) as client:
            for name in (session, unknown):
                answer = ask(client, verb, path, name)
                assert (answer.status_code, answer.json()["code"]) == (426, "upgrade_required")
                seen.append(shown(answer, name))
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", NOT_A_KEY)
def test_without_a_key_nothing_is_revealed(
    target: Target, session: str, unknown: str, kind: str, every: int
) -> None:
    """Every route is asked without a header. Each of the headers goes to another fifth of the routes.

    `make soak` sends every header to every route.
    """
    headers, first = NOT_A_KEY[kind], [*NOT_A_KEY].index(kind)
    with target.client() as client:
        for number, ((verb, path), access) in enumerate(TABLE.items()):
            if access is Access.PUBLIC or verb == "WEBSOCKET":
                continue
            if headers and number % every != first % every:
                continue
            names = sessions_of(path, session, unknown)
            answers = [ask(client, verb, path, name, headers) for name in names]
            for answer in answers:
                assert answer.status_code == 401, (verb, path, answer.text)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.json()["code"] == "unauthorized"
            assert shown(answers[0], session) == shown(answers[-1], unknown)


CONTENTS = (b"{", b"", b"\xff\xfe", b"[" * 5_000, b'{"prompt": 5}')
KINDS = ("application/json", "text/plain", "multipart/form-data; boundary=x")
BODIES_WITHOUT_KEY = [
    # Every content and every kind. `make soak` sends every content as every kind.
    pytest.param(content, kind, marks=[] if CONTENTS[0] == content or kind == KINDS[0] else pytest.mark.soak)
    for content in CONTENTS
    for kind in KINDS
]


@pytest.mark.parametrize(("content", "kind"), BODIES_WITHOUT_KEY)
def test_a_body_is_not_read_before_the_key(target: Target, session: str, content: bytes, kind: str) -> None:
    with target.client() as client:
        for (verb, path), access in TABLE.items():
            if verb in ("POST", "PUT", "PATCH", "DELETE") and access is not Access.PUBLIC:
                answer = ask(client, verb, path, session, {"Content-Type": kind}, content=content, json=None)
                assert answer.status_code == 401, (verb, path, kind, answer.text)


def test_a_foreign_session_is_one_that_does_not_exist(target: Target, session: str, unknown: str) -> None:
    with target.client("alice") as alice:
        before = alice.get(f"/v1/sessions/{session}").json()
    for tenant in ("bob", "operator"):
        with target.client(tenant) as client:
            for verb, path in of(Access.SESSION) + (
                of(Access.SESSION_OR_OPERATOR) if tenant == "bob" else []
            ):
                foreign, none = (ask(client, verb, path, name) for name in (session, unknown))
                assert foreign.status_code == 404, (tenant, verb, path, foreign.text)
                assert foreign.json()["code"] == "session_not_found"
                assert shown(foreign, session) == shown(none, unknown), (verb, path)
                heads = [ask(client, "HEAD", path, name) for name in (session, unknown)]
                assert shown(heads[0], session) == shown(heads[1], unknown), path
            foreign, none = (client.get("/v1/cost", params={"session": name}) for name in (session, unknown))
            assert foreign.status_code == 404
            assert shown(foreign, session) == shown(none, unknown)
    with target.client("alice") as alice:
        after = alice.get(f"/v1/sessions/{session}").json()
    # No viewer watches it: it may be suspended meanwhile, but no other caller has ended or paused it.
    assert after["phase"] in ("active", "suspended")
    assert after["activity"] in ("watching", "idle")
    for volatile in (
        "next_chunk",
        "playhead_s",
        "updated_at",
        "activity",
        "phase",
        "worker",
        "epoch",
        "reason",
        # The events of becoming idle and of suspension.
        "newest_event",
    ):
        before.pop(volatile), after.pop(volatile)
    assert before == after


def test_lists_tell_of_ones_own_alone(target: Target, session: str) -> None:
    for tenant in ("alice", "bob", "operator"):
        with target.client(tenant) as client:
            for verb, path in of(Access.TENANT):
                if verb == "GET":
                    answer = ask(client, verb, path, session)
                    assert answer.status_code == 200, (tenant, path, answer.text)
                    own = tenant == "alice" and path == "/v1/sessions"
                    assert (session in answer.text) == own or path == "/v1/cost", (tenant, path)
                    assert tenant == "alice" or session not in answer.text, (tenant, path)
                    assert not any(key in answer.text for key in KEYS.values())


def test_the_owner_may(target: Target) -> None:
    """After all refusals, each call with its own key gets its proper answer."""
    name = target.session()
    with target.client("alice") as client:
        # A session is active before its first chunk is in the log.
        eventually_blocking(lambda: client.get(f"/v1/sessions/{name}/chunks/0").status_code == 200)
        for verb, path in sorted(
            of(Access.SESSION), key=lambda one: (one[0] == "DELETE", "resume" in one[1])
        ):
            answer = ask(client, verb, path, name)
            # There is no such link, and no such viewer.
            expected = (404,) if "{link}" in path or "{peer}" in path else (200, 201, 202, 204)
            assert answer.status_code in expected, (verb, path, answer.text)
        answer = ask(client, "POST", "/v1/sessions", name)
        assert answer.status_code == 201
        target.end(answer.json()["id"])


def test_only_admins_order_keys(target: Target, session: str) -> None:
    for tenant in ("alice", "bob", "operator"):
        with target.client(tenant) as client:
            for verb, path in of(Access.ADMIN):
                answer = ask(client, verb, path, session)
                assert (answer.status_code, answer.json()["code"]) == (403, "missing_scope"), (verb, path)
                assert answer.json()["limit"] == Scope.ADMIN
    with target.client("admin") as client:
        # DELETE comes last: it revokes the key that the others read.
        for verb, path in sorted(of(Access.ADMIN), reverse=True):
            answer = ask(client, verb, path, session)
            assert answer.status_code == (201 if verb == "POST" else 200), (verb, path, answer.text)
            if verb == "POST":
                assert client.delete(answer.headers["location"]).status_code == 200


def test_only_the_scope_opens_webhooks_and_only_of_its_tenant(target: Target, session: str) -> None:
    for tenant in ("alice", "bob", "operator"):
        with target.client(tenant) as client:
            for verb, path in of(Access.WEBHOOK):
                answer = ask(client, verb, path, session)
                assert (answer.status_code, answer.json()["code"]) == (403, "missing_scope"), (verb, path)
                assert answer.json()["limit"] == Scope.WEBHOOKS_WRITE
    with target.client("admin") as admin, target.client("hooks") as hooks:
        made = ask(hooks, "POST", "/v1/webhooks", session)
        assert made.status_code == 201, made.text
        assert made.json()["secret"].startswith("whsec_")
        own = made.json()["id"]
        foreign = own[:-6] + "x" * 6
        assert [one["id"] for one in hooks.get("/v1/webhooks").json()["webhooks"]] == [own]
        # A key with all scopes is of another tenant: for it, the webhook does not exist.
        assert admin.get("/v1/webhooks").json()["webhooks"] == []
        for verb, path in of(Access.WEBHOOK):
            if "{webhook}" in path:
                real, none = (
                    ask(admin, verb, path.replace("{webhook}", name), session, json={"label": "x"})
                    if verb == "PATCH"
                    else ask(admin, verb, path.replace("{webhook}", name), session)
                    for name in (own, foreign)
                )
                assert real.status_code == 404, (verb, path, real.text)
                assert shown(real, own) == shown(none, foreign), (verb, path)
        for text in ("http://a.example/", "https://127.0.0.1/", "https://[::1]/", "https://169.254.169.254/"):
            answer = hooks.post("/v1/webhooks", json={"url": text})
            assert (answer.status_code, answer.json()["field"]) == (422, "url"), text
        assert "secret" not in hooks.get(f"/v1/webhooks/{own}").json()
        assert hooks.delete(f"/v1/webhooks/{own}").status_code == 204


def test_only_operators_order(target: Target, session: str) -> None:
    for tenant in ("alice", "bob"):
        with target.client(tenant) as client:
            for verb, path in of(Access.OPERATOR):
                answer = ask(client, verb, path, session)
                assert (answer.status_code, answer.json()["code"]) == (403, "missing_scope"), (verb, path)
                assert answer.json()["limit"] == Scope.POOL_WRITE
    with target.client("operator") as client:
        # PUT before DELETE, so that no order is left.
        for verb, path in sorted(of(Access.OPERATOR), reverse=True):
            expected = 201 if path == "/v1/cost/corrections" else 200
            assert ask(client, verb, path, session).status_code == expected, (verb, path)
        # There is one worker, so a target is searched for, and the answer reveals nothing of the session.
        answer = ask(client, "POST", f"{SESSION}/migrate", session)
        assert answer.status_code in (202, 409, 429), answer.text


def test_no_route_takes_a_key_in_the_address(target: Target, session: str) -> None:
    """Addresses end up in logs."""
    with target.client() as client:
        for (verb, path), access in TABLE.items():
            if access is Access.PUBLIC or verb == "WEBSOCKET":
                continue
            for headers in ({}, {"Authorization": "Bearer wrong"}, of_tenant("alice")):
                answer = ask(client, verb, path, session, headers, params={"access_token": KEYS["alice"]})
                assert (answer.status_code, answer.json()["code"]) == (401, "key_in_address"), (verb, path)
            # What is no ticket opens nothing, and a ticket only streams.
            answer = ask(client, verb, path, session, params={"ticket": KEYS["alice"]})
            assert answer.status_code == 401, (verb, path)


def of_tenant(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


class Grants(NamedTuple):
    """Texts for the session of alice, by role, and for another session of hers."""

    links: dict[str, str]
    tickets: dict[str, str]
    elsewhere: dict[str, str]


@pytest.fixture(scope="module")
def grants(target: Target, session: str) -> Iterator[Grants]:
    other = target.session()
    with target.client("alice") as alice:

        def link(name: str, role: str) -> str:
            return str(alice.post(f"/v1/sessions/{name}/links", json={"role": role}).json()["token"])

        def ticket(role: str) -> str:
            body = {"role": role}
            return str(alice.post(f"/v1/sessions/{session}/tickets", json=body).json()["ticket"])

        roles = [role.value for role in Role]
        yield Grants(
            {role: link(session, role) for role in roles},
            {role: ticket(role) for role in roles},
            {role: link(other, role) for role in roles},
        )
    target.end(other)


VIEWER_MAY = {
    ("GET", SESSION),
    ("POST", f"{SESSION}/tickets"),
    ("GET", f"{SESSION}/events"),
    ("GET", f"{SESSION}/stream.mp4"),
    ("GET", f"{SESSION}/stream"),
    ("POST", WHEP),
    ("OPTIONS", WHEP),
    ("DELETE", f"{WHEP}/{{peer}}"),
    ("GET", "/v1/recordings"),
    *(key for key, access in TABLE.items() if access is Access.RECORDING and key[0] == "GET"),
}
CONTROLLER_MAY = VIEWER_MAY | {
    ("POST", f"{SESSION}/recording"),
    ("DELETE", f"{SESSION}/recording"),
    ("PATCH", SESSION),
    ("POST", f"{SESSION}/prompts"),
    ("POST", f"{SESSION}/controls"),
    ("POST", f"{SESSION}/pause"),
    ("POST", f"{SESSION}/resume"),
}


@pytest.mark.parametrize(("role", "may"), [("viewer", VIEWER_MAY), ("controller", CONTROLLER_MAY)])
def test_a_link_opens_what_its_role_allows_for_its_session(
    target: Target, session: str, unknown: str, grants: Grants, role: str, may: set[tuple[str, str]]
) -> None:
    own = {"Authorization": f"Bearer {grants.links[role]}"}
    elsewhere = {"Authorization": f"Bearer {grants.elsewhere[role]}"}
    with target.client() as client:
        for (verb, path), access in sorted(TABLE.items(), key=lambda item: (item[0][0] == "DELETE", item[0])):
            if access is Access.PUBLIC or verb == "WEBSOCKET":
                continue
            answer = ask(client, verb, path, session, own)
            # The link of another session: as for a session that does not exist.
            foreign = ask(client, verb, path, session, elsewhere)
            nothing = ask(client, verb, path, unknown, own) if "{session}" in path else answer
            if path == "/v1/recordings":
                assert [one.status_code for one in (answer, foreign, nothing)] == [200, 200, 200]
                assert session not in foreign.text
            elif access is Access.RECORDING and (verb, path) in may:
                # There is no such recording.
                assert all(one.json()["code"] == "not_found" for one in (answer, foreign, nothing)), path
            elif (verb, path) in may:
                # There is no such viewer.
                expected = (404,) if "{peer}" in path else (200, 201, 202, 204, 409, 426)
                assert answer.status_code in expected, (verb, path, answer.text)
                assert foreign.status_code == 404, (verb, path, foreign.text)
                assert shown(foreign, session) == shown(nothing, unknown)
            else:
                for one in (answer, foreign, nothing):
                    assert (one.status_code, one.json()["code"]) == (403, "link_role"), (verb, path)


def test_a_ticket_opens_streams_alone(target: Target, session: str, unknown: str, grants: Grants) -> None:
    with target.client() as client:
        for (verb, path), access in TABLE.items():
            if access is Access.PUBLIC or verb == "WEBSOCKET":
                continue
            for ticket in grants.tickets.values():
                own = ask(client, verb, path, session, params={"ticket": ticket})
                foreign = own
                if "{session}" in path:
                    foreign = ask(client, verb, path, unknown, params={"ticket": ticket})
                expected = (401, 401)
                if path in LASTING:
                    expected = (200, 404)
                elif path == f"{SESSION}/stream":
                    expected = (426, 404)
                elif path.startswith(WHEP):
                    expected = ({"POST": 201, "OPTIONS": 204, "DELETE": 404}[verb], 404)
                assert (own.status_code, foreign.status_code) == expected, (verb, path)
    for role, ticket in grants.tickets.items():
        first, _ = socket_answer(target, session, ticket=ticket)
        assert (first["type"], first["role"]) == ("hello", role)
        first, closed = socket_answer(target, unknown, ticket=ticket)
        assert (first["code"], closed[0]) == ("session_not_found", 4404)


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_a_route_does_not_take(target: Target, session: str, unknown: str, verb: str) -> None:
    """The answer is 405 with the accepted verbs, and the same for known and unknown sessions."""
    declared: dict[str, set[str]] = {}
    for method, path in TABLE:
        if method != "WEBSOCKET":
            declared.setdefault(path, set()).add(method)
    for tenant in ("bob", "alice"):
        with target.client(tenant) as client:
            for path, methods in declared.items():
                if verb in methods or (verb == "HEAD" and "GET" in methods):
                    continue
                answers = [ask(client, verb, path, name) for name in sessions_of(path, session, unknown)]
                there = answers[0]
                assert there.status_code == 405, (verb, path, there.text)
                assert shown(there, session) == shown(answers[-1], unknown)
                allowed = set(re.split(r",\s*", there.headers["allow"]))
                assert allowed - {"HEAD"} == methods, (verb, path, allowed)


def test_head_is_get_without_a_body(target: Target, session: str) -> None:
    with target.client("alice") as client:
        for verb, path in TABLE:
            if verb != "GET" or path.startswith(SESSION + "/stream") or path in LASTING:
                continue
            head, got = ask(client, "HEAD", path, session), ask(client, "GET", path, session)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers.get("content-type") == got.headers.get("content-type"), path


def socket_answer(target: Target, session: str, headers: Any = None, **query: str) -> tuple[Any, Any]:
    """Return the first message of a stream, and how it closed if it did."""
    address = str(
        httpx.URL(target.url.replace("http", "ws", 1) + f"/v1/sessions/{session}/stream", params=query)
    )
    with connect(address, additional_headers=headers, max_size=None, open_timeout=PATIENCE_S) as socket:
        first = json.loads(socket.recv(timeout=PATIENCE_S))
        closed = None
        if first["type"] == "error":
            with suppress(websockets.ConnectionClosed):
                socket.recv(timeout=PATIENCE_S)
            closed = (socket.close_code, socket.close_reason)
    return first, closed


def test_streams_are_for_the_owner_alone(target: Target, session: str, unknown: str) -> None:
    def told(name: str, headers: Any = None, **query: str) -> Any:
        first, closed = socket_answer(target, name, headers, **query)
        if first["type"] == "error":
            assert first.pop("request_id")
        return json.loads(json.dumps(first).replace(name, "ID")), closed

    refused = [{}, {"ticket": "key-of-nobody"}, {"ticket": ""}, {"ticket": "\0"}, {"ticket": KEYS["alice"]}]
    for query in refused:
        first, closed = told(session, **query)
        assert (first["code"], closed[0]) == ("unauthorized", 4401)
        assert (first, closed) == told(unknown, **query)
    for tenant in ("bob", "operator"):
        for more in ({}, {"after": "-1"}, {"after": "5", "events_after": "0"}):
            first, closed = told(session, of_tenant(tenant), **more)
            assert (first["code"], closed[0]) == ("session_not_found", 4404)
            assert (first, closed) == told(unknown, of_tenant(tenant), **more)
    assert told(session, of_tenant("alice"))[0]["type"] == "hello"
    for headers in (None, of_tenant("alice")):
        first, closed = told(session, headers, access_token=KEYS["alice"])
        assert (first["code"], closed[0]) == ("key_in_address", 4401)


def test_a_foreign_recording_is_one_that_does_not_exist(target: Target, session: str) -> None:
    with target.client("alice") as alice:
        recording = alice.post(f"/v1/sessions/{session}/recording").json()["id"]
        unknown = recording[:-6] + "x" * 6
        for tenant in ("bob", "operator"):
            with target.client(tenant) as client:
                for verb, path in of(Access.RECORDING):
                    foreign, none = (
                        ask(client, verb, path.replace("{recording}", name), session)
                        for name in (recording, unknown)
                    )
                    assert foreign.status_code == 404, (tenant, verb, path, foreign.text)
                    assert shown(foreign, recording) == shown(none, unknown), (verb, path)
        assert alice.get(f"/v1/recordings/{recording}").json()["state"] == "recording"
        assert alice.delete(f"/v1/recordings/{recording}").status_code == 204
