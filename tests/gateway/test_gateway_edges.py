"""The HTTP edge for new clients: probes, first calls with curl, proxies, and OpenAPI's promises."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import StartSession, Watch
from turboserve.gateway.stream import asyncapi

PROBLEM = "application/problem+json"


async def test_probes_may_ask_with_head_for_all_that_has_an_end(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    """Incident: load balancers and monitors use HEAD, and every one of these answered 405."""
    session = await start()
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/",
        "/pool",
        "/docs",
        "/v1/models",
        session["links"]["self"],
    ):
        whole, head = await api.get(path), await api.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await api.head("/v1/sessions/ses_nobody")).status_code == 404
    for path in (session["links"]["video"], session["links"]["events"]):
        refused = await api.head(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/v1/sessions/", "/v1/sessions/ses_x/", "/healthz/", "/page"])
async def test_no_redirect_uses_a_host_header_of_the_client(api: httpx.AsyncClient, path: str) -> None:
    """Incident: a missing slash was answered with a redirect to the value of the Host header."""
    for host, status in (("localhost:9", 404), ("elsewhere.example", 421)):
        answer = await api.get(path, headers={"Host": host})
        assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
        assert "location" not in answer.headers


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
async def test_a_body_that_is_not_declared_as_json_says_how_to(
    api: httpx.AsyncClient, start: StartSession, kind: str | None
) -> None:
    """Incident: the answer to `curl -d '{"prompt": …}'` said that its prompt is no dictionary."""
    session = await start()
    body = b'{"prompt": "a red circle"}'
    headers = {"Content-Type": kind} if kind else {}
    for path in ("/v1/sessions", session["links"]["prompts"], session["links"]["migrate"]):
        answer = await api.post(path, content=body, headers=headers)
        assert answer.status_code == 415
        problem = answer.json()
        assert (problem["code"], problem["field"], problem["limit"]) == (
            "unsupported_media_type",
            "Content-Type",
            "application/json",
        )


async def test_a_plain_request_to_a_websocket_route_gets_an_explanation(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    """A proxy that does not pass Upgrade on causes this.

    Incident: the answer suggested that the path is unknown.
    """
    session = await start()
    answer = await api.get(session["links"]["stream"])
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
    assert answer.json()["code"] == "upgrade_required"


async def test_names_that_are_too_long_are_shown_shortened(api: httpx.AsyncClient) -> None:
    long = "k" * 50_000
    for body in ({"prompt": "x", long: 1}, {"prompt": "x", "metadata": {long: "v"}}):
        answer = await api.post("/v1/sessions", json=body)
        assert answer.status_code == 422
        assert len(answer.content) < 1_000
    problem = answer.json()
    assert (problem["field"], problem["limit"]) == ("metadata", 64)
    assert len((await api.get(f"/{long[:9000]}")).json()["detail"]) < 300


async def test_a_reused_key_is_named_as_the_client_gave_it(
    start: StartSession,
    api: httpx.AsyncClient,
    watch: Watch,
) -> None:
    session = await start()
    first, other = ({"prompt": prompt} for prompt in ("a blue square", "a green square"))
    headers = {"Idempotency-Key": "one"}
    assert (await api.post(session["links"]["prompts"], json=first, headers=headers)).status_code == 202
    answer = await api.post(session["links"]["prompts"], json=other, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert answer.json()["field"] == "Idempotency-Key"
    viewer = await watch(session["id"])
    await viewer.say(type="prompt", id="mine", **first)
    await viewer.until("receipt")
    await viewer.say(type="prompt", id="mine", **other)
    error = await viewer.until("error")
    assert (error["code"], error["field"], error["id"]) == ("idempotency_key_reused", "id", "mine")


async def test_migrating_an_ended_session_is_a_conflict_and_not_unknown(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    assert (await api.delete(session["links"]["self"])).status_code == 200
    answer = await api.post(session["links"]["migrate"])
    async with asyncio.timeout(60):
        # The scheduler learns of the end a moment later.
        while answer.json().get("limit") != "terminated":
            assert answer.status_code in (409, 429, 503), answer.text
            await asyncio.sleep(0.05)
            answer = await api.post(session["links"]["migrate"])
    assert (answer.status_code, answer.json()["code"]) == (409, "transition_not_allowed")


async def test_a_gateway_serves_the_document_of_its_websocket(api: httpx.AsyncClient) -> None:
    answer = await api.get("/asyncapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == asyncapi.document()


async def test_openapi_promises_only_what_is_sent(api: httpx.AsyncClient) -> None:
    document = (await api.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for name in set(_references(document)):
        assert name.removeprefix("#/components/schemas/") in schemas
    assert "HTTPValidationError" not in schemas
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            for status in (status for status in responses if int(status) >= 400):
                if (path, status) != ("/readyz", "503"):
                    assert list(responses[status]["content"]) == [PROBLEM], (method, path, status)
            assert ("413" in responses) == (method != "get"), (method, path)
            assert ("415" in responses) == (method != "get"), (method, path)
            if path.startswith("/v1"):
                assert responses["401"]["headers"]
    assert document["paths"]["/v1/sessions"]["post"]["responses"]["201"]["headers"]["Location"]


async def test_a_body_where_none_is_read_has_its_limit_too(
    start: StartSession, api: httpx.AsyncClient
) -> None:
    session = await start()
    for method, path in (("POST", session["links"]["pause"]), ("DELETE", session["links"]["self"])):
        answer = await api.request(method, path, content=b" " * (64 * 1024 + 1))
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    left_alone = (await api.get(session["links"]["self"])).json()
    assert left_alone["activity"] != "paused"
    assert left_alone["phase"] != "terminated"


def _references(part: Any) -> list[str]:
    return [text for text in _strings(part) if text.startswith("#/components/schemas/")]


def _strings(part: Any) -> list[str]:
    if isinstance(part, dict):
        return [text for value in part.values() for text in _strings(value)]
    if isinstance(part, list):
        return [text for value in part for text in _strings(value)]
    return [part] if isinstance(part, str) else []
