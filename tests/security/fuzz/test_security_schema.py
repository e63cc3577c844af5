"""What the gateway's OpenAPI says, held against the gateway by schemathesis: allowed and refused data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from attack_target import KEYS, Target
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

# Before an operation can be named, its address has to be known: what is served is what the application says.
OPERATIONS = (
    ("GET", "/v1/models"),
    ("GET", "/v1/workers"),
    ("GET", "/v1/pool"),
    ("GET", "/v1/pool/orders"),
    ("GET", "/v1/cost"),
    ("GET", "/v1/sessions"),
    ("POST", "/v1/sessions"),
    ("PUT", "/v1/pool/override"),
    ("PUT", "/v1/pool/dry-run"),
    ("PUT", "/v1/pool/table"),
    ("DELETE", "/v1/pool/table"),
    ("GET", "/v1/sessions/{session}"),
    ("DELETE", "/v1/sessions/{session}"),
    ("POST", "/v1/sessions/{session}/prompts"),
    ("POST", "/v1/sessions/{session}/pause"),
    ("POST", "/v1/sessions/{session}/resume"),
    ("POST", "/v1/sessions/{session}/migrate"),
    ("GET", "/v1/sessions/{session}/decisions"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
)
LASTING = (("GET", "/v1/sessions/{session}/events"), ("GET", "/v1/sessions/{session}/stream.mp4"))
"""Called for sessions that do not exist alone: their answers do not end."""
REFUSED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def schema(target: Target) -> Any:
    with target.client() as client:
        document = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=target.url)
    return schema


@pytest.fixture(scope="module")
def session(target: Target) -> Iterator[str]:
    name = target.session()
    yield name
    target.end(name)


def hold(target: Target, operation: Any, mode: GenerationMode, examples: int, **given_values: Any) -> None:
    """Call `operation` with data that its schema allows (or does not), and hold the answers against it."""
    checks = [CHECKS.get_one(name) for name in REFUSED]
    if mode is GenerationMode.NEGATIVE:
        checks.append(CHECKS.get_one("negative_data_rejection"))

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode, **given_values))
    def each(case: schemathesis.Case) -> None:
        made: list[str] = []
        answer = case.call(headers={"Authorization": f"Bearer {KEYS['operator']}"}, timeout=60)
        if answer.status_code == 201:
            made.append(json.loads(answer.content)["id"])
        target.end(*made, tenant="operator")
        case.validate_response(answer, checks=checks)

    each()


def test_all_operations_are_held(schema: Any) -> None:
    told = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert told == {*OPERATIONS, *LASTING}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize(("verb", "path"), [*OPERATIONS, *LASTING])
def test_answers_are_as_told(target: Target, schema: Any, verb: str, path: str, mode: GenerationMode) -> None:
    hold(target, schema[path][verb], mode, 15)


@pytest.mark.soak
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize(("verb", "path"), [*OPERATIONS, *LASTING])
def test_answers_are_as_told_at_length(target: Target, schema: Any, verb, path, mode) -> None:
    hold(target, schema[path][verb], mode, 500)
