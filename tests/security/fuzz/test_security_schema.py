"""The gateway against its OpenAPI document, by schemathesis: allowed and refused data."""

from __future__ import annotations

import time
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, CheckFunction

from tests.helpers.attack_target import KEYS, Target
from tests.helpers.hostile import NOT_DOCUMENTS

# The names must exist before the gateway does; a test compares them.
READS = tuple(
    ("GET", path)
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/models",
        "/v1/workers",
        "/v1/pools",
        "/v1/pools/{pool}",
        "/v1/pools/{pool}/orders",
        "/v1/pools/{pool}/history",
        "/v1/pools/{pool}/decisions",
        "/v1/pools/{pool}/migrations",
        "/v1/pools/{pool}/workers",
        "/v1/pools/{pool}/cost",
        "/v1/pools/{pool}/queue",
        "/v1/cost",
        "/v1/usage",
        "/v1/usage.csv",
        "/v1/keys",
        "/v1/keys/{key}",
        "/v1/sessions",
        "/v1/sessions/{session}",
        "/v1/sessions/{session}/decisions",
        "/v1/sessions/{session}/chunks/{index}",
        "/v1/sessions/{session}/links",
        "/v1/audit",
        "/v1/webhooks",
        "/v1/webhooks/{webhook}",
        "/v1/webhooks/{webhook}/deliveries",
        "/v1/recordings",
        "/v1/recordings/{recording}",
        "/v1/recordings/{recording}/video.mp4",
        "/v1/recordings/{recording}/playlist.m3u8",
        "/v1/recordings/{recording}/segments/{chunk}.m4s",
        "/v1/recordings/{recording}/inits/{part}.mp4",
        "/v1/recordings/{recording}/poster.jpg",
        "/v1/recordings/{recording}/contact-sheet.jpg",
    )
)
WRITES = (
    ("POST", "/v1/sessions"),
    ("POST", "/v1/cost/corrections"),
    ("POST", "/v1/keys"),
    ("PATCH", "/v1/keys/{key}"),
    ("DELETE", "/v1/keys/{key}"),
    ("POST", "/v1/webhooks"),
    ("PATCH", "/v1/webhooks/{webhook}"),
    ("DELETE", "/v1/webhooks/{webhook}"),
    ("POST", "/v1/webhooks/{webhook}/secret"),
    ("POST", "/v1/webhooks/{webhook}/test"),
    ("POST", "/v1/webhooks/{webhook}/deliveries/{event}/redeliver"),
    ("PUT", "/v1/pools/{pool}/override"),
    ("DELETE", "/v1/pools/{pool}/override"),
    ("PUT", "/v1/pools/{pool}/dry-run"),
    ("DELETE", "/v1/pools/{pool}/dry-run"),
    ("PUT", "/v1/pools/{pool}/profile"),
    ("DELETE", "/v1/pools/{pool}/profile"),
    ("PATCH", "/v1/sessions/{session}"),
    ("DELETE", "/v1/sessions/{session}"),
    ("POST", "/v1/sessions/{session}/prompts"),
    ("POST", "/v1/sessions/{session}/controls"),
    ("POST", "/v1/sessions/{session}/pause"),
    ("POST", "/v1/sessions/{session}/resume"),
    ("POST", "/v1/sessions/{session}/migrate"),
    ("POST", "/v1/sessions/{session}/tickets"),
    ("POST", "/v1/sessions/{session}/links"),
    ("DELETE", "/v1/sessions/{session}/links/{link}"),
    ("POST", "/v1/sessions/{session}/recording"),
    ("DELETE", "/v1/sessions/{session}/recording"),
    ("DELETE", "/v1/recordings/{recording}"),
    ("POST", "/v1/sessions/{session}/whep"),
    ("OPTIONS", "/v1/sessions/{session}/whep"),
    ("DELETE", "/v1/sessions/{session}/whep/{peer}"),
)
LASTING = (("GET", "/v1/sessions/{session}/events"), ("GET", "/v1/sessions/{session}/stream.mp4"))
"""Called only for sessions that do not exist, because their answers do not end."""
PATIENCE_S = 120.0
REFUSALS = ["400", "404", "405", "413", "415", "422"]
OPERATIONS = (*READS, *WRITES, *LASTING)
REFUSING = (
    ("GET", "/v1/workers"),
    ("GET", "/v1/pools/{pool}/history"),
    ("GET", "/v1/pools/{pool}/workers"),
    ("GET", "/v1/cost"),
    ("GET", "/v1/sessions"),
    ("POST", "/v1/sessions"),
    ("POST", "/v1/cost/corrections"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("PATCH", "/v1/keys/{key}"),
    ("POST", "/v1/webhooks"),
    ("PATCH", "/v1/webhooks/{webhook}"),
    ("PUT", "/v1/pools/{pool}/override"),
    ("PUT", "/v1/pools/{pool}/dry-run"),
    ("PUT", "/v1/pools/{pool}/profile"),
    ("POST", "/v1/sessions/{session}/prompts"),
    ("POST", "/v1/sessions/{session}/controls"),
    ("POST", "/v1/sessions/{session}/migrate"),
    *LASTING,
)
"""Operations with input that a schema can forbid: any text is a valid session id to ask for."""
ANSWERS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@schemathesis.serializer("application/sdp")
def sdp(_: Any, value: Any) -> bytes:
    """An offer is text, of any kind here."""
    return str(value).encode()


@pytest.fixture(scope="module")
def schema(target: Target) -> Any:
    with target.client("admin") as client:
        document = client.get("/openapi.json").json()
        deadline = time.monotonic() + PATIENCE_S
        # For its first seconds, a gateway answers 503 for an unknown pool, whose report may be on its way.
        while client.get("/v1/pools/nowhere").status_code != 404:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=target.url)
    # Keys have tests of their own. Unknown query parameters are ignored, as is usual.
    schema.config.generation.update(with_security_parameters=False, allow_extra_parameters=False)
    schema.config.checks.negative_data_rejection.expected_statuses = REFUSALS
    return schema


