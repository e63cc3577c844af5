"""The checked-in OpenAPI and AsyncAPI documents are those of the code, and complete, with true examples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from turboserve.cli.reference.api_documents import DOCUMENTS, text_of, update
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.public_events import SCHEMAS
from turboserve.gateway.stream import client_messages

DOCS = Path(__file__).parents[2] / "docs"
REMEDY = "run `.venv/bin/turboserve reference --update docs`"
OPENAPI = DOCUMENTS["reference/openapi.json"]()
ASYNCAPI = DOCUMENTS["reference/asyncapi.json"]()
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, operations in OPENAPI["paths"].items()
    for method, operation in operations.items()
}
JSON = "application/json"
WITHOUT_JSON = {
    "export_usage",
    "get_session_video",
    "follow_session_events",
    "get_metrics",
    "delete_recording",
    "delete_webhook",
    "watch_over_webrtc",
    "get_webrtc_servers",
    "leave_webrtc",
    *(
        f"get_recording_{item}"
        for item in ("video", "playlist", "init", "segment", "poster", "contact_sheet")
    ),
}
"""Operations whose answers are video, pictures, server-sent events, text, or nothing."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_checked_in_document_is_that_of_the_code(name: str) -> None:
    assert (DOCS / name).read_text() == text_of(DOCUMENTS[name]()), REMEDY


def test_a_stale_document_is_written_and_a_true_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each document is made once.
    for name, made in [*DOCUMENTS.items()]:
        monkeypatch.setitem(DOCUMENTS, name, cache(made))
    files = {tmp_path / name for name in DOCUMENTS}
    assert set(update(tmp_path)) == files
    assert update(tmp_path) == []
    stale = tmp_path / "reference" / "openapi.json"
    stale.write_text("{}")
    assert update(tmp_path) == [stale]
    assert stale.read_text() == (DOCS / "reference" / "openapi.json").read_text()


def test_operation_ids_are_unique_names() -> None:
    ids = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(ids) == len(set(ids)) > 20
    assert all(re.fullmatch("[a-z]+(_[a-z0-9]+)+", one) for one in ids)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_operation_and_parameter_is_described_with_an_example(operation: dict[str, Any]) -> None:
    assert operation["summary"]
    assert operation["description"].endswith(".")
    assert set(operation["tags"]) <= {tag["name"] for tag in OPENAPI["tags"]}
    for parameter in operation.get("parameters", []):
        assert parameter["description"], parameter["name"]
        valid = Draft202012Validator({**parameter["schema"], "components": OPENAPI["components"]})
        assert parameter["schema"]["examples"], parameter["name"]
        for example in parameter["schema"]["examples"]:
            valid.validate(example)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_body_and_good_answer_has_a_true_example(operation: dict[str, Any]) -> None:
    good = [answer for status, answer in operation["responses"].items() if status < "300"]
    bodies = [operation["requestBody"]] if "requestBody" in operation else []
    contents = [part["content"][JSON] for part in (*bodies, *good) if JSON in part.get("content", {})]
    assert contents or operation["operationId"] in WITHOUT_JSON
    for content in contents:
        schema = {**content["schema"], "components": OPENAPI["components"]}
        Draft202012Validator(schema).validate(content["example"])
    for answer in operation["responses"].values():
        assert answer["description"]
        assert answer["description"] != "Successful Response" or JSON not in answer.get("content", {})


def fields(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, schema in document["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            yield name, field, described


@pytest.mark.parametrize("document", [OPENAPI, ASYNCAPI], ids=["OpenAPI", "AsyncAPI"])
def test_every_schema_and_field_is_described_with_an_example(document: dict[str, Any]) -> None:
    found = list(fields(document))
    assert len(found) > 80
    assert [(name, field) for name, field, described in found if not described.get("description")] == []
    # An object's example is that of its fields.
    silent = [
        (name, field)
        for name, field, described in found
        if "const" not in described and not {"examples", "$ref"} & set(re.findall(r"[$\w]+", str(described)))
    ]
    assert silent == []
    undescribed = [
        name for name, schema in document["components"]["schemas"].items() if not schema.get("description")
    ]
    assert undescribed == []


def test_references_lead_to_schemas() -> None:
    for document in (OPENAPI, ASYNCAPI):
        found = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
        assert found == set(document["components"]["schemas"])


# The messages of the stream


def test_the_stream_has_every_event_and_message() -> None:
    assert set(SCHEMAS) == set(get_args(SessionEvent))
    for kind, schema in SCHEMAS.items():
        assert schema.model_fields["type"].default == kind.model_fields["type"].default
    assert set(client_messages.CLIENT_MESSAGES) == set(get_args(client_messages.ClientMessage))
    kinds = {message["name"] for message in ASYNCAPI["components"]["messages"].values()}
    assert {"hello", "chunk", "error", "prompt.superseded", "playhead", "first_frame", "fragment"} <= kinds
    operations = ASYNCAPI["operations"].values()
    used = [reference["$ref"].rpartition("/")[2] for one in operations for reference in one["messages"]]
    assert sorted(used) == sorted(kinds)


@pytest.mark.parametrize("name", [*ASYNCAPI["components"]["messages"]])
def test_every_message_has_a_true_example(name: str) -> None:
    message = ASYNCAPI["components"]["messages"][name]
    assert message["summary"]
    if message.get("contentType") == "video/mp4":
        return
    schema = {**message["payload"], "components": ASYNCAPI["components"]}
    for example in message["examples"]:
        Draft202012Validator(schema).validate(example["payload"])
        assert example["payload"]["type"] == name


@pytest.mark.parametrize("kind", client_messages.CLIENT_MESSAGES, ids=lambda kind: kind.__name__)
def test_the_gateway_reads_the_example_of_each_message(kind: Any) -> None:
    name = get_args(kind.model_fields["type"].annotation)[0]
    [example] = ASYNCAPI["components"]["messages"][name]["examples"]
    assert isinstance(client_messages.read_message(json.dumps(example["payload"]), 65_536), kind)
