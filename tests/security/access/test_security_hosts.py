"""Foreign pages against a gateway without keys: DNS rebinding, cross-site requests, frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import websockets
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.pool_harness import Pool
from tests.security.access.conftest import Connect, OpenSocket
from turboserve.gateway.auth.access import Authority, HostRules, OriginRules, parse_origin

PROBLEM = "application/problem+json"
FOE = "http://foe.example"


@pytest.fixture
async def session(keyless_url: str, client: Any) -> AsyncIterator[dict[str, Any]]:
    api = client(keyless_url)
    answer = await api.post("/v1/sessions", json={"prompt": "a red circle"})
    assert answer.status_code == 201
    yield answer.json()
    await api.delete(answer.headers["location"])


async def spoken(url: str, text: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request exactly as written. Returns status, headers and body of the answer."""
    parsed = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parsed.host, parsed.port)
    try:
        writer.write(text.replace("\n", "\r\n").encode("latin-1"))
        await writer.drain()
        head, _, rest = (await asyncio.wait_for(reader.read(), 120)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, rest


FOREIGN_HOSTS = [
    "foe.example",
    "foe.example:8080",
    "localhost.foe.example",
    "127.0.0.1.foe.example",
    "foe-localhost",
    "0.0.0.0",
    "10.1.2.3:8080",
    "127.1",
    "2130706433",
    "[2001:db8::1]:80",
    "[::ffff:10.0.0.1]",
]
BROKEN_HOSTS = [
    "",
    ":80",
    "localhost:99999",
    "localhost:8o",
    "localhost@foe.example",
    "foe.example/localhost",
    "localhost foe.example",
    "localhost,foe.example",
    "[::1",
    "[::1%25lo]",
    "..",
    "a..b",
]
OWN_HOSTS = [
    "localhost",
    "LocalHost.:1",
    "app.localhost:3000",
    "127.0.0.1",
    "127.8.9.1:80",
    "[::1]:8080",
    "[::ffff:127.0.0.1]",
    "localhost:",
]


@pytest.mark.parametrize("path", ["/v1/sessions", "/", "/healthz", "/metrics", "/openapi.json"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", "HEAD"])
async def test_a_rebound_name_gets_nothing(keyless_url: str, client: Connect, method: str, path: str) -> None:
    """The page's own origin is then `http://foe.example:PORT`, so that Origin and Host agree."""
    port = httpx.URL(keyless_url).port
    answer = await client(keyless_url).request(
        method,
        path,
        headers={"Host": f"foe.example:{port}", "Origin": f"{FOE}:{port}", "Sec-Fetch-Site": "same-origin"},
    )
    assert (answer.status_code, answer.headers["content-type"]) == (421, PROBLEM)
    if method != "HEAD":
        assert (answer.json()["code"], answer.json()["field"]) == ("host_not_allowed", "Host")


async def test_hosts_as_attackers_write_them(keyless_url: str) -> None:
    async def status(host: str) -> int:
        found, headers, _ = await spoken(
            keyless_url, f"GET /v1/sessions HTTP/1.1\nHost: {host}\nConnection: close\n\n"
        )
        assert found == 200 or headers["content-type"] == PROBLEM
        return found

    assert {host: await status(host) for host in FOREIGN_HOSTS} == dict.fromkeys(FOREIGN_HOSTS, 421)
    assert {host: await status(host) for host in BROKEN_HOSTS} == dict.fromkeys(BROKEN_HOSTS, 400)
    assert {host: await status(host) for host in OWN_HOSTS} == dict.fromkeys(OWN_HOSTS, 200)


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /v1/sessions HTTP/1.0\n\n",
        "GET /v1/sessions HTTP/1.1\nConnection: close\n\n",
        "GET /v1/sessions HTTP/1.1\nHost: localhost\nHost: foe.example\nConnection: close\n\n",
        "GET http://foe.example/v1/sessions HTTP/1.1\nHost: foe.example\nConnection: close\n\n",
        "GET foe.example/v1/sessions HTTP/1.1\nHost: foe.example\nConnection: close\n\n",
    ],
)
async def test_requests_without_one_clear_host_get_nothing(keyless_url: str, request_text: str) -> None:
    status, _, body = await spoken(keyless_url, request_text)
    assert status in (400, 421)
    assert b'"sessions"' not in body


async def test_a_rebound_name_opens_no_socket(
    keyless_url: str, session: dict[str, Any], socket: OpenSocket
) -> None:
    port = httpx.URL(keyless_url).port
    for host in (f"foe.example:{port}", "foe.example", "[2001:db8::1]"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with socket(keyless_url, session["id"], {"Origin": f"http://{host}"}, name=host):
                pass
        assert refused.value.response.status_code == 421
        assert json.loads(refused.value.response.body or b"{}")["code"] == "host_not_allowed"


FOREIGN_PAGES = [
    {"Origin": FOE},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": "http://localhost:1"},
    {"Origin": "https://localhost.foe.example"},
    {"Origin": ""},
    {"Origin": FOE, "Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "whatever"},
]


@pytest.mark.parametrize("page", FOREIGN_PAGES)
async def test_a_foreign_page_changes_nothing(
    keyless_url: str, client: Connect, session: dict[str, Any], page: dict[str, str]
) -> None:
    api = client(keyless_url)
    links = session["links"]
    before = (await api.get("/v1/sessions")).json()["sessions"]
    attacks: list[tuple[str, str, Any]] = [
        ("POST", links["pause"], None),
        ("POST", links["resume"], None),
        ("POST", links["migrate"], None),
        ("DELETE", links["self"], None),
        ("POST", "/v1/sessions", {"prompt": "theirs"}),
        ("POST", links["prompts"], {"prompt": "theirs"}),
        ("PUT", "/v1/pools/local/override", {"workers": 0}),
        ("DELETE", "/v1/pools/local/profile", None),
    ]
    for method, path, body in attacks:
        answer = await api.request(method, path, json=body, headers=page)
        assert (answer.status_code, answer.headers["content-type"]) == (403, PROBLEM), path
        assert answer.json()["code"] == "forbidden_origin"
    after = (await api.get("/v1/sessions")).json()["sessions"]
    assert [one["id"] for one in after] == [one["id"] for one in before]
    [mine] = [one for one in after if one["id"] == session["id"]]
    _unchanged(mine)


@pytest.mark.parametrize("page", FOREIGN_PAGES)
async def test_a_foreign_page_opens_no_stream(
    keyless_url: str, session: dict[str, Any], socket: OpenSocket, page: dict[str, str]
) -> None:
    async with socket(keyless_url, session["id"], page) as opened:
        message = json.loads(await opened.recv())
        assert (message["type"], message["code"]) == ("error", "forbidden_origin")
        with pytest.raises(websockets.ConnectionClosed):
            await opened.recv()
        assert opened.close_code == 4403


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "",
        None,
    ],
)
async def test_what_forms_can_send_changes_nothing(
    keyless_url: str, client: Connect, session: dict[str, Any], kind: str | None
) -> None:
    """Without Origin, as an old browser sends it.

    Incident: a path without a body took effect for any type.
    """
    api = client(keyless_url)
    headers = {} if kind is None else {"Content-Type": kind}
    for path in (session["links"]["pause"], session["links"]["prompts"], "/v1/sessions"):
        answer = await api.post(path, content=b'{"prompt": "theirs"}', headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    if kind:
        assert (await api.post(session["links"]["pause"], headers=headers)).status_code == 415
    _unchanged((await api.get(session["links"]["self"])).json())


def _unchanged(session: dict[str, Any]) -> None:
    """Check that it is neither paused nor ended, with its own prompt. Unwatched, it may be idle by now."""
    assert session["activity"] in ("watching", "idle")
    assert session["phase"] in ("requested", "active", "suspended")
    assert session["prompt"] == "a red circle"


async def test_the_own_page_curl_and_players_still_work(
    keyless_url: str,
    client: Connect,
    session: dict[str, Any],
    socket: OpenSocket,
) -> None:
    api = client(keyless_url)
    own = {"Origin": keyless_url, "Sec-Fetch-Site": "same-origin"}
    typed = {"Sec-Fetch-Site": "none"}
    for headers in (own, typed, {}):
        paused = await api.post(session["links"]["pause"], headers=headers)
        assert paused.status_code == 202
        assert (await api.post(session["links"]["resume"], headers=headers)).status_code == 202
        async with socket(keyless_url, session["id"], headers) as opened:
            assert json.loads(await opened.recv())["type"] == "hello"
    # A proxy in front may have terminated TLS.
    port = httpx.URL(keyless_url).port
    answer = await api.post(
        session["links"]["prompts"],
        json={"prompt": "a blue square"},
        headers={"Host": f"localhost:{port}", "Origin": f"https://localhost:{port}"},
    )
    assert answer.status_code == 202


async def test_answers_are_neither_framed_nor_embedded_elsewhere(
    keyless_url: str, client: Connect, session: dict[str, Any]
) -> None:
    api = client(keyless_url)
    for path in ("/", "/pool", "/page/player.js", "/v1/sessions", session["links"]["self"]):
        headers = (await api.get(path)).headers
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    assert "frame-ancestors 'none'" in (await api.get("/")).headers["content-security-policy"]


async def test_configured_names_and_origins_pass_and_no_others(pool: Pool, client: Connect) -> None:
    url = pool.gateway(
        "named",
        TURBOSERVE_ALLOWED_HOSTS="Video.Example., *.apps.example",
        TURBOSERVE_CORS_ORIGINS="https://friend.example",
    )
    api = client(url)
    names = {"video.example:443": 200, "a.apps.example": 200, "apps.example": 421, "xvideo.example": 421}
    found = {name: (await api.get("/v1/models", headers={"Host": name})).status_code for name in names}
    assert found == names
    friend = {"Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"}
    for host, origin, status in (
        ("video.example", "https://friend.example", 201),
        ("video.example", "https://video.example", 201),
        ("video.example", "https://a.apps.example", 403),
        ("foe.example", "https://friend.example", 421),
    ):
        answer = await api.post(
            "/v1/sessions", json={"prompt": "x"}, headers={"Host": host, "Origin": origin}
        )
        assert answer.status_code == status, (host, origin)
        if status == 201:
            await api.delete(answer.headers["location"])
    preflight = await api.options("/v1/sessions", headers={**friend, "Access-Control-Request-Method": "POST"})
    assert preflight.headers["access-control-allow-origin"] == "https://friend.example"
    pool.stop("named")


@given(st.text(max_size=40) | st.from_regex(r"[\[\]a-z0-9.:%@/-]{0,30}", fullmatch=True))
@example("[::]")
@example("٣.example")
def test_no_name_passes_unless_it_is_of_the_loopback(text: str) -> None:
    try:
        authority = Authority.parse(text)
    except ValueError:
        return
    if HostRules((), "127.0.0.1").allows(authority):
        host = authority.host
        assert host == "localhost" or host.endswith(".localhost") or host == "::1" or host[:4] == "127."
    # A parsed authority has one spelling.
    again = f"[{authority.host}]" if ":" in authority.host else authority.host
    assert Authority.parse(again).host == authority.host


PASSING = (
    "https://friend.example",
    "http://localhost:8080",
    "https://localhost:8080",
    "http://localhost.:8080",
    "https://localhost.:8080",
)


def origin_passes(origin: str) -> bool:
    rules = OriginRules((parse_origin("https://friend.example"),))
    return rules.allows(Authority("localhost", 8080), [origin], None)


def test_the_own_origin_and_the_configured_one_pass() -> None:
    assert [origin for origin in PASSING if not origin_passes(origin)] == []


@st.composite
def near_misses(draw: st.DrawFn) -> str:
    """An origin that passes, with one character removed, replaced or inserted."""
    origin = draw(st.sampled_from(PASSING))
    at = draw(st.integers(0, len(origin) - 1))
    inserted = draw(st.text("/:.@[]%-0189ahps ", max_size=1))
    return origin[:at] + inserted + origin[at + draw(st.integers(0, 1)) :]


@given(
    st.text(max_size=30) | st.from_regex(r"https?://[\[\]a-z0-9.:%@/-]{0,20}", fullmatch=True) | near_misses()
)
def test_no_origin_passes_but_the_own_and_the_configured(origin: str) -> None:
    # White space around a header is not part of its value.
    assert not origin_passes(origin) or origin.strip().lower() in PASSING


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_an_address_may_be_called_where_all_are_bound_for_it_cannot_be_rebound(bound: str) -> None:
    rules = HostRules((), bound)
    for host, allowed in (("10.0.0.7:8080", True), ("[2001:db8::1]", True), ("foe.example", False)):
        assert rules.allows(Authority.parse(host)) == allowed
    assert not rules.allows(Authority.parse("0.0.0.0"))