def check_function(name: str) -> CheckFunction:
    found = CHECKS.get_one(name)
    assert not isinstance(found, type), name
    return found


def hold(target: Target, operation: Any, mode: GenerationMode, examples: int) -> None:
    """Call `operation` with data that its schema allows (or forbids), and check the answers against it."""
    checks = [check_function(name) for name in ANSWERS]
    if mode is GenerationMode.NEGATIVE:
        checks.append(check_function("negative_data_rejection"))
    key = {"Authorization": f"Bearer {KEYS['admin']}"}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def each(case: schemathesis.Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE and "pool" in case.path_parameters:
            case.path_parameters["pool"] = "local"
        answer = case.call(session=connection, headers=key, timeout=PATIENCE_S)
        # Corrections of cost are created as well, and have no address of their own.
        for location in answer.headers.get("location", ()):
            connection.delete(f"{target.url}{location}", headers=key)
        case.validate_response(answer, checks=checks)

    with requests.Session() as connection:
        each()


def test_all_operations_are_held(schema: Any) -> None:
    told = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert told == set(OPERATIONS)


@pytest.mark.parametrize(("verb", "path"), OPERATIONS)
def test_answers_are_as_configured(target: Target, schema: Any, verb: str, path: str) -> None:
    hold(target, schema[path][verb], GenerationMode.POSITIVE, 2)


@pytest.mark.parametrize(("verb", "path"), REFUSING)
def test_what_is_not_allowed_is_refused(target: Target, schema: Any, verb: str, path: str) -> None:
    hold(target, schema[path][verb], GenerationMode.NEGATIVE, 3)


@pytest.mark.soak
@pytest.mark.parametrize(("verb", "path"), OPERATIONS)
def test_both_at_length(target: Target, schema: Any, verb: str, path: str) -> None:
    hold(target, schema[path][verb], GenerationMode.POSITIVE, 300)
    if (verb, path) in REFUSING:
        hold(target, schema[path][verb], GenerationMode.NEGATIVE, 300)


BODIES = (
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "seed": 1e400}',
    b'{"prompt": "a", "seed": NaN}',
    b'{"prompt": "a", "metadata": {"\\u0000": "x"}}',
    b'{"prompt": "a", "metadata": {"a": "\\ud800"}}',
    *NOT_DOCUMENTS,
)
KINDS = (
    "application/json",
    "application/json; charset=utf-16",
    "application/problem+json",
    "APPLICATION/JSON;;;",
    "text/plain",
    "multipart/form-data",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "",
    "/",
    "a" * 4_000,
)


