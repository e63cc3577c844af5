"""The client's models have the members of the API's documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from turboserve.client import models

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
OPENAPI: dict[str, Any] = json.loads((REFERENCE / "openapi.json").read_text())["components"]["schemas"]
ASYNCAPI: dict[str, Any] = json.loads((REFERENCE / "asyncapi.json").read_text())["components"]
SCHEMAS = {
    models.SessionInfo: OPENAPI["Session"],
    models.Receipt: OPENAPI["Receipt"],
    models.Decision: OPENAPI["SessionDecision"],
    models.Ticket: OPENAPI["Ticket"],
    models.Link: OPENAPI["Link"],
    models.NewLink: OPENAPI["NewLinkText"],
    models.Migration: OPENAPI["StartedMigration"],
    models.Model: OPENAPI["Model"],
    models.Worker: OPENAPI["Worker"],
    models.Hello: ASYNCAPI["schemas"]["Hello"],
    models.End: ASYNCAPI["schemas"]["End"],
}
EXAMPLES = {
    name: message["examples"][0]["payload"]
    for name, message in ASYNCAPI["messages"].items()
    if "examples" in message
}


@pytest.mark.parametrize("model", SCHEMAS, ids=lambda model: model.__name__)
def test_every_member_of_a_model_is_documented_and_required(model: type[BaseModel]) -> None:
    schema = SCHEMAS[model]
    assert set(model.model_fields) <= set(schema["properties"])
    always = {name for name, field in model.model_fields.items() if field.is_required()}
    assert always <= set(schema["required"])


def test_phases_and_activities_are_all_known() -> None:
    session = models.SessionInfo.model_json_schema()["properties"]
    assert session["phase"]["anyOf"][0]["enum"] == OPENAPI["Phase"]["enum"]
    assert session["activity"]["anyOf"][0]["enum"] == OPENAPI["PublicActivity"]["enum"]


@pytest.mark.parametrize("name", sorted(name for name in EXAMPLES if "." in name))
def test_every_event_is_read_with_all_its_members(name: str) -> None:
    event = models.Event.model_validate(EXAMPLES[name])
    assert event.type == name
    assert set(event.more) == set(EXAMPLES[name]) - set(models.Event.model_fields)