EXAMPLES = {
    "{session}": "ses_nobody",
    "{pool}": "local",
    "{key}": "no_key",
    "{link}": "lnk_nobody",
    "{recording}": "rec_nobody",
    "{webhook}": "wh_nobody",
    "{event}": "ev_nobody",
    "{index}": "0",
    "{chunk}": "0",
    "{part}": "0",
}


def example(path: str) -> str:
    for name, value in EXAMPLES.items():
        path = path.replace(name, value)
    return path


SHARES = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
"""A fifth of the hostile inputs goes to most operations. `make soak` sends every input to every operation."""
PROMPTS = {("POST", "/v1/sessions"), ("POST", "/v1/sessions/{session}/prompts")}
"""Operations that read most of what the bodies hold."""
RARE = "{index}", "{event}", "{link}", "{chunk}", "{part}"
"""Parts of addresses that few operations have."""


@SHARES
def test_bodies_that_no_schema_describes(target: Target, every: int) -> None:
    inputs = [(body, KINDS[0]) for body in BODIES] + [(b'{"x": 1}', kind) for kind in KINDS]
    with target.client("admin") as client:
        for number, (verb, path) in enumerate(WRITES):
            step = 1 if (verb, path) in PROMPTS else every
            for body, kind in inputs[number % step :: step]:
                answer = client.request(
                    verb, example(path), content=body[:60_000], headers={"Content-Type": kind}
                )
                if "location" in answer.headers:
                    client.delete(answer.headers["location"])
                assert answer.status_code < 500, (verb, path, body[:80], kind, answer.text)


TEXTS_IN_ADDRESS = (
    "%00",
    "%ff",
    "%ed%a0%80",
    "..%2f",
    "%0d%0aX:%20y",
    "a" * 5_000,
    "1e400",
    "NaN",
    "-1",
    "%F0%9F%8E%AC",
)


@SHARES
def test_addresses_and_headers_that_no_schema_describes(target: Target, every: int) -> None:
    with target.client("admin") as client:
        for number, (verb, path) in enumerate(OPERATIONS):
            whole = (verb, path) == ("GET", "/v1/sessions") or any(name in path for name in RARE)
            step = 1 if whole else every
            for text in TEXTS_IN_ADDRESS[number % step :: step]:
                in_query = f"{example(path)}?{PARAMETERS}"
                in_path = [path.replace(name, text) for name in EXAMPLES if name in path]
                for where in (*in_path, in_query):
                    answer = client.request(verb, where.replace("VALUE", text))
                    assert answer.status_code < 500 or path == "/readyz", (verb, where, answer.text)
        for name in ("Idempotency-Key", "Last-Event-ID", "Accept", "traceparent", "Range", "X-Forwarded-For"):
            for value in (b"\xff\xfe", b"", b"a" * 4_000, b"00-x", b"bytes=9-1", b"-1"):
                for verb, path in (
                    ("POST", "/v1/sessions"),
                    ("GET", "/v1/sessions/ses_x/events"),
                    ("GET", "/"),
                ):
                    answer = client.request(verb, path, headers={name.encode(): value}, json={"prompt": "a"})
                    if "location" in answer.headers:
                        client.delete(answer.headers["location"])
                    assert answer.status_code < 500, (name, value, answer.text)


PARAMETERS = "&".join(
    f"{name}=VALUE"
    for name in ("limit", "after", "phase", "session", "include_gone", "ticket", "access_token", "tenant")
)
